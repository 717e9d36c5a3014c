"""Fake agents: the order of events of agent/main.py and agent/replicator.py, without their mechanics.

The real parts under them are ReplicaStore (over memory without bytes) and every message. Where this differs from the agent of
today, it is how the agent must be; test_simulation.py plants the difference as a bug and shows what it breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sim_disk import DiskUser
from sim_link import Link
from sim_push import Push
from sim_worker import FakeWorker
from sim_world import RUN_ID, Node, Snapshot

from megatron.hotswap.control import messages as m
from megatron.hotswap.errors import HotSwapError
from megatron.hotswap.replication.transfer import ReplicaStore
from megatron.hotswap.snapshot.layout import Header
from megatron.hotswap.snapshot.slots import next_slot


class FakeAgent:
    """One life of one node's agent."""

    def __init__(self, world: Any, node: Node, incarnation: str, workers: int) -> None:
        self.world = world
        self.node = node
        self.incarnation = incarnation
        self.workers = [FakeWorker(self, i) for i in range(workers)]
        self.replicas = ReplicaStore(RUN_ID, lambda wanted: None)
        self.replicas.own = self._own_slot  # type: ignore[assignment]
        self.membership: m.Membership | None = None
        self.version = 0  # of the membership that it takes part in: H2H traffic of another one is refused
        self.ended = False
        self._epoch = 0  # transfers of an ended membership are cancelled
        self._replicated: dict[int, set[tuple[int, str]]] = {}
        self._pushing: set[int] = set()  # workers whose newest copy is on its way
        self._release_after: frozenset[int] | None = None
        self._sequence = 0
        self.link = Link(self)
        self.disk = DiskUser(self)

    def begin(self) -> None:
        """Join; the workers become warm a while later."""
        config = self.world.config
        workers = len(self.workers)
        self.link.join(m.Join(m.PROTOCOL, config.run_id, config.token, self.node.name, self.incarnation, workers, self.incarnation))
        for worker in self.workers:
            self.node.after(self.world.clock.about(0.3), self._warm, worker)
        self._beat()

    def _warm(self, worker: FakeWorker) -> None:
        if worker.life == 0:
            self.say(m.WorkerReady(worker.index, f"spare-store-{worker.index}"))

    def say(self, message: m.FromAgent) -> None:
        """To the coordinator."""
        if not self.ended:
            self.world.said(type(message))
            self.link.say(message)

    def _beat(self) -> None:
        if self.ended:
            return
        self._sequence += 1
        self.say(m.Heartbeat(self._sequence))
        self.link.look()
        self.link.after(self.link.interval_s, self._beat)

    def end(self) -> None:
        """The process ends, its workers with it."""
        self.ended = True
        self.node.alive = False
        self.world.connection_closed(self)

    # ---- orders

    def obey(self, message: m.FromCoordinator) -> None:
        """One message of the coordinator."""
        if self.ended:
            return
        orders: dict[type, Callable[[Any], None]] = {
            m.Start: self._start,
            m.Halt: self._halt,
            m.Assign: self._assign,
            m.Respawn: lambda message: self.workers[message.worker].start_again(),
            m.Resume: self._resume,
            m.Commit: self._commit,
            m.Void: self._void,
            m.TakeStock: self.disk.take_stock,
            m.WriteSnapshots: self.disk.write,
            m.WriteManifest: self.disk.write_manifest,
            m.Load: self.disk.load,
        }
        if isinstance(message, m.Refused | m.Stop):
            self.end()
        elif type(message) in orders:
            orders[type(message)](message)

    def _start(self, message: m.Start) -> None:
        self.membership, self.version = message.membership, message.membership.version
        for rank, member in enumerate(message.membership.members):
            if member.incarnation == self.incarnation:
                worker = self.workers[member.worker]
                worker.rank = rank
                worker.start(self.version, message.generation)
                if message.generation is not None:
                    worker.replicated = worker.keep = message.generation
                    self._push(worker, message.generation)

    def _halt(self, message: m.Halt) -> None:
        self.replicas.frozen = True
        self.disk.cancel()
        self._epoch += 1
        self._pushing.clear()
        for worker in self.workers:
            if worker.rank is not None:
                worker.halt(message.version)
        self.say(m.ReplicaReport(message.version, self.replicas.generations()))

    def _assign(self, message: m.Assign) -> None:
        for index, rank in message.ranks.items():
            self.workers[index].assign(rank, message.version)

    def _resume(self, message: m.Resume) -> None:
        self.membership, self.version = message.membership, message.membership.version
        self.disk.cancel()
        self._replicated.clear()  # each membership asks the holders anew
        self._release_after = message.membership.held_by(self.incarnation)
        missing = {w.rank for w in self.workers if w.rank is not None} & message.sources.keys()
        left = {"count": len(missing)}
        epoch = self._epoch

        def fetched() -> None:
            left["count"] -= 1
            if left["count"] == 0 and self._epoch == epoch:
                self._go_on(message)

        if not missing:
            self._go_on(message)
        for worker in self.workers:
            if worker.rank in missing:
                self._fetch(worker, message, fetched)

    def _go_on(self, plan: m.Resume) -> None:
        for worker in self.workers:
            if worker.rank is not None:
                worker.resume(plan)
        self.replicas.go_back(plan.generation)
        self.replicas.frozen = False
        for worker in self.workers:
            if worker.rank is not None:
                self._push(worker, plan.generation)

    def _void(self, message: m.Void) -> None:
        for worker in self.workers:
            if worker.rank is not None:
                worker.void = max(worker.void, message.generation)
                if worker.replicated == message.generation:
                    worker.push_epoch += 1
                    self._pushing.discard(worker.index)
                worker.words_changed()

    def _commit(self, message: m.Commit) -> None:
        for worker in self.workers:
            if worker.rank is not None:
                worker.committed = max(worker.committed, message.generation)
                worker.words_changed()
        if self._release_after is not None and not self.replicas.frozen:
            self.replicas.drop(self._release_after)
            self._release_after = None

    # ---- H2H

    def _fetch(self, worker: FakeWorker, plan: m.Resume, done: Callable[[], None]) -> None:
        assert worker.rank is not None
        rank, generation, clock = worker.rank, plan.generation, self.world.clock
        sources = [self.world.agents[s.incarnation] for s in plan.sources[rank]]
        epoch = self._epoch

        def ask(source: FakeAgent) -> None:
            try:
                slots, slot = source.replicas.find(rank, generation)
            except HotSwapError as missing:
                self.world.checkers.on_missing(plan, source, rank, missing)
                return
            found = slots.snapshots[slot]
            takes_s, then_s = clock.about(self.world.h2h_s), clock.about(0.001)
            source.node.after(takes_s, self.to_peer, source, self.node.after, then_s, arrive, source, found)

        def arrive(source: FakeAgent, found: Snapshot) -> None:
            if self._epoch != epoch:
                return
            if found.rotten:
                self.say(m.CopyDamaged(rank, generation, plan.membership.version, source.incarnation, "checksum"))
                try_next()
                return
            same = [s for s, g in worker.held.items() if g == generation]
            slot = same[0] if same else next_slot(worker.held, -1)
            worker.held[slot] = generation
            worker.own[slot] = Snapshot(found.content, plan.membership.version)
            done()

        def try_next() -> None:
            if sources:
                source = sources.pop(0)
                self.to_peer(source, source.node.after, clock.about(0.002), ask, source)

        try_next()

    def _own_slot(self, rank: int, generation: int) -> tuple[Any, int] | None:
        """Where a rank's own snapshot is, for who takes its place while this node is still there."""
        found = ((w.own, slot) for w in self.workers if w.rank == rank for slot, s in w.own.items() if s.content.generation == generation)
        return next(((SimpleNamespace(snapshots=own), slot) for own, slot in found), None)

    def to_peer(self, peer: FakeAgent, call: Callable[..., None], *args: Any) -> None:
        """What a message between the two causes: once they reach each other."""
        self.world.network.across(self.node.name, peer.node.name, call, *args)

    def copies_changed(self) -> None:
        """A copy is complete: send it to its holder."""
        if self.replicas.frozen:
            return
        for worker in self.workers:
            if worker.rank is not None and worker.copied > worker.replicated and worker.index not in self._pushing:
                worker.replicated = worker.copied
                self._push(worker, worker.copied)

    def _push(self, worker: FakeWorker, generation: int) -> None:
        assert worker.rank is not None and self.membership is not None
        snapshot = worker.snapshot_of(generation)
        if snapshot is None:
            return
        self._pushing.add(worker.index)
        for holder in self.membership.holders_of(worker.rank):
            if (generation, holder.incarnation) not in self._replicated.setdefault(worker.rank, set()):
                Push(self, self.world.agents[holder.incarnation], worker, generation, snapshot).begin()
        self._replicated_further(worker, generation)

    def accepts(self, version: int) -> bool:
        """Whether a transfer that was begun under this membership may change what is held here."""
        return version == self.version

    def replica_snapshots(self, rank: int) -> dict[int, Snapshot]:
        """Slot -> what is there for a rank, complete. What the store has gone back behind does not count any more."""
        slots, held = self.replicas._slots.get(rank), self.replicas._complete.get(rank, {})
        snapshots = [] if slots is None else enumerate(slots.snapshots)
        return {i: s for i, s in snapshots if s is not None and held.get(i) == s.content.generation}

    def holds(self, header: Header) -> bool:
        """Whether this very snapshot is here, whole: then its sender only did not hear so."""
        return header.generation in self.replicas.generations().get(header.rank, ())

    def epoch_of(self, worker: FakeWorker) -> tuple[int, int]:
        """A transfer that began in another epoch is to be given up."""
        return self._epoch, worker.push_epoch

    def pushed(self, worker: FakeWorker, generation: int, holder: FakeAgent) -> None:
        """The holder has said OKAY."""
        assert worker.rank is not None
        self._replicated.setdefault(worker.rank, set()).add((generation, holder.incarnation))
        self._replicated_further(worker, generation)

    def _replicated_further(self, worker: FakeWorker, generation: int) -> None:
        """Once every holder has it, it is acknowledged."""
        assert worker.rank is not None and self.membership is not None
        if all((generation, h.incarnation) in self._replicated[worker.rank] for h in self.membership.holders_of(worker.rank)):
            self._pushing.discard(worker.index)
            self._acknowledge(worker, generation)
            self.copies_changed()

    def _acknowledge(self, worker: FakeWorker, generation: int) -> None:
        assert worker.rank is not None
        self.world.checkers.on_acknowledged(self, worker.rank, generation)
        worker.acknowledged = generation
        self.disk.sealed(worker.rank, generation)
        self.say(m.Acknowledged(worker.rank, generation, self.version))
        worker.words_changed()
