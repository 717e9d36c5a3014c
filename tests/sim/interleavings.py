"""Random interleavings of copy, fence, send, acknowledgement and death, one event at a time (guarantees 2, 3, 4 and 6).

`PYTHONPATH=. python tests/sim/interleavings.py SEED` repeats one.

Smaller and finer than sim_driver.py: no Control, no clock, no messages. Every rank's training thread, its copy, each transfer to
each of its R holders and the recovery are *actors*, written as generators that yield wherever another process may get ahead. Real
are the ReplicaStore of every node, control/commits.py, recovery/plan.choose, headers and the rule that picks a slot; a slot's
content is two parts, moved one at a time, so that what may be torn is torn. A snapshot is taken every N steps; where the one before
is late then, it is waited for, or the new one is skipped.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from unittest import mock

from interleaving_parts import PARTS, RUN_ID, SLOT_BYTES, Actor, Node, PartSlots, Process, Rank
from interleaving_rules import Checks
from violation import Violation

from megatron.hotswap.control.commits import Commits
from megatron.hotswap.control.messages import Acknowledged
from megatron.hotswap.errors import HotSwapError, SnapshotMismatch
from megatron.hotswap.recovery import plan
from megatron.hotswap.replication import transfer
from megatron.hotswap.snapshot.layout import Header
from megatron.hotswap.snapshot.slots import next_slot

EVENTS_MAX = 20_000


class World:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        ranks = rng.choice([2, 2, 3, 3, 4])
        self.holders_per_rank = rng.randint(1, min(2, ranks - 1))
        self.interval = rng.choice([1, 1, 2, 3])
        self.skip = rng.random() < 0.25
        self.steps = self.interval * rng.randint(2, 4)
        self.proven_by_step = rng.random() < 0.5
        self.damage_chance = rng.choice([0.0, 0.1])
        self.deaths = sorted(rng.randrange(1, 90 * ranks) for _ in range(rng.choice([1, 1, 1, 2, 3])))
        self.version = 1
        self.recovering = False
        self.nodes = [Node(f"node{i}", self.version) for i in range(ranks)]
        self.ranks = [Rank(i, node) for i, node in enumerate(self.nodes)]
        self.processes: list[Process] = []
        self.passed: dict[tuple[int, int], set[int]] = {}  # (version, step) -> ranks behind that step's fence
        self.commits = Commits(ranks)
        self.ended: str | None = None
        self.outcome = ""  # what run() returned
        self.checks = Checks(self)
        self.events = self.recoveries = 0

    # ---- the schedule

    def run(self) -> str:
        """Until training is done, or nothing is left to go back to; returns which."""
        for rank in self.ranks:
            self._take(rank, keep=-1)
            self._spawn(self.train(rank, rank.node.version), rank.node, "train")
        while self.ended is None:
            self.events += 1
            if self.deaths and self.events >= self.deaths[0]:
                self.deaths.pop(0)
                self._death()
            if all(r.done == self.steps and r.live == self.steps for r in self.ranks) and not self.recovering:
                return "done"
            self._one_event()
            if self.events > EVENTS_MAX:
                raise Violation(f"ending: nothing is decided after {EVENTS_MAX} events")
        return self.ended

    def _one_event(self) -> None:
        order = self.processes
        for _ in range(8):  # most can run: a random one is found soon
            process = order[int(self.rng.random() * len(order))] if order else None
            if process is not None and (process.waits is None or process.waits()):
                return self._resume(process)
        ready = [p for p in order if p.waits is None or p.waits()]
        if not ready:
            raise Violation(f"ending: everything waits: {[(p.kind, p.node and p.node.name) for p in order]}")
        return self._resume(self.rng.choice(ready))

    def _resume(self, process: Process) -> None:
        try:
            process.waits = next(process.actor)
        except StopIteration:
            if process in self.processes:
                self.processes.remove(process)

    def _spawn(self, actor: Actor, node: Node | None, kind: str) -> Process:
        process = Process(actor, node, kind)
        self.processes.append(process)
        return process

    def _end(self, ends: Callable[[Process], bool]) -> None:
        self.processes = [p for p in self.processes if not ends(p)]

    # ---- training: the order is that of worker/loop.py and patches/distrib_optimizer.py

    def train(self, rank: Rank, version: int) -> Actor:
        """The training thread, from the live state on."""
        while rank.live < self.steps:
            step = rank.live + 1
            yield None  # forward and backward
            yield from self.fence(rank)
            passed = self.passed.setdefault((version, step), set())
            passed.add(rank.rank)
            if self.proven_by_step:  # the all-reduce of the gradient norm stands behind every rank's fence
                yield lambda p=passed: len(p) == len(self.ranks)
            rank.live = step
            yield None
            rank.done = step
            self.checks.on_step()
            if self.due(step):
                if not self.skip and not self.proven_by_step:
                    yield from self.await_commit(rank, rank.newest)
                self._take_or_skip(rank, step)

    def due(self, step: int) -> bool:
        """Whether a snapshot is taken after this step."""
        return step % self.interval == 0

    def fence(self, rank: Rank) -> Actor:
        """Before main parameters change: the newest snapshot must be copied; and before the next one, its holders must have it."""
        newest = rank.newest
        yield lambda: rank.copied >= newest
        if self.due(rank.live + 1) and not self.skip:
            yield lambda: rank.acknowledged >= newest

    def await_commit(self, rank: Rank, generation: int) -> Actor:
        """Before the slot of an older generation is overwritten."""
        yield lambda: rank.committed >= generation

    def _take_or_skip(self, rank: Rank, generation: int) -> None:
        if not self.skip:
            self._take(rank, keep=rank.newest)
        elif rank.newest in (rank.committed, rank.void):
            self._take(rank, keep=rank.committed)
        elif not self.recovering:
            self.checks.void.add(generation)
            if self.commits.skip(generation):
                self._spawn(self.say_void(generation, self.version), None, "void")

    def _take(self, rank: Rank, keep: int) -> None:
        generation, slot = rank.live, self.pick_slot(rank.held, keep)
        rank.own.invalidate(slot)
        self.checks.on_overwrite(rank.own, slot, f"rank {rank.rank}'s own slot")
        rank.complete.discard(rank.held.get(slot, -1))
        rank.held[slot] = generation
        rank.copying = True
        self._spawn(self.copy(rank, generation, slot, keep, rank.node.version), rank.node, "copy")

    @staticmethod
    def pick_slot(held: dict[int, int], keep: int) -> int:
        """The rule of own slots."""
        return next_slot(held, keep)

    def copy(self, rank: Rank, generation: int, slot: int, keep: int, version: int) -> Actor:
        """D2H: parts of the live state, whatever it is at that moment; then the header, by the agent."""
        for part in range(PARTS):
            yield None
            rank.own.parts[slot][part] = (rank.rank, rank.live)
        rank.copied, rank.copying = generation, False
        yield None
        if rank.held.get(slot) != generation:  # skipped by another rank, and its slot is being written again
            return
        self._write_header(rank, generation, slot, version)
        rank.complete.add(generation)
        if not rank.node.halted:
            self._replicate(rank, generation, keep)

    @staticmethod
    def _write_header(rank: Rank, generation: int, slot: int, version: int) -> None:
        header = Header(RUN_ID, rank.rank, generation, bytes(32), 0, 1, rank.own.checksum(slot))
        rank.own.write_header(slot, header)
        rank.own.written_in[slot] = version

    # ---- replication: agent/main.py on one side, replication/tcp.py and ReplicaStore on the other

    def holders(self, rank: int) -> list[Node]:
        """The agents that hold replicas of a rank: those of the next ranks, each on a node of its own."""
        return [self.ranks[(rank + i) % len(self.ranks)].node for i in range(1, self.holders_per_rank + 1)]

    def _replicate(self, rank: Rank, generation: int, keep: int) -> None:
        for holder in self.holders(rank.rank):
            if (generation, holder.name) in rank.replicated:
                self._acknowledge(rank, generation)
            else:
                process = self._spawn(iter(()), rank.node, "push")  # type: ignore[arg-type]
                process.actor = self.push(rank, generation, holder, process, rank.slot_of(generation), keep)

    def push(self, rank: Rank, generation: int, holder: Node, process: Process, source: int, keep: int) -> Actor:
        """One transfer, sent again until it is acknowledged; not one of a generation that will never be committed."""
        version = rank.node.version  # no other can begin before the first event of this: a halt ends it
        while rank.void < generation:
            yield None
            process.delivered = False
            if not rank.node.alive or rank.node.halted or rank.node.version != version:
                return  # the holder was alone with it
            if not holder.alive:
                continue  # a halt will end this
            header = rank.own.header(source)
            if header is None or header.generation != generation:
                return  # given up, and its slot is used for another
            if not self.has_it(holder, header):
                try:
                    slots, slot = self._reserve(rank, holder, header, process, keep)
                except HotSwapError:
                    continue
                for part in range(PARTS):
                    yield None
                    if not holder.alive:
                        break
                    damaged = self.rng.random() < self.damage_chance
                    slots.parts[slot][part] = "damaged" if damaged else rank.own.parts[source][part]
                else:
                    process.delivered = True
                    yield None
                    if not self.take_in(holder, slots, slot, header, version):
                        continue
                if not holder.alive:
                    continue
            yield None
            if rank.node.alive and not rank.node.halted and rank.node.version == version:
                self.checks.on_acknowledged(rank, generation, holder)
                rank.replicated.add((generation, holder.name))
                self._acknowledge(rank, generation)
            return

    @staticmethod
    def has_it(holder: Node, header: Header) -> bool:
        """Whether the holder has this very snapshot: then its bytes are read and dropped."""
        try:
            slots, slot = holder.replicas.find(header.rank, header.generation)
        except SnapshotMismatch:
            return False
        return slots.header(slot) == header and not holder.replicas.frozen

    def _reserve(self, rank: Rank, holder: Node, header: Header, process: Process, keep: int) -> tuple[PartSlots, int]:
        slots, slot = holder.replicas.reserve(header, SLOT_BYTES, keep=keep)
        self.checks.on_overwrite(slots, slot, f"the replica of rank {rank.rank} at {holder.name}")  # type: ignore[arg-type]
        earlier = holder.receiving.get((rank.rank, slot))
        if earlier is not None and earlier is not process:
            self._end(lambda p: p is earlier)
        holder.receiving[rank.rank, slot] = process
        return slots, slot  # type: ignore[return-value]

    def take_in(self, holder: Node, slots: PartSlots, slot: int, header: Header, version: int) -> bool:
        """All bytes are here: check them, and only then count them as held. False: refused."""
        if not holder.alive or slots.checksum(slot) != header.crc32c:
            return False
        try:
            holder.replicas.complete(header, slot)
        except HotSwapError:
            return False
        slots.written_in[slot] = version
        return True

    def _acknowledge(self, rank: Rank, generation: int) -> None:
        if all((generation, h.name) in rank.replicated for h in self.holders(rank.rank)):
            rank.acknowledged = max(rank.acknowledged, generation)
            self.checks.on_replicated(rank.rank, generation)
            # Once the coordinator has ended this membership, its acknowledgements say nothing any more.
            if not self.recovering and self.commits.acknowledge(Acknowledged(rank.rank, generation, self.version)):
                self._spawn(self.say_committed(generation, self.version), None, "commit")

    def say_committed(self, generation: int, version: int) -> Actor:
        """The coordinator tells every agent, one after another."""
        for rank in self.rng.sample(self.ranks, len(self.ranks)):
            yield None
            if rank.node.version == version and not rank.node.halted:
                rank.committed = max(rank.committed, generation)

    def say_void(self, generation: int, version: int) -> Actor:
        """The same of a generation that some rank has skipped."""
        for rank in self.rng.sample(self.ranks, len(self.ranks)):
            yield None
            if rank.node.version == version and not rank.node.halted:
                rank.void = max(rank.void, generation)

    # ---- death and recovery

    def _death(self) -> None:
        alive = [n for n in self.nodes if n.alive]
        victim = self.rng.choice(alive)
        victim.alive = False
        self.checks.on_death()
        self._end(lambda p: p.node is victim and not p.delivered)
        self._end(lambda p: p.kind in ("recover", "fetch"))
        self.version += 1
        self.recovering = True
        self._spawn(self.recover(), None, "recover")

    def recover(self) -> Actor:
        """Halt, report, plan, replace, restore, resume; begun anew if a node dies meanwhile."""
        self.recoveries += 1
        survivors = [r for r in self.ranks if r.node.alive]
        replicas: dict[int, dict[int, list[str]]] = {}
        for rank in self.rng.sample(survivors, len(survivors)):
            yield None
            self._halt(rank)
            for protected, generations in rank.node.replicas.generations().items():
                for generation in generations:
                    replicas.setdefault(protected, {}).setdefault(generation, []).append(rank.node.name)
        for rank in survivors:
            yield lambda r=rank: not r.copying  # SnapshotEngine.complete
            yield lambda r=rank: not any(p.kind == "copy" and p.node is r.node for p in self.processes)
        holdings = [
            plan.Holdings(r.done, False, frozenset(r.complete)) if r.node.alive else plan.Holdings() for r in self.ranks
        ]
        choice = plan.choose(holdings, replicas)
        if isinstance(choice, str):
            self.checks.on_nothing_left(choice)
            self.ended = "nothing left"
            return
        self.checks.on_choice(choice.generation)
        self._replace()
        for rank in self.ranks:
            if rank.rank in choice.fetch:
                yield from self.fetch(rank, choice.generation, choice.fetch[rank.rank])
            yield None
            self._restore(rank, choice.generation)
        self._go_on(choice.generation)

    def _halt(self, rank: Rank) -> None:
        node = rank.node
        node.halted = node.replicas.frozen = True
        self._end(lambda p: p.node is node and (p.kind == "train" or (p.kind == "push" and not p.delivered)))

    def _restore(self, rank: Rank, generation: int) -> None:
        self.checks.on_restore(rank, generation)
        rank.live = rank.done = rank.copied = generation
        rank.acknowledged, rank.committed, rank.void = generation - 1, min(rank.committed, generation - 1), -1
        rank.held = {slot: there for slot, there in rank.held.items() if there <= generation}
        rank.complete = {there for there in rank.complete if there <= generation}
        rank.replicated = {entry for entry in rank.replicated if entry[0] <= generation}

    def _replace(self) -> None:
        for rank in self.ranks:
            if not rank.node.alive:
                node = Node(f"{rank.node.name.split('-')[0]}-{self.version}", self.version)
                node.halted = node.replicas.frozen = True
                self.nodes.append(node)
                self.ranks[rank.rank] = Rank(rank.rank, node, live=-1, done=None)

    def fetch(self, rank: Rank, generation: int, sources: Sequence[str]) -> Actor:
        """A rank without the generation gets it from a holder; a damaged transfer is fetched again."""
        source = self.checks.on_fetch(rank.rank, generation, sources)
        slots, there = source.replicas.find(rank.rank, generation)
        header, slot = slots.header(there), self.pick_slot(rank.held, -1)
        rank.complete.discard(rank.held.pop(slot, -1))
        rank.own.invalidate(slot)
        while True:
            for part in range(PARTS):
                yield None
                damaged = self.rng.random() < self.damage_chance
                rank.own.parts[slot][part] = "damaged" if damaged else slots.parts[there][part]  # type: ignore[attr-defined]
            if rank.own.checksum(slot) == header.crc32c:
                break
        rank.own.write_header(slot, header)
        rank.own.written_in[slot] = self.version
        rank.held[slot] = generation
        rank.complete.add(generation)

    def _go_on(self, generation: int) -> None:
        self.recovering = False
        self.commits.begin_again(generation)
        self.checks.on_resume(generation)
        for rank in self.ranks:
            rank.node.halted = rank.node.replicas.frozen = False
            rank.node.replicas.go_back(generation)
            for slots in [rank.own, *rank.node.replicas._slots.values()]:
                slots.go_back(generation)  # type: ignore[union-attr]
            rank.node.version = self.version
        for rank in self.ranks:
            self._replicate(rank, generation, keep=generation)
            self._spawn(self.train(rank, rank.node.version), rank.node, "train")


def simulate(seed: int) -> World:
    """Run one schedule.

    Raises:
        Violation: names the seed.
    """
    with mock.patch.object(transfer, "Slots", PartSlots):
        world = World(seed)
        try:
            world.outcome = world.run()
        except Exception as failure:
            raise Violation(f"seed {seed}: {type(failure).__name__}: {failure}") from failure
    return world


def main() -> None:
    """Repeat a seed."""
    world = simulate(int(sys.argv[1]))
    print(f"{world.outcome} after {world.events} events, {world.recoveries} recoveries")


if __name__ == "__main__":
    main()
