"""Fake workers: the order of events of worker/session.py and worker/loop.py, without their mechanics.

Where this differs from the worker of today, it is how the worker must be; test_simulation.py plants the difference as a bug and
shows what it breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sim_world import Content, Snapshot

from megatron.hotswap.control import messages as m
from megatron.hotswap.snapshot.slots import next_slot

if TYPE_CHECKING:
    from sim_agent import FakeAgent


class FakeWorker:
    """One rank's training thread, and its two own slots, which belong to the agent and outlive the process."""

    def __init__(self, agent: FakeAgent, index: int) -> None:
        self.agent = agent
        self.node = agent.node
        self.world = agent.world
        self.index = index
        self.rank: int | None = None
        self.given = False  # whether its process knows its rank
        self.version = 0  # of the membership that the training thread works in
        self.over = 0  # newest membership known to be over
        self.life = 0  # of the process: copies of one that has died end with it
        self.state = "idle"  # idle, building, built, training, out, finished, stuck, dead, starting
        self.generation = -1  # of the live state
        self.content: Content | None = None  # the live state
        self.dirty = False
        self.between_steps = False
        self.own: dict[int, Snapshot] = {}  # slot -> complete snapshot
        self.held: dict[int, int] = {}  # slot -> generation that was begun or fetched there
        self.copying: int | None = None  # generation whose copy is under way
        self.torn: tuple[int, int] | None = None  # (slot, generation) of a copy that the process died over
        self.early: int | None = None  # the rank that was given to a process that is not up yet
        self.copied = self.acknowledged = self.committed = self.void = -1
        self.keep = -1  # newest generation known to be committed when the last copy was begun
        self.replicated = -1  # newest generation whose push has begun
        self.push_epoch = 0  # transfers of a generation that became void are given up
        self.plan: m.Resume | None = None
        self._epoch = 0  # calls of an interrupted training thread are void
        self._waiting: tuple[Callable[[], bool], Callable[[], None]] | None = None
        self._first_step_due = False
        self._report_due: int | None = None

    # ---- small steps

    def _go(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        epoch = self._epoch
        self.node.after(delay, lambda: call(*args) if self._epoch == epoch else None)

    def _enter(self, name: str, step: int, then: Callable[[], None], group: frozenset[int] | None = None) -> None:
        assert self.rank is not None
        epoch = self._epoch
        world = self.world
        key = (self.version, name, step, group)
        world.rendezvous.enter(
            key, group or world.everyone, self.rank, self.generation, self.node, lambda: then() if self._epoch == epoch else None
        )

    def _wait(self, ready: Callable[[], bool], then: Callable[[], None]) -> None:
        self._waiting = (ready, then)
        self.words_changed()

    def words_changed(self) -> None:
        """The agent or the copy engine has changed a word of the control block."""
        if self._waiting is not None and self._waiting[0]():
            then, self._waiting = self._waiting[1], None
            then()

    def _out(self) -> None:
        self._epoch += 1
        self._waiting = None
        self.state = "out"

    # ---- a step

    def start(self, version: int, generation: int | None) -> None:
        """The first membership: the model is built, generation 0 is copied, training begins; or it begins from what is in the slots."""
        self.version, self.state, self.given = version, "training", True
        self.generation, self.content = generation or 0, Content(self.rank or 0, generation or 0)
        if generation is None:
            self._go(self.world.clock.about(0.05), self._first)
            return
        loaded = self.snapshot_of(generation)
        self.world.checkers.on_begun(self, loaded, generation)
        self._go(self.world.clock.about(0.05), self.begin_step)

    def _first(self) -> None:
        self.take(keep=-1)
        self.begin_step()

    def begin_step(self) -> None:
        """Forward and backward: every rank's gradients need every other rank's forward pass."""
        self.between_steps = False
        step = self.generation
        if step >= self.world.steps:
            self._enter("end", step, self._finish)
            return
        if self.world.bug == (self.rank, step + 1):
            self._go(self.world.clock.about(0.02), self.raise_error, "Bug")
            return
        if self.world.poison == (self.rank, step + 1):
            self._go(self.world.clock.about(0.02), self.world.kill_worker, self.agent, self)
            return
        self._go(self.world.clock.about(0.04), self._enter, "forward-backward", step, self.fence)

    def fence(self) -> None:
        """Before main parameters change: own copy complete; and where a snapshot follows, own replicas acknowledged."""
        newest, due = self.newest, self.world.due(self.generation + 1) and not self.world.skip
        self._wait(lambda: self.copied >= newest and (not due or self.acknowledged >= newest), self._optimizer)

    @property
    def newest(self) -> int:
        """The newest generation taken."""
        return max(self.held.values(), default=-1)

    def _optimizer(self) -> None:
        self.world.checkers.on_change(self)
        self.dirty = True
        if self.world.proven_by_step:
            self._enter("grad-norm", self.generation, self._apply)
        else:
            self._go(self.world.clock.about(0.002), self._apply)

    def _apply(self) -> None:
        assert self.content is not None
        self.content = Content(self.content.rank, self.content.generation + 1)
        self._go(self.world.clock.about(0.003), self._enter, "param-gather", self.generation, self._step_done, self.data_group)

    @property
    def data_group(self) -> frozenset[int]:
        """The ranks of its data-parallel group."""
        assert self.rank is not None
        return frozenset({self.rank, *self.world.control.config.grid.data_ring(self.rank)})

    def _step_done(self) -> None:
        self.generation += 1
        self.dirty = False
        self.world.checkers.on_step(self)
        self.agent.say(m.StepDone(m.StepRecord(self.generation, self.version, 0, 0.1, 0.0, {}, None)))
        if not self.world.due(self.generation):
            self._after_take()
        elif not self.world.skip:
            newest = self.newest
            self.await_commit(newest, lambda: self._take_and_go_on(newest))
        elif self.newest in (self.committed, self.void):
            self._take_and_go_on(self.committed)
        else:
            assert self.rank is not None
            self.world.checkers.skipped.add((self.version, self.generation))
            self.agent.say(m.Skipped(self.rank, self.generation, self.version))
            self._after_take()

    def await_commit(self, generation: int, then: Callable[[], None]) -> None:
        """Before the slot of an older one is overwritten: `generation` must be complete everywhere."""
        if self.world.proven_by_step:
            then()
        else:
            self._wait(lambda: self.committed >= generation, then)

    def _take_and_go_on(self, keep: int) -> None:
        self.take(keep)
        self._after_take()

    def _after_take(self) -> None:
        assert self.rank is not None
        if self._first_step_due:
            self._first_step_due = False
            self.agent.say(m.FirstStep(self.version, self.rank))
        if self.world.sections:
            self.between_steps = True
            self._go(self.world.clock.about(0.004), self._enter, "log", self.generation, self.begin_step)
        else:
            self.begin_step()

    def _finish(self) -> None:
        self.state = "finished"
        self.agent.say(m.Finished(self.index, self.rank, 0))

    def take(self, keep: int) -> None:
        """Begin the copy of the live state into the slot that does not hold generation `keep`."""
        assert self.rank is not None and self.content is not None
        generation, slot = self.generation, next_slot(self.held, keep)
        self.world.checkers.on_take(self, slot)
        self.own.pop(slot, None)
        self.held[slot] = generation
        self.copying, self.keep = generation, keep
        self.node.after(self.world.clock.about(0.02), self._copied, generation, slot, self.content, (self.life, self.version))

    def _copied(self, generation: int, slot: int, content: Content, by: tuple[int, int]) -> None:
        life, version = by
        if self.copying != generation or self.life != life:
            return
        self.copying = None
        self.own[slot] = Snapshot(content, version)
        self.copied = generation
        self.agent.copies_changed()
        self.words_changed()
        if self._report_due is not None:
            over, self._report_due = self._report_due, None
            self.report(over)

    # ---- the process dies, and another takes its place

    def die(self) -> None:
        """The process is gone. Its slots stay; a copy that it was making is torn."""
        self.torn = None if self.copying is None else next((s, g) for s, g in self.held.items() if g == self.copying)
        self._out()
        self.life += 1
        self.state, self.copying, self._report_due, self.plan, self.early = "dead", None, None, None, None

    def take_stock(self) -> None:
        """The agent looks at what is left."""
        self.held = {slot: s.content.generation for slot, s in self.own.items()}

    def start_again(self) -> None:
        """The agent starts another process."""
        if self.state != "dead":
            self.die()
        self.take_stock()
        self.state, self.given = "starting", False
        if not self.world.respawns_fail:
            self.node.after(self.world.clock.about(0.3), self._up, self.life)

    def _up(self, life: int) -> None:
        if self.life != life:
            return
        self.state = "idle"
        self.agent.say(m.WorkerReady(self.index, f"store-again-{self.index}"))
        if self.early is not None:
            assert self.rank is not None
            self.assign(self.rank, self.early)

    def hang(self) -> None:
        """The training thread, or Python's lock, is stuck for good."""
        self._out()
        self.state = "stuck"

    def raise_error(self, kind: str) -> None:
        """An exception that no communication raised."""
        assert self.rank is not None
        self._out()
        self.agent.say(m.WorkerError(self.rank, self.version, self.generation + 1, False, f"{kind}: not by communication"))

    # ---- the halt

    def halt(self, over: int) -> None:
        """The monitor thread hears that a membership is over."""
        self.over = max(self.over, over)
        if self.early is not None:
            self.early = over + 1
        if self.state in ("building", "built"):
            self.plan = None
            self.report(over)
        elif self.state in ("training", "out"):
            # The training thread gets out of a collective, or runs on to the next check: somewhen.
            self.node.after(self.world.clock.about(0.02), self._halted, over)

    def _halted(self, over: int) -> None:
        if self.state not in ("training", "out") or over < self.over or self.version > over:
            return
        self.world.rendezvous.abort(over)
        self._out()
        self._report_due = over
        if self.copying is None:
            self._report_due = None
            self.report(over)

    def report(self, over: int) -> None:
        """HaltReport."""
        assert self.rank is not None
        own = tuple(sorted(s.content.generation for s in self.own.values()))
        done = self.generation if self.state == "out" and self.generation >= 0 else None
        self.agent.say(m.HaltReport(over, self.rank, done, self.between_steps and done is not None, own, f"store-{self.rank}"))

    def snapshot_of(self, generation: int) -> Snapshot | None:
        """Its own, complete snapshot of a generation."""
        return next((s for s in self.own.values() if s.content.generation == generation), None)

    def fail(self) -> None:
        """A collective raises on this rank, though no halt was heard."""
        assert self.rank is not None
        self._out()
        self.world.rendezvous.abort(self.version)
        self.agent.say(m.WorkerError(self.rank, self.version, self.generation + 1, True, "connection reset by peer"))

    # ---- a spare's start, and the plan

    def assign(self, rank: int, version: int) -> None:
        """A spare gets its rank and builds."""
        self.rank, self.given = rank, True
        if self.state == "starting":
            self.early = version
            return
        if self.state != "idle":  # it has died meanwhile
            return
        self.state, self.early = "building", None
        self.report(version - 1)
        self._go(self.world.clock.about(0.2), self._built)

    def _built(self) -> None:
        self.state = "built"
        if self.plan is not None:
            self._carry_out(self.plan)

    def resume(self, plan: m.Resume) -> None:
        """The plan of the newest membership. A spare that still builds joins when it is through."""
        self.copied, self.acknowledged = plan.generation, plan.generation - 1
        self.committed, self.void, self.keep = min(self.committed, plan.generation - 1), -1, plan.generation
        self.replicated = plan.generation
        self.plan = plan
        if self.state == "built":
            self._carry_out(plan)
        elif self.state == "out":
            self._go(self.world.clock.about(0.005), self._carry_out, plan)

    def _carry_out(self, plan: m.Resume) -> None:
        if plan.membership.version <= self.over:
            return
        if self.state == "built":  # it joins with nothing
            self.generation, self.dirty = -1, True
        self.state, self.version = "training", plan.membership.version
        self._enter_rebuild(plan)

    def _enter_rebuild(self, plan: m.Resume) -> None:
        epoch = self._epoch
        assert self.rank is not None
        self.world.rendezvous.enter(
            (self.version, "rebuild", 0, None),
            self.world.everyone,
            self.rank,
            plan.generation,
            self.node,
            lambda: self._restore(plan) if self._epoch == epoch else None,
        )

    def _restore(self, plan: m.Resume) -> None:
        rerun = max(0, self.generation - plan.generation)
        if self.dirty or self.generation != plan.generation:
            snapshot = self.snapshot_of(plan.generation)
            if snapshot is not None and snapshot.rotten:
                assert self.rank is not None
                self.dirty = True
                self._out()
                self.agent.say(m.CopyDamaged(self.rank, plan.generation, self.version, self.agent.incarnation, "checksum"))
                return
            self.world.checkers.on_restore(self, snapshot, plan)
            self.world.respawned += self.life > 0
            assert snapshot is not None
            self.content = snapshot.content
        self.own = {slot: s for slot, s in self.own.items() if s.content.generation <= plan.generation}
        self.held = {slot: g for slot, g in self.held.items() if g <= plan.generation}
        self.generation, self.dirty, self.between_steps = plan.generation, False, False
        self._enter("parameters", plan.generation, lambda: self._restored(rerun))

    def _restored(self, rerun: int) -> None:
        assert self.rank is not None
        self.world.checkers.on_restored(self)
        self._first_step_due = True
        self.agent.say(m.Restored(self.version, self.rank, 0.1, 0.1, 1, rerun))
        self.begin_step()
