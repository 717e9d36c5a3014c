"""Figures out of what the runs left behind. What is not there, not whole or not good is said, and the rest is used."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from jobs import hot_swap_step_times, step_times

from megatron.hotswap.errors import UsageError
from megatron.hotswap.records import read_lines, read_object

from .points import Point
from .sweep import HOT_SWAP, Restart, Result, Run, Sweep

#: Enough of steps.jsonl's end for some lines of it.
_TAIL_BYTES = 64 << 10


class StepLine(msgspec.Struct, frozen=True):
    """Of a line of steps.jsonl. Seconds."""

    step: int
    step_s: float
    exposed_stall_s: float


class Recovery(msgspec.Struct, frozen=True):
    """Of a recovery in summary.json. `phases` in seconds; `total_s` is their sum less a normal step."""

    kind: str
    nodes_lost: list[str]
    phases: dict[str, float]
    total_s: float
    normal_step_s: float
    steps_rerun: int
    bytes_restored: int


class _Summary(msgspec.Struct):
    recoveries: list[Recovery]


class Unusable(Exception):
    """A run gives no figures, and why."""


@dataclass(frozen=True)
class WithHotSwap:
    """Of one run with hot-swap; seconds of the measured steps, bytes of a node."""

    step_s: float  # median, Megatron's own clock
    stall_s: float  # exposed, mean of a step
    stall_share: float
    host_bytes: int | None
    recovery: Recovery


@dataclass(frozen=True)
class Without:
    """Of one plain run."""

    step_s: float
    restart: Restart


@dataclass
class Figures:
    """Of a point: as many of its runs as give any."""

    point: Point
    hot_swap: dict[int, WithHotSwap] = field(default_factory=dict)  # by pair
    plain: dict[int, Without] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)  # a sentence for each run without figures
    ran_on: set[tuple[str, str]] = field(default_factory=set)  # hardware and software of the runs that give figures

    @property
    def ratios(self) -> list[float]:
        """Step with hot-swap over step without, of the whole pairs."""
        return [self.hot_swap[pair].step_s / self.plain[pair].step_s for pair in sorted(self.hot_swap.keys() & self.plain.keys())]

    @property
    def recoveries(self) -> list[Recovery]:
        """In the order of pairs."""
        return [self.hot_swap[pair].recovery for pair in sorted(self.hot_swap)]

    @property
    def restarts(self) -> list[Restart]:
        """In the order of pairs."""
        return [self.plain[pair].restart for pair in sorted(self.plain)]

    @property
    def host_bytes(self) -> int | None:
        """The most that was seen."""
        return max((run.host_bytes for run in self.hot_swap.values() if run.host_bytes is not None), default=None)


def collect(sweep: Sweep) -> list[Figures]:
    """Every point of a sweep, however far it has come."""
    found = []
    for point in sweep.points:
        figures = Figures(point)
        for run in sweep.runs(point):
            try:
                if run.kind == HOT_SWAP:
                    figures.hot_swap[run.pair] = with_hot_swap(sweep, run)
                else:
                    figures.plain[run.pair] = without(sweep, run)
                result = _result(run)
                figures.ran_on.add((result.hardware, result.software))
            except Unusable as why:
                figures.missing.append(f"{point.name}/{run.name}: {why}")
        found.append(figures)
    return found


def with_hot_swap(sweep: Sweep, run: Run) -> WithHotSwap:
    """One run's figures.

    Raises:
        Unusable: it is not over, it failed, or a file of it is damaged.
    """
    result = _result(run)
    median = _median(sweep, hot_swap_step_times(run.run_dir), "its workers' logs")
    try:
        lines: Iterable[StepLine] = read_lines(run.run_dir / "steps.jsonl", StepLine, "the record of a step")
        steps = [line for line in lines if _counts(sweep, line.step)]
        recoveries = read_recoveries(run.run_dir)
    except (OSError, UsageError) as failure:
        raise Unusable(str(failure)) from failure
    _require_all(sweep, len(steps), "steps.jsonl")
    if len(recoveries) != 1:
        raise Unusable(f"summary.json has {len(recoveries)} recoveries, where one node was lost")
    stalled, seconds = sum(line.exposed_stall_s for line in steps), sum(line.step_s for line in steps)
    return WithHotSwap(median, stalled / len(steps), stalled / seconds, result.host_bytes, recoveries[0])


def without(sweep: Sweep, run: Run) -> Without:
    """One plain run's figures.

    Raises:
        Unusable: as above.
    """
    result = _result(run)
    if result.restart is None:
        raise Unusable("its result has no restart")
    return Without(_median(sweep, step_times(run.folder / "before.log"), "before.log"), result.restart)


def read_recoveries(run_dir: Path) -> list[Recovery]:
    """Of a job that is over.

    Raises:
        OSError: there is no summary.
        UsageError: it is damaged.
    """
    found: _Summary = read_object(run_dir / "summary.json", _Summary)
    return found.recoveries


def last_step(run_dir: Path) -> int:
    """The newest step that a job has recorded; 0: none yet. A line that is being written does not count."""
    try:
        with open(run_dir / "steps.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            whole = file.read().split(b"\n")[:-1]
        return int(json.loads(whole[-1])["step"]) if whole else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def reached(run: Run) -> int:
    """How far a run is, in steps."""
    if run.kind == HOT_SWAP:
        return last_step(run.run_dir)
    return max(step_times(run.folder / "before.log", run.folder / "after.log"), default=0)


def median(values: Sequence[float]) -> float | None:
    """None of none."""
    return statistics.median(values) if values else None


def _counts(sweep: Sweep, step: int) -> bool:
    return sweep.settings.warm_up < step <= sweep.settings.save_step


def _median(sweep: Sweep, times: dict[int, float], where: str) -> float:
    counted = [seconds for step, seconds in times.items() if _counts(sweep, step)]
    _require_all(sweep, len(counted), where)
    return statistics.median(counted)


def _require_all(sweep: Sweep, count: int, where: str) -> None:
    if count != sweep.settings.steps:
        raise Unusable(f"{where} has {count} of the {sweep.settings.steps} measured steps")


def _result(run: Run) -> Result:
    result = run.result()
    if result is not None and result.ended == "done":
        return result
    if result is not None:
        raise Unusable(f"failed: {result.reason}")
    if not run.folder.is_dir():
        raise Unusable("has not been run")
    raise Unusable(f"is not over; it has come to step {reached(run)}")
