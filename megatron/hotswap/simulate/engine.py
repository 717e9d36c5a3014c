"""The event loop: one job under one scheme, meeting one trace of failures. Pure.

Three phases. TRAIN: a stretch that a failure ends, and the step under way with it. WAIT: positions are vacant and no spare is left.
RECOVER: everybody is there, and the scheme's recovery time runs; a failure in it begins it again. Events: the next failure, a
repaired node, the end of a recovery, a replica of the model that comes back (at a step's end), the job's end. Those of a phase that
is over are known by its number and dropped.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from .failures import Trace
from .inputs import Inputs
from .pools import Copies, Pool, ShrinkingPool, SparePool
from .schemes import Scheme
from .stretch import Pace, Progress, duration, progress, reached

#: A job that takes this many times its time without failures is given up: it would never end.
GIVE_UP = 20.0

_FAILURE, _REPAIRED, _READY, _JOIN, _END = range(5)
_TRAIN, _WAIT, _RECOVER = range(3)


@dataclass
class Outcome:
    """Where a job's wall time went, in seconds; all but `work_s` is lost, and all of them together are `wall_s`."""

    work_s: float = 0.0  # steps that count, each once, at the speed of a step with all nodes
    saving_s: float = 0.0  # durable checkpoints
    stall_s: float = 0.0  # exposed stall of copies in memory
    slow_s: float = 0.0  # steps that took longer since fewer nodes trained
    rerun_s: float = 0.0  # steps, or parts of one, that were done and had to be done again
    down_s: float = 0.0  # recovering
    waiting_s: float = 0.0  # for a node, no spare being left
    wall_s: float = 0.0
    interruptions: int = 0  # events that took a node which trained
    waits: int = 0  # of them those after which nodes were missing
    last_resorts: int = 0  # of them those that took every copy of something in memory
    finished: bool = False

    @property
    def goodput(self) -> float:
        """The share of the wall time that was work."""
        return self.work_s / self.wall_s

    @property
    def resume_s(self) -> float:
        """Time to resume, over the whole job: recovering, waiting for nodes, and running steps again."""
        return self.rerun_s + self.down_s + self.waiting_s

    @property
    def lost_s(self) -> float:
        """All that was not work."""
        return self.wall_s - self.work_s


@dataclass
class _Stretch:
    """Training from `first` steps on, since `began`, at `share` of the full speed."""

    first: int
    began: float
    share: float
    pace: Pace


@dataclass
class _Run:
    inputs: Inputs
    scheme: Scheme
    trace: Trace
    pool: Pool
    copies: Copies | None
    out: Outcome = field(default_factory=Outcome)
    heap: list[tuple[float, int, int, int]] = field(default_factory=list)  # time, order, kind, what it is about
    order: int = 0
    phase: int = _RECOVER
    number: int = 0  # of the phase
    since: float = 0.0  # when the phase began
    step: int = 0  # steps that training goes on from
    saved: int = 0  # step of the newest durable checkpoint
    share: float = 1.0
    down: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)  # positions lost since every replica was last complete
    last_resort: bool = False
    stretch: _Stretch | None = None

    def push(self, at: float, kind: int, about: int) -> None:
        self.order += 1
        heapq.heappush(self.heap, (at, self.order, kind, about))

    def go(self) -> Outcome:
        inputs, failures = self.inputs, 0
        if (first := self.trace[0]) is not None:
            self.push(first.at_s, _FAILURE, 0)
        self._train(0.0)
        limit = GIVE_UP * inputs.ideal_s
        while True:
            now, _, kind, about = heapq.heappop(self.heap)
            if now > limit:
                return self._give_up(limit)
            if kind == _FAILURE:
                failures += 1
                if (later := self.trace[failures]) is not None:
                    self.push(later.at_s, _FAILURE, failures)
                self._fail(now, about)
            elif kind == _REPAIRED:
                self._repaired(now, about)
            elif about != self.number:
                continue
            elif kind == _READY:
                self._account_phase(now)
                self.share = self.pool.staff()  # who came back meanwhile begins with the others
                self._train(now)
            elif kind == _JOIN:
                self._join(now)
            else:
                return self._end(now)

    # -- the phases

    def _enter(self, phase: int, now: float) -> None:
        self.phase, self.since = phase, now
        self.number += 1

    def _account_phase(self, now: float) -> None:
        """What was spent in the phase that ends, if it was not training."""
        if self.phase == _RECOVER:
            self.out.down_s += now - self.since
        elif self.phase == _WAIT:
            self.out.waiting_s += now - self.since

    def _train(self, now: float) -> None:
        inputs, scheme = self.inputs, self.scheme
        self.last_resort = False
        pace = Pace(inputs.step_s / self.share + scheme.stall_s, scheme.durable_steps, inputs.save_s)
        self.stretch = _Stretch(self.step, now, self.share, pace)
        self._enter(_TRAIN, now)
        self.push(now + duration(pace, self.step, inputs.steps), _END, self.number)
        self._plan_join(now)

    def _recover(self, now: float) -> None:
        """Begin, or wait for nodes first."""
        self.share = self.pool.staff()
        if self.share == 0.0:
            self._enter(_WAIT, now)
            return
        self._enter(_RECOVER, now)
        self.push(now + (self.scheme.last_resort_s if self.last_resort else self.scheme.recover_s), _READY, self.number)

    # -- the events

    def _fail(self, now: float, index: int) -> None:
        failure = self.trace[index]
        assert failure is not None  # it was pushed
        struck = [(n, s) for n, s in zip(failure.nodes, failure.repair_s, strict=True) if n not in self.down]
        for node, repair_s in struck:
            self.down.add(node)
            self.push(now + repair_s, _REPAIRED, node)
        lost = self.pool.fail(node for node, _ in struck)
        if not lost:
            return
        self.out.interruptions += 1
        if self.phase == _TRAIN:
            self._interrupt(now)
        else:
            self._account_phase(now)
        self.gone.update(lost)
        if self.copies is not None and not self.last_resort and not self.copies.survive(self.gone):
            self._take_last_resort()
        self._recover(now)
        if self.scheme.shrinks and self.share == 0.0 and not self.last_resort:
            self._take_last_resort()  # no replica of the model is left
        self.out.waits += self.phase == _WAIT

    def _repaired(self, now: float, node: int) -> None:
        self.down.discard(node)
        self.pool.repaired(node)
        if self.phase == _WAIT:
            self._account_phase(now)
            self._recover(now)
        elif self.phase == _TRAIN:
            self._plan_join(now)

    def _plan_join(self, now: float) -> None:
        """A replica of the model that is whole again joins at the end of a step, so that none is run twice."""
        stretch = self.stretch
        assert stretch is not None
        if not self.pool.could_grow():
            return
        at = progress(stretch.pace, stretch.first, now - stretch.began).step + 1
        at += at % stretch.pace.every == 0  # a step that a checkpoint follows: after the next one
        if at < self.inputs.steps:
            self.push(stretch.began + duration(stretch.pace, stretch.first, at), _JOIN, self.number)

    def _join(self, now: float) -> None:
        stretch = self.stretch
        assert stretch is not None
        at = progress(stretch.pace, stretch.first, now - stretch.began).step
        self._account(stretch, reached(stretch.pace, stretch.first, at))
        self.step = at
        self._recover(now)

    # -- the accounts

    def _account(self, stretch: _Stretch, done: Progress) -> None:
        out, steps = self.out, done.step - stretch.first
        step_s = self.inputs.step_s
        out.work_s += steps * step_s
        out.slow_s += steps * (step_s / stretch.share - step_s)
        out.stall_s += steps * self.scheme.stall_s
        out.saving_s += done.saving_s
        out.rerun_s += done.into_s
        if done.saved is not None:
            self.saved = done.saved

    def _roll_back(self, step: int, to: int) -> None:
        again = (step - to) * self.inputs.step_s
        self.out.work_s -= again
        self.out.rerun_s += again
        self.step = to

    def _interrupt(self, now: float) -> None:
        """A failure ends a stretch: account for it, and go back to the newest state that is safe."""
        stretch, scheme = self.stretch, self.scheme
        assert stretch is not None
        done = progress(stretch.pace, stretch.first, now - stretch.began)
        self._account(stretch, done)
        if scheme.shrinks:
            self.gone.clear()
            return self._roll_back(done.step, done.step)
        every = scheme.memory_interval_steps
        if every is None:
            return self._roll_back(done.step, self.saved)
        if done.step - stretch.first >= every:
            self.gone.clear()  # a generation was taken since: what was lost has its replicas again
        newest = done.step - done.step % every
        ended = stretch.began + duration(stretch.pace, stretch.first, newest) if newest > stretch.first else now
        if newest > stretch.first and now - ended < self.inputs.commit_s:
            newest -= every  # the fence lets at most one generation be under way
        self._roll_back(done.step, max(newest, stretch.first))

    def _take_last_resort(self) -> None:
        self.last_resort = True
        self.out.last_resorts += 1
        self._roll_back(self.step, self.saved)

    def _end(self, now: float) -> Outcome:
        stretch = self.stretch
        assert stretch is not None
        self._account(stretch, reached(stretch.pace, stretch.first, self.inputs.steps))
        self.out.wall_s, self.out.finished = now, True
        return self.out

    def _give_up(self, now: float) -> Outcome:
        if self.phase == _TRAIN:
            stretch = self.stretch
            assert stretch is not None
            self._account(stretch, progress(stretch.pace, stretch.first, now - stretch.began))
        else:
            self._account_phase(now)
        self.out.wall_s = now
        return self.out


def run(inputs: Inputs, scheme: Scheme, trace: Trace, copies: Copies | None = None) -> Outcome:
    """Run a job to its end.

    Args:
        trace: the failures of one seed; may be shared by runs with the same nodes, spares, rates and repair times.
        copies: the placement, where it is at hand already (it takes a while for many nodes).

    Raises:
        UsageError: replicas cannot be placed.
    """
    if scheme.memory_interval_steps is None:
        copies = None
    elif copies is None:
        copies = Copies(inputs)
    pool: Pool = SparePool(inputs) if scheme.uses_spares else ShrinkingPool(inputs)
    return _Run(inputs, scheme, trace, pool, copies).go()
