"""The recovery loop: wraps every call of Megatron's train() that communicates, and runs again what a halt interrupted.

Megatron's loop above never notices. It calls train_step, then *sections* (logging, evaluation, saving, timer barriers). The loop
keeps the calls since the oldest generation in the rank's slots (with a snapshot after every step: the step before last), so that it
can bring a rank back to the call that was interrupted:

    generation wanted by a step i (counted from 0): i, that is, i completed steps
    recovery to g: run every remembered step >= g again, with the sections behind it, up to the interrupted call, then that call

So every rank issues the same collectives in the same order as the spare, whose own train() begins at step g.
"""

from __future__ import annotations

import contextlib
import io
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..agent import local
from ..control import messages as m
from ..errors import Halted
from ..recovery.execute import Position, Recovery, Snapshots
from .session import Session


class StepRunner(Protocol):
    """What the loop asks of Megatron around one step; patches/training.py implements it."""

    def run(self, call: StepCall, again: bool, first: bool) -> Any:
        """Run the step. `again`: it was begun before, so counters must be set back to it. `first`: it is the first in this membership,
        and runs the way a job's first step runs, which is the way a spare's does; a second one must not, since the spare's does not."""

    def record(self, call: StepCall, result: Any, stall_s: float) -> m.StepRecord | None:
        """What the step looked like, on the rank that logs."""

    def timers(self) -> dict[str, bool]:
        """Which of Megatron's timers are running."""

    def set_timers(self, running: dict[str, bool]) -> None:
        """Have exactly these running."""


@dataclass
class Section:
    """A call between steps. `undo` makes its arguments what they were before it ran."""

    name: str
    run: Callable[[], Any]
    undo: Callable[[], None]
    timers: dict[str, bool]


@dataclass
class StepCall:
    """A call of train_step, and the sections that followed it."""

    iteration: int  # completed steps before it
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    timers: dict[str, bool]
    hooks_enabled: bool
    sections: list[Section] = field(default_factory=list)


@dataclass(frozen=True)
class Schedule:
    """When snapshots are taken, and what is done when the one before is not replicated yet."""

    interval: int = 1  # steps
    skip_when_late: bool = False
    proven_by_step: bool = False  # a step's gradient norm is reduced over the whole world, behind each rank's fence

    def due(self, generation: int) -> bool:
        """Whether this generation is one to take."""
        return generation % self.interval == 0


class Loop:
    """One per worker, on the training thread."""

    def __init__(
        self,
        session: Session,
        recovery: Recovery,
        snapshots: Snapshots,
        runner: StepRunner,
        generation: int,
        schedule: Schedule,
    ) -> None:
        self._session = session
        self._recovery = recovery
        self._snapshots = snapshots
        self._runner = runner
        self.position = Position(generation)
        self.in_section: str | None = None
        self._abandoned: Section | None = None  # what was running when an exception came
        self._schedule = schedule
        self.recovered: Callable[[float], None] = lambda seconds: None  # called after each recovery of this rank
        self._calls: list[StepCall] = []  # since the oldest generation that a recovery may go back to
        self._skip_sections = False
        self._first_step_due = False
        self._settled = 0  # membership
        self.current_step = generation  # completed steps before the call that is running, or running again

    @property
    def began(self) -> bool:
        """Whether a step has been called."""
        return bool(self._calls)

    # ---- entries

    def first_snapshot(self) -> None:
        """Before the first step: the generation that a loss in that step goes back to."""
        self._snapshots.take(self.position.generation, keep=-1)

    def begin_from(self, plan: local.Plan) -> None:
        """The first train_step of a job that goes on from a durable generation."""
        self.position = Position(-1, dirty=True)
        self._recovery.begin_from(plan, self.position)

    def join(self, plan: local.Plan) -> None:
        """A spare at its first train_step: become the rank, by the same rebuild and restore as the survivors."""
        self.position = Position(-1, dirty=True)
        self._recovery.recover(self.position, plan)
        self._first_step_due = True

    def step(self, call: StepCall) -> Any:
        """A call of train_step."""
        self._skip_sections = False
        self._calls = [*(c for c in self._calls if c.iteration >= self._snapshots.oldest), call]
        self.position.between_steps = False
        return self._drive(lambda: self._reach(call), lambda retry: self._attempt(call, retry))

    def section(
        self, name: str, run: Callable[[], Any], skipped: Callable[[], Any], undo: Callable[[], None] = lambda: None
    ) -> Any:
        """A call between steps (nested ones belong to the outer one)."""
        if self.in_section is not None or not self._calls:
            return run()
        if self._skip_sections:
            return skipped()
        call = self._calls[-1]
        section = Section(name, run, undo, self._runner.timers())
        call.sections.append(section)
        self.position.between_steps = True

        def go(retry: bool) -> Any:
            if self._skip_sections:
                return skipped()
            return self._run_section(section, retry)

        return self._drive(lambda: self._reach(call, section), go)

    # ---- running and running again

    def _drive(self, reach: Callable[[], None], run: Callable[[bool], Any]) -> Any:
        retry = False
        while True:
            try:
                if retry:
                    reach()
                return run(retry)
            except Exception as failure:
                self._after(failure)
            retry = True

    def _after(self, failure: Exception) -> None:
        self.in_section = None
        if self._abandoned is not None:  # at once: the step before it runs first, and must not see what it left behind
            self._abandoned.undo()
            self._abandoned = None
        if not self._session.halted:
            self._report_error(failure)
        _clear_frames(failure)
        iteration, began = self._calls[-1].iteration, time.perf_counter()
        plan = self._recovery.recover(self.position)
        self.recovered(time.perf_counter() - began)
        self._first_step_due = True
        if plan.generation > iteration and not plan.redo_sections:
            self._skip_sections = True
            self._session.say(
                m.Note("skipped", f"rank {self._session.rank}: the rest of the work after step {iteration + 1}")
            )

    def _report_error(self, failure: Exception) -> None:
        """An exception without a halt: say it and wait; the coordinator finds out whose fault it is."""
        step = self._calls[-1].iteration + 1
        collective = is_communication(failure)
        if not collective:
            traceback.print_exception(failure)
        self._session.report_error(failure, step, collective)

    def _reach(self, call: StepCall, section: Section | None = None) -> None:
        """Bring the state from the generation it was restored to up to just before `call` (or before `section` of it)."""
        for past in self._calls:
            last = past is call
            if self.position.generation <= past.iteration and (not last or section is not None):
                self._attempt(past, retry=True)
                for done in past.sections:
                    if last and done is section:
                        break
                    self._run_section(done, retry=True)
        if section is not None and not self._skip_sections:
            self.position.between_steps = True

    def _attempt(self, call: StepCall, retry: bool) -> Any:
        self._session.check()
        self.current_step = call.iteration
        if retry:
            self._runner.set_timers(call.timers)
        self.position.between_steps = False
        result = self._runner.run(call, again=retry or self._first_step_due, first=self._first_step_due)
        if self._settled != self._session.version:
            self._recovery.settle()
            self._settled = self._session.version
        generation = call.iteration + 1
        self.position.generation, self.position.dirty = generation, False
        if self._schedule.due(generation) and not self._schedule.skip_when_late and not self._schedule.proven_by_step:
            self._session.await_commit(self._snapshots.newest)
        stall, self._session.exposed_stall_s = self._session.exposed_stall_s, 0.0
        record = self._runner.record(call, result, stall)  # goes into the snapshot too: it must not be lost with this rank
        if self._schedule.due(generation):
            self._take(generation)
        if record is not None:
            self._session.say(m.StepDone(record))
        if self._first_step_due:
            assert self._session.rank is not None
            self._session.say(m.FirstStep(self._session.version, self._session.rank))
            self._first_step_due = False
        return result

    def _take(self, generation: int) -> None:
        """Snapshot, unless the one before is late and the user would rather skip than wait.

        Of the two slots, that of the newest committed generation is kept. Where nobody skips, the one before is committed by now:
        the step has proven it, or it was waited for.
        """
        assert self._session.rank is not None
        before, committed = self._snapshots.newest, self._session.committed
        if not self._schedule.skip_when_late:
            committed = before
        elif before not in (committed, self._session.void):
            self._session.say(m.Skipped(self._session.rank, generation, self._session.version))
            return
        self._snapshots.take(generation, keep=committed)
        self._session.enter("d2h", generation)

    def _run_section(self, section: Section, retry: bool) -> Any:
        self._session.check()
        if retry:
            section.undo()
            self._runner.set_timers(section.timers)
        self.in_section, self._abandoned = section.name, section
        try:
            # Said once already; the spare, which runs it for the first time, says it where this rank did not come so far.
            quiet = (
                contextlib.redirect_stdout(io.StringIO())
                if retry and section.name == "log"
                else contextlib.nullcontext()
            )
            with quiet:
                result = section.run()
            self._abandoned = None
            return result
        finally:
            self.in_section = None

    def fence(self) -> None:
        """Called before the optimizer changes main parameters."""
        completes = self.position.generation + 1
        self._session.enter("fence", completes)
        due = self._schedule.due(completes) and not self._schedule.skip_when_late
        self._session.fence(self._snapshots.newest, acknowledged=due)
        self._session.check()
        self.position.dirty = True
        self._session.enter("optimizer", completes)


def is_communication(failure: Exception) -> bool:
    """Whether an exception comes out of torch.distributed (its own types, or a RuntimeError raised below it), or out of a halt."""
    import torch.distributed as dist

    if isinstance(failure, Halted | dist.DistError):
        return True
    trace = failure.__traceback__
    while trace is not None and isinstance(failure, RuntimeError):
        name = trace.tb_frame.f_globals.get("__name__", "")
        if name.startswith(("torch.distributed", "megatron.hotswap.worker.abort")):
            return True
        trace = trace.tb_next
    return isinstance(failure, RuntimeError) and any(
        w in str(failure) for w in ("gloo", "NCCL", "Connection", "socket")
    )


def _clear_frames(failure: BaseException) -> None:
    """Let go of what the failed call's frames hold, as long as others hold the old groups too. Once those are replaced, the last who holds
    one would be such a frame, and its end joins gloo's threads: this thread would stand still until the last collective in it times out."""
    left, seen = [failure], set[int]()
    while left:
        one = left.pop()
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        left += [behind for behind in (one.__cause__, one.__context__) if behind is not None and id(behind) not in seen]
