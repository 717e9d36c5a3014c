"""What was published (megatron/hotswap/simulate/published.py), beside what a sweep has found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.hotswap.simulate import published

from .collect import Figures, median

#: Between these the published runs showed no visible overhead, in GPUs.
OVERHEAD_GPUS = (32, 256)


@dataclass(frozen=True)
class Row:
    """A published figure and ours, in words; `ours` is empty where the sweep has nothing to say."""

    what: str
    published: str
    ours: str


def rows(found: Sequence[Figures]) -> list[Row]:
    """Every published figure."""
    swaps = [r.total_s for figures in found for r in figures.recoveries]
    restarts = [r.total_s for figures in found for r in figures.restarts]
    times_less = [r / s for s, r in pairs_of_costs(found)]
    low, high = OVERHEAD_GPUS
    ratios = [ratio - 1 for figures in found if low <= figures.point.gpus <= high for ratio in figures.ratios]
    resume = [resume_times(figures) for figures in found]
    known = [value for value in resume if value is not None]
    return [
        Row(published.SWAP.name, f"{published.SWAP.low:g} to {published.SWAP.high:g} s", _range(swaps, "{:.2f} s")),
        Row(published.ANY_SWAP.name, f"{published.ANY_SWAP.high:g} s", _range(swaps, "{:.2f} s")),
        Row(published.RESTART.name, f"{published.RESTART.low:g} s", _range(restarts, "{:.2f} s")),
        Row(published.TIMES_LESS.name, f"{published.TIMES_LESS.low:g} times", _range(times_less, "{:.1f} times")),
        Row(published.OVERHEAD.name, "none", _range(ratios, "{:+.2%}")),
        Row(
            f"time to resume over {published.STEPS.low:,.0f} steps, times less (here: computed from ours, with the checkpoint interval "
            "that the published figures imply)",
            f"{published.RESUME_TIMES.low:g} times, {published.RESUME_SHARE.low:.1%}",
            _range(known, "{:.1f} times"),
        ),
    ]


def pairs_of_costs(found: Sequence[Figures]) -> list[tuple[float, float]]:
    """(recovery, restart) in seconds of each point that has both: medians over its pairs."""
    costs = ((median([r.total_s for r in f.recoveries]), median([r.total_s for r in f.restarts])) for f in found)
    return [(swap, restart) for swap, restart in costs if swap and restart]


def resume_times(figures: Figures) -> float | None:
    """How many times less is lost to a failure by a swap than by a restart, in a long job whose checkpoints are apart by the interval that
    the published figures imply for steps as long as these. A restart loses half an interval on average, a swap half a step."""
    swap = median([r.total_s for r in figures.recoveries])
    restart = median([r.total_s for r in figures.restarts])
    step = median([run.step_s for run in figures.plain.values()])
    if swap is None or restart is None or step is None:
        return None
    return (restart + published.implied_interval(step) / 2) / (swap + step / 2)


def _range(values: Sequence[float], form: str) -> str:
    if not values:
        return ""
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"
