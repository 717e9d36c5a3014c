"""How far training comes in a stretch without failures. Pure arithmetic: 100,000 steps cost no more than one.

Steps follow each other; after each `every`-th step of the job (counted from its begin) training waits for a durable checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

#: A moment that was computed as the end of a step, and comes back through additions, still counts as its end.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Pace:
    """Seconds of a step with all that it waits for, steps from one durable checkpoint to the next, seconds of one."""

    step_s: float
    every: int
    save_s: float


@dataclass(frozen=True)
class Progress:
    """Where a stretch stands: `into_s` seconds of the step after `step` are done, or it is saving."""

    step: int
    saved: int | None  # step of the newest durable checkpoint of this stretch
    saving_s: float
    into_s: float


def duration(pace: Pace, first: int, last: int) -> float:
    """Seconds from having `first` steps to having `last`; a checkpoint that is due at `last` itself is not waited for."""
    return (last - first) * pace.step_s + _saves(pace, first, last) * pace.save_s


def _saves(pace: Pace, first: int, last: int) -> int:
    """Checkpoints due after a step s with first < s < last."""
    return max(0, (last - 1) // pace.every - first // pace.every)


def reached(pace: Pace, first: int, last: int) -> Progress:
    """The end of a stretch that came exactly to `last`."""
    saves = _saves(pace, first, last)
    return Progress(last, (last - 1) // pace.every * pace.every if saves else None, saves * pace.save_s, 0.0)


def progress(pace: Pace, first: int, elapsed: float) -> Progress:
    """What is done `elapsed` seconds after `first` steps were."""
    slack = _ROUNDING * max(1.0, elapsed)
    boundary = (first // pace.every + 1) * pace.every
    head = (boundary - first) * pace.step_s
    if elapsed + slack < head:
        return _in_steps(pace, first, None, 0.0, elapsed, slack)
    elapsed -= head
    cycle = pace.every * pace.step_s + pace.save_s
    cycles = int((elapsed + slack) / cycle)
    elapsed -= cycles * cycle
    boundary += cycles * pace.every
    before = cycles * pace.save_s
    if elapsed + slack < pace.save_s:  # saving: the newest complete one is the one before
        return Progress(boundary, boundary - pace.every if cycles else None, before + max(0.0, elapsed), 0.0)
    return _in_steps(pace, boundary, boundary, before + pace.save_s, elapsed - pace.save_s, slack)


def _in_steps(pace: Pace, first: int, saved: int | None, saving_s: float, elapsed: float, slack: float) -> Progress:
    steps = int((elapsed + slack) / pace.step_s)
    return Progress(first + steps, saved, saving_s, max(0.0, elapsed - steps * pace.step_s))
