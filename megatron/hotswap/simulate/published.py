"""What was published about hot-swap, and what must be assumed to meet it. Pure.

The figures are the evaluation's; the inputs behind the comparison over 100,000 steps (failures, checkpoint interval, step time) are not
known here. In the ratio of times to resume the failure rate cancels, as long as failures are rare: both sides pay once a failure. So
only the mean work lost to a checkpoint-restart is free, and it is computed from the published ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .inputs import HOUR_S, Inputs
from .schemes import CHECKPOINT, HOT_SWAP, scheme_of
from .study import Chances, Estimate, resume_times, simulate

SOURCE = "DeadPool: Resilient LLM Training with Hot-Swapping via Zero-Overhead Checkpoint, arXiv:2607.01646 (2026), evaluation"


@dataclass(frozen=True)
class Figure:
    """A published figure, from `low` to `high` where a range was given."""

    name: str
    low: float
    high: float
    unit: str
    source: str = SOURCE


SWAP = Figure("recovery by hot swap", 29.8, 32.6, "s")
RESTART = Figure("recovery by checkpoint-restart, about", 150.0, 150.0, "s")
TIMES_LESS = Figure("recovery, times less than checkpoint-restart", 3.7, 3.7, "times")
STEPS = Figure("steps of the long comparison", 100_000, 100_000, "steps")
RESUME_SHARE = Figure("time to resume over these steps, of checkpoint-restart's", 0.053, 0.053, "share")
RESUME_TIMES = Figure("the same, times less", 18.8, 18.8, "times")
OVERHEAD = Figure("visible overhead, 32 to 256 GPUs", 0.0, 0.0, "share")
#: Of all runs, not only of those in the comparison; the simulation has no use for it, the scaling study (tools/scaling) has.
ANY_SWAP = Figure("recovery by hot swap, up to 512 A100 and 65B, under", 0.0, 40.0, "s", SOURCE.replace("evaluation", "abstract"))
_SWAP_S = (SWAP.low + SWAP.high) / 2
FIGURES = (SWAP, RESTART, TIMES_LESS, STEPS, RESUME_SHARE, RESUME_TIMES, OVERHEAD)

#: Assumed: 256 GPUs, 4 a node; a failure in some hours, so that 100,000 steps see many; no failure waits
#: for a node or takes every copy of something.
_NODES = 64
_JOB_MTBF_S = 12 * HOUR_S
_STEP_S = (1.0, 5.0, 10.0, 20.0)


def paper_inputs(step_s: float, interval_s: float, job_mtbf_s: float = _JOB_MTBF_S) -> Inputs:
    """The published costs with an assumed step, interval and failure rate."""
    return Inputs(
        nodes=_NODES,
        spares=_NODES // 8,
        steps=int(STEPS.low),
        step_s=step_s,
        node_mtbf_s=_NODES * job_mtbf_s,
        repair_s=60.0,  # a spare is always there
        save_s=0.0,
        interval_s=interval_s,
        safety_interval_s=math.inf,
        replicas=2,  # no failure takes every copy
        restart_s=RESTART.low,
        swap_s=_SWAP_S,
        stall_s=OVERHEAD.low,
    )


def implied_interval(step_s: float, swap_s: float = _SWAP_S) -> float:
    """The checkpoint interval at which the published costs of a failure give the published ratio, in closed form.

    (restart + interval / 2) / (swap + step / 2) = 18.8: half an interval is lost to a restart, half a step to a swap.
    """
    return 2.0 * (RESUME_TIMES.low * (swap_s + step_s / 2) - RESTART.low)


@dataclass(frozen=True)
class Reproduced:
    """The long comparison with one assumed step time, simulated."""

    step_s: float
    interval_s: float  # implied
    interval_range_s: tuple[float, float]  # with the fastest and the slowest published swap
    times: Estimate  # restart's time to resume over hot swap's
    failures: float  # a job, on average

    @property
    def share(self) -> float:
        """Hot swap's time to resume over the restart's."""
        return 1.0 / self.times.mean


def reproduce(seeds: Sequence[int], chances: Chances, steps_s: Sequence[float] = _STEP_S) -> list[Reproduced]:
    """Simulate it for every step time."""
    found = []
    for step_s in steps_s:
        interval = implied_interval(step_s)
        inputs = paper_inputs(step_s, interval)
        schemes = [scheme_of(inputs, CHECKPOINT), replace(scheme_of(inputs, HOT_SWAP), durable_steps=inputs.steps)]
        restart, swap = simulate(inputs, schemes, seeds, chances)
        times = resume_times(swap, restart)
        if times is None:
            continue  # these seeds have no failure
        ends = [implied_interval(step_s, swap_s) for swap_s in (SWAP.low, SWAP.high)]
        found.append(
            Reproduced(
                step_s,
                interval,
                (min(ends), max(ends)),
                times,
                swap.of(lambda o: o.interruptions).mean,
            )
        )
    return found


def recovery_ratios() -> dict[str, tuple[float, float]]:
    """Restart over swap, and what a swap saves over what it takes, with the slowest and the fastest published swap."""
    slow, fast = SWAP.high, SWAP.low
    return {
        "restart / swap": (RESTART.low / slow, RESTART.low / fast),
        "(restart - swap) / swap": ((RESTART.low - slow) / slow, (RESTART.low - fast) / fast),
    }
