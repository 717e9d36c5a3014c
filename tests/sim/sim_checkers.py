"""The invariants, stated against the simulator's own knowledge of every memory. Numbers are those of the design's section 6.

Terms: under membership v, the *base* is the generation it began from; what lies in a slot is *obsolete* under v if it was written
before v and is not the base; *committed* under v is a generation whose own snapshot and replica were complete for every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from sim_world import Content, Snapshot
from violation import require

from megatron.hotswap.control import messages as m
from megatron.hotswap.control.state import Phase


class Checkers:
    """Called by the fakes and the driver at every event that a guarantee speaks of."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.memberships: dict[int, m.Membership] = {}
        self.base: dict[int, int] = {}  # version -> generation it began from
        self.pairs: dict[tuple[int, int], set[int]] = {}  # (version, generation) -> ranks whose snapshot and replica were complete
        self.committed: dict[int, int] = {}  # version -> newest committed generation, by truth
        self.done: dict[int, int] = {}  # rank -> newest step completed by whoever held it, in the membership that counts
        self.skipped: set[tuple[int, int]] = set()  # (version, generation) that some rank did not take
        self.peak = 0  # newest generation that all ranks had completed, ever
        self.history: list[int] = []  # generations committed, by truth, that lie on the way to the present state
        self.program_errors: dict[tuple[int, str], tuple[int, int]] = {}  # (step, text) -> (rank, version)
        self.held_errors: set[tuple[int, str]] = set()  # that were told to a coordinator which did not go on yet
        self.stepped: dict[tuple[int, int], str] = {}  # (version, rank) -> incarnation that completed steps as it
        self.reports: dict[int, dict[int, m.HaltReport]] = {}  # version -> what its plan was made from
        self.newest_step_of = 0  # the newest membership whose ranks have completed a step together

    # ---- guarantee 1: one membership at a time

    def before_event(self, incarnation: str) -> Any:
        """What an event of a fenced agent must leave as it is."""
        c = self.world.control
        if incarnation not in c.fenced:
            return None
        commits = c.committed, c.commits.skipped_generations
        return c.phase, c.version, c.membership, set(c.halt_reports), commits, set(c.agents), set(c.finished)

    def after_event(self, incarnation: str, before: Any) -> None:
        """Compare."""
        if before is not None:
            require(self.before_event(incarnation) == before, "guarantee 1", f"an event of the fenced agent {incarnation} changed the job")

    def on_program_error(self, event: m.WorkerError, held: bool) -> None:
        """The coordinator has heard of an exception that no communication raised: the same one twice is the program's, once is not. Those
        that are `held` until it goes on count if their agent is still there then: the next of them may be the first, or the second."""
        control = self.world.control
        which = event.step, event.text
        if held:
            self.held_errors.add(which)
            return
        if which in self.held_errors:
            self.held_errors.discard(which)
            self.program_errors[which] = event.rank, event.version
            return
        if self.program_errors.get(which) == (event.rank, event.version):
            return  # it has only arrived again
        if which in self.program_errors:
            ending = control.exit_code is not None or control._at_the_last_rung
            require(ending, "ladder", f"step {event.step}: {event.text} came again, and the job goes on")
        elif self.peak > self.base[min(self.base)] and control.exit_code is not None:
            loop = "never completed, so it is not the nodes" in control.exit_reason  # on_end judges it
            mine = f"rank {event.rank} failed in step {event.step}: {event.text}" in control.exit_reason  # else another had ended it before
            require(loop or not mine, "ladder", f"one error ended the job: {control.exit_reason}")
        self.program_errors[which] = event.rank, event.version

    def on_assign(self, control: Any, node: str, now: float) -> None:
        """A spare has been given ranks, when the coordinator's clock said so."""
        refusal = control.quarantine.refusal(node, now)
        require(not refusal, "quarantine", f"{node} was given ranks: {refusal}")
        sick = [a.incarnation for a in control.agents.values() if a.node == node and not a.spare and (a.unhealthy or a.leaving)]
        require(not sick, "health", f"{sick} was given ranks although it is unhealthy")

    def on_plan(self, control: Any) -> None:
        """A coordinator has made a plan, which is told once it is recorded."""
        self.reports[control.version] = dict(control.halt_reports)

    def on_taken_up(self) -> None:
        """Another coordinator goes on. Which errors the program has had, nobody has told it."""
        self.program_errors.clear()
        self.held_errors.clear()

    def on_membership(self, membership: m.Membership, generation: int, redo: bool) -> None:
        """The coordinator publishes a membership."""
        version = membership.version
        newest = max(self.memberships, default=0)
        if version in self.memberships:  # the same one, to another agent
            same = membership == self.memberships[version] and generation == self.base[version]
            require(
                same, "guarantee 1", lambda: f"there are two memberships of version {version}: {membership}, {self.memberships[version]}"
            )
            return
        require(version > newest, "guarantee 1", f"membership {version} was published after {newest}")
        for rank in range(len(membership.members)):
            nodes = [membership.members[rank].node, *(h.node for h in membership.holders_of(rank))]
            require(len(set(nodes)) == len(nodes), "guarantee 5", f"rank {rank} and its holders are on {nodes}")
        self._check_bound(version, generation)
        for rank, report in self.reports.get(version, {}).items():
            if report.between_steps and report.done is not None and report.done <= generation:
                require(
                    report.done < generation or not redo, "section rule", f"rank {rank} leaves out its work after step {report.done} unsaid"
                )
        self.memberships[version] = membership
        self.base[version] = generation
        self.done = dict.fromkeys(range(len(membership.members)), generation)

    def _check_bound(self, version: int, generation: int) -> None:
        """Guarantee 3 with a snapshot every N steps: at most 2N - 1 completed steps are run again; where generations are skipped or
        copies rot, nothing is promised but the newest committed generation, or the one committed before it."""
        world = self.world
        if world.rotted:
            return
        before = {x.incarnation for x in self.memberships[max(self.memberships)].members} if self.memberships else set()
        gone = {i for i in before if i in world.control.fenced or not world.agents[i].node.alive}
        if len(gone) > world.control.config.replicas:  # that there is anything to go back to is more than was promised
            self.history, self.peak = [g for g in self.history if g <= generation], generation
            return
        one_before = self.history[-2] if len(self.history) > 1 else 0
        safe = one_before if world.skip else self.peak - (2 * world.interval - 1)
        what = f"membership {version} goes back to {generation}; complete was {self.peak}, committed {self.history}, N is {world.interval}"
        require(generation >= safe, "guarantee 3", what)
        self.history = [g for g in self.history if g <= generation]

    def on_resumed(self) -> None:
        """The coordinator says that all train on."""
        version = self.world.control.version
        for rank, member in enumerate(self.memberships[version].members):
            worker = self.world.agents[member.incarnation].workers[member.worker]
            require(worker.version == version, "guarantee 1", f"resumed {version}, but rank {rank} works in membership {worker.version}")

    def on_step(self, worker: Any) -> None:
        """A rank has completed a step."""
        version, rank = worker.version, worker.rank
        member = self.memberships[version].members[rank]
        require(member.incarnation == worker.agent.incarnation, "guarantee 1", f"{worker.agent.incarnation} stepped as rank {rank}")
        who = self.stepped.setdefault((version, rank), worker.agent.incarnation)
        require(who == worker.agent.incarnation, "guarantee 1", f"two workers are rank {rank} of membership {version}")
        if version == max(self.memberships):
            self.done[rank] = worker.generation
            self.peak = max(self.peak, min(self.done.values()))

    # ---- guarantee 2: atomic

    def on_collective(self, key: tuple[Any, ...], states: dict[int, int]) -> None:
        """All ranks of a group met."""
        if key[1] == "param-gather":  # what ends a step
            require(key[0] >= self.newest_step_of, "guarantee 1", f"membership {key[0]} completes a step after {self.newest_step_of} has")
            self.newest_step_of = key[0]
        require(len(set(states.values())) == 1, "guarantee 2", lambda: f"collective {key} joins ranks of different generations: {states}")

    def on_change(self, worker: Any) -> None:
        """Main parameters are about to change."""
        require(worker.copying is None, "guarantee 2", f"rank {worker.rank} changes parameters while generation {worker.copying} is copied")

    def on_restore(self, worker: Any, snapshot: Snapshot | None, plan: m.Resume) -> None:
        """A rank reads its slot back."""
        want = Content(worker.rank, plan.generation)
        have = None if snapshot is None else snapshot.content
        require(have == want, "guarantee 2", lambda: f"rank {worker.rank} is to restore {want}, its slot has {have}")
        require(snapshot is not None and not snapshot.torn, "guarantee 2", f"rank {worker.rank} restores a torn copy of {want}")

    def on_restored(self, worker: Any) -> None:
        """A rank is about to train on."""
        want = Content(worker.rank, self.base[worker.version])
        require(worker.content == want, "guarantee 2", f"rank {worker.rank} trains on from {worker.content}, planned {want}")

    def on_missing(self, plan: m.Resume, holder: Any, rank: int, error: Exception) -> None:
        """A holder that a plan names does not have the snapshot; from a plan that is over nobody expects it."""
        stale = plan.membership.version != self.world.control.version
        require(stale, "guarantee 2", f"{holder.incarnation} was named for rank {rank}, generation {plan.generation}: {error}")

    # ---- guarantee 4: slots

    def on_acknowledged(self, agent: Any, rank: int, generation: int) -> None:
        """An agent takes a generation of its rank for replicated: the holder must really have it."""
        if agent.version != max(self.memberships):
            return  # it was given up and does not know it yet; what it believes is asked again if it ever counts
        membership = agent.membership
        for member in membership.holders_of(rank):
            holder = self.world.agents[member.incarnation]
            require(
                generation in holder.replicas.generations().get(rank, ()),
                "guarantee 4",
                lambda holder=holder: f"rank {rank} counts generation {generation} as held by {holder.incarnation}, which does not have it",
            )
        version = agent.version
        ranks = self.pairs.setdefault((version, generation), set())
        ranks.add(rank)
        if len(ranks) == len(membership.members):
            self.committed[version] = max(generation, self.committed.get(version, -1))
            self.history = sorted({*self.history, generation})

    def _replaceable(self, snapshot: Snapshot, version: int) -> bool:
        generation = snapshot.content.generation
        obsolete = snapshot.version < version and generation != self.base[version]
        # What some rank has skipped will never be committed; what the coordinator has not heard of yet may be.
        void = self.world.skip and generation > self.committed.get(version, -1) and (version, generation) in self.skipped
        return obsolete or void or snapshot.rotten or self.committed.get(version, -1) > generation

    def on_take(self, worker: Any, slot: int) -> None:
        """A rank overwrites an own slot."""
        old = worker.own.get(slot)
        if old is not None:
            require(
                self._replaceable(old, worker.version),
                "guarantee 4",
                f"rank {worker.rank} overwrites its snapshot of generation {old.content.generation} before a newer one is committed",
            )

    def on_reserve(self, sender: Any, holder: Any, header: Any, old: Snapshot | None) -> None:
        """A holder overwrites a replica slot, in which `old` was."""
        if old is not None:
            require(
                self._replaceable(old, holder.version),
                "guarantee 4",
                f"{sender.incarnation} (membership {sender.version}) destroys the replica of rank {header.rank}, generation "
                f"{old.content.generation} at {holder.incarnation} (membership {holder.version}) with generation {header.generation}",
            )

    # ---- durable generations

    def on_whole(self, folder: Any) -> None:
        """A manifest is written."""
        want = {rank: Content(rank, folder.generation) for rank in self.world.everyone}
        require(folder.files == want, "durable", f"generation {folder.generation} is called whole with {folder.files}")

    def on_begun(self, worker: Any, loaded: Snapshot | None, generation: int) -> None:
        """A rank begins from what its agent has read from a file."""
        want = Content(worker.rank, generation)
        require(loaded is not None and loaded.content == want, "durable", f"rank {worker.rank} begins from {loaded}, told {want}")

    def _check_durable(self) -> None:
        """The job ends, and more than one node may have been needed for what it was at: then that is on disk, or it is said what is not."""
        control, disk = self.world.control, self.world.disk
        if control.config.durable is None:
            require("without --save" in control.exit_reason, "durable", f"it is not said that nothing was written: {control.exit_reason}")
        elif "was not written to" in control.exit_reason:
            require(disk.fails > 0 or self.world.rotted, "durable", f"nothing failed, yet: {control.exit_reason}")
        else:
            whole = [f.generation for f in disk.folders.values() if f.whole]
            require(bool(whole), "durable", f"nothing is on disk, yet: {control.exit_reason}")
            # One may have become whole the moment before its agent was halted; the next start finds it all the same.
            require(control.durable_generation in whole, "durable", f"{whole} are whole; said: {control.exit_reason}")
            require(f"generation {control.durable_generation} is durable" in control.exit_reason, "durable", control.exit_reason)
            if "no memory has anything" not in control.exit_reason and not self.world.rotted and self._some_stayed():
                one_before = self.history[-2] if len(self.history) > 1 else 0
                require(max(whole) >= one_before, "durable", f"{max(whole)} is on disk, committed were {self.history}")

    # ---- how a run ends

    def on_end(self) -> None:
        """Training to the end, or a named ending that tells the truth."""
        control = self.world.control
        require(control.phase is Phase.ENDED, "ending", f"the run hangs while {control.phase.value}")
        require(bool(control.exit_reason), "ending", "the run ended without a reason")
        living = [a for i, a in self.world.agents.items() if i in control.agents and a.node.alive]
        if control.exit_code == 0:
            steps = self.world.steps
            require(self.peak == steps, "ending", f"training is called done after step {self.peak} of {steps}")
        elif control.exit_code == 2:
            damaged = [f for f in self.world.disk.folders.values() if f.damaged]
            require(len(damaged) == len(control.config.durable.begin), "durable", f"refused, though: {self.world.disk.folders}")
        elif control.exit_code == 75:
            self._check_durable()
            warm = [a for a in control.agents.values() if a.free]
            holders = {x.node for x in control.membership.members if x.incarnation in control.agents}
            nothing = "no memory has anything to go back to" in control.exit_reason  # then spares are of no use
            require(nothing or all(a.node in holders for a in warm), "ending", "the job gave up for want of a spare while there was one")
        else:
            if "failed in step" in control.exit_reason:  # on_program_error has judged it
                return
            if found := re.match(r"steps? (\d+).*never completed, so it is not the nodes", control.exit_reason):
                step = int(found[1])  # of the loop breaker's, the first
                # That all had completed it may have died with the one that would have said so.
                require(self.peak <= step, "ladder", f"complete was {self.peak}, yet: {control.exit_reason}")
                few = self.world.poison is None and len(self.world.faults) < 3
                require(not few, "ladder", f"{self.world.faults} were taken for a loop: {control.exit_reason}")
                return
            require("nothing to go back to" in control.exit_reason or self.peak == 0, "ending", f"unexpected: {control.exit_reason}")
            had = {x.incarnation for v in self.memberships.values() for x in v.members}
            lost = {i for i in had if i in control.fenced or not self.world.agents[i].node.alive}  # known to be, or truly
            few = len(lost) <= self.world.control.config.replicas and not self.world.rotted
            require(not few or not self.committed, "guarantee 3", f"the loss of {lost} alone ended the job: {control.exit_reason}")
            common = self._held_by_all(living)
            require(not common, "ending", f"the job gave up although generations {sorted(common)} are still held for every rank")

    def _some_stayed(self) -> bool:
        """Whether a node is left that was there when the newest generation was committed. One that leaves has what it had when it left."""
        agents = self.world.control.agents
        committing = self.memberships[max(self.committed)].members if self.committed else ()
        return any(x.incarnation in agents and not agents[x.incarnation].leaving for x in committing)

    def _held_by_all(self, agents: list[Any]) -> set[int]:
        control = self.world.control
        held: dict[int, set[int]] = {r: set() for r in range(control.config.grid.world_size)}
        for agent in agents:
            # A node that leaves may have generations of a course that training has not taken: nothing is restored from them.
            up_to = control.agents[agent.incarnation].left_up_to

            def counts(generations: Iterable[int], up_to: int | None = up_to) -> set[int]:
                return {g for g in generations if up_to is None or g <= up_to}

            for worker in agent.workers:
                if worker.rank is not None:
                    own = {s.content.generation for s in worker.own.values() if not s.rotten}
                    # A damaged copy that was fetched anew is known to be mended once its rank has restored from it, not before.
                    held[worker.rank] |= control.commits.usable(agent.incarnation, worker.rank, counts(own))
            for rank, generations in agent.replicas.generations().items():
                rotten = {s.content.generation for s in agent.replica_snapshots(rank).values() if s.rotten}
                held[rank] |= counts(set(generations) - rotten)
        return set.intersection(*held.values())
