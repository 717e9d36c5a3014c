"""The plots of a sweep. What was published is drawn as published, in grey; what is ours beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.hotswap.cli.narrate import PHASE_WORDS
from megatron.hotswap.cli.picture import COLORS
from megatron.hotswap.simulate import published
from megatron.hotswap.sizing.advice import GB

from .checks import Checked
from .collect import Figures, Recovery, median
from .compare import OVERHEAD_GPUS
from .points import GPUS, WEAK
from .sweep import Restart, Sweep
from .tables import RESTART_WORDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GREY = "#777777"
_SERIES = {WEAK: ("the model grows", "o-", COLORS[0]), GPUS: ("one model", "s--", COLORS[2])}
_DPI = 110


def draw(sweep: Sweep, found: Sequence[Figures], checked: Sequence[Checked]) -> list[Path]:
    """Every plot for which there is something; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    billions = {one.point.name: one.plan.parameters / 1e9 for one in checked}
    pictures: list[tuple[str, bool, Callable[[list[Axes]], None], tuple[int, int]]] = [
        ("steps.png", any(f.hot_swap or f.plain for f in found), lambda axes: _steps(axes, found), (1, 3)),
        ("recovery.png", any(f.recoveries or f.restarts for f in found), lambda axes: _recovery(axes, found, billions), (2, 2)),
        ("memory.png", True, lambda axes: _memory(axes[0], found, checked), (1, 1)),
    ]
    written = []
    for name, anything, fill, (rows, columns) in pictures:
        if not anything:
            continue
        size = (max(6.5, 5.2 * columns), 4.4 * rows)
        figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
        fill(list(axes.flat))
        note = ": no figure of a GPU" if sweep.site.machine is None else ""
        commits = sorted({software.partition(",")[0] for f in found for _, software in f.ran_on})
        figure.suptitle("; ".join([f"{sweep.site.title.partition(':')[0]}{note}", *commits]), fontsize=10)
        figure.savefig(sweep.folder / name, dpi=_DPI)
        plt.close(figure)
        written.append(sweep.folder / name)
    return written


def _gpu_axis(axes: Axes, found: Sequence[Figures], also: Sequence[int] = ()) -> None:
    counts = sorted({*(figures.point.gpus for figures in found), *also})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlim(counts[0] / 1.5, counts[-1] * 1.5)
    axes.minorticks_off()
    axes.set_xlabel("ranks that train")
    axes.grid(alpha=0.25)


def _lines(axes: Axes, found: Sequence[Figures], value: Callable[[Figures], float | None], label: str, style: str, color: str) -> None:
    """A line through the points of each series that have the value."""
    for series, (words, marks, _) in _SERIES.items():
        points = [(f.point.gpus, value(f)) for f in found if series in f.point.series]
        there = [(x, y) for x, y in points if y is not None]
        if there:
            axes.plot([x for x, _ in there], [y for _, y in there], marks[0] + style, color=color, label=f"{label}, {words}", markersize=5)


def _steps(axes: list[Axes], found: Sequence[Figures]) -> None:
    times, ratios, stalls = axes
    _lines(times, found, lambda f: median([run.step_s for run in f.plain.values()]), "without", "--", COLORS[1])
    _lines(times, found, lambda f: median([run.step_s for run in f.hot_swap.values()]), "with hot-swap", "-", COLORS[0])
    times.set_ylabel("seconds of a step (median)")
    times.set_ylim(0, 1.3 * times.get_ylim()[1])
    times.legend(fontsize=8, frameon=False)
    for figures in found:
        ratios.plot([figures.point.gpus] * len(figures.ratios), figures.ratios, "o", color=COLORS[0], alpha=0.7, markersize=5)
    ratios.plot(OVERHEAD_GPUS, [1.0, 1.0], color=_GREY, linewidth=6, alpha=0.4, label="published: no visible overhead")
    ratios.axhline(1.0, color=_GREY, linewidth=0.8)
    ratios.set_ylabel("step with hot-swap / step without, each pair")
    ratios.legend(fontsize=8, frameon=False)
    for figures in found:
        shares = [100 * run.stall_share for run in figures.hot_swap.values()]
        stalls.plot([figures.point.gpus] * len(shares), shares, "o", color=COLORS[0], alpha=0.7, markersize=5)
    stalls.set_ylabel("exposed stall, % of a step")
    stalls.set_ylim(bottom=0)
    for one in (times, stalls):
        _gpu_axis(one, found)
    _gpu_axis(ratios, found, OVERHEAD_GPUS)


def _published_times(axes: Axes) -> None:
    axes.axhspan(published.SWAP.low, published.SWAP.high, color=_GREY, alpha=0.5, label="published: hot swap, compared")
    axes.axhline(published.ANY_SWAP.high, color=_GREY, linestyle="--", linewidth=0.8, label="published: hot swap, all under")
    axes.axhline(published.RESTART.low, color=_GREY, linestyle=":", label="published: restart, about")


def _recovery(axes: list[Axes], found: Sequence[Figures], billions: dict[str, float]) -> None:
    swap_bars, restart_bars, by_size, by_gpus = axes
    there = sorted((f for f in found if f.recoveries or f.restarts), key=lambda f: (billions[f.point.name], f.point.gpus))
    _phase_bars(swap_bars, there, lambda f: f.recoveries, PHASE_WORDS, "hot-swap")
    _phase_bars(restart_bars, there, lambda f: f.restarts, RESTART_WORDS, "restart")
    for f in there:
        x = billions[f.point.name]
        by_size.plot([x] * len(f.recoveries), [r.total_s for r in f.recoveries], "o", color=COLORS[0], markersize=5)
        by_size.plot([x] * len(f.restarts), [r.total_s for r in f.restarts], "^", color=COLORS[5], markersize=5)
    by_size.set_xscale("log")
    by_size.set_xlabel("parameters, billions (dots: hot-swap, triangles: restart)")
    by_size.grid(alpha=0.25)
    _lines(by_gpus, found, lambda f: median([r.total_s for r in f.recoveries]), "hot-swap", "-", COLORS[0])
    _lines(by_gpus, found, lambda f: median([r.total_s for r in f.restarts]), "restart", "--", COLORS[5])
    _gpu_axis(by_gpus, found)
    for one in (by_size, by_gpus):
        _published_times(one)
        one.set_yscale("log")
        one.set_ylabel("s, from the kill to the next step's end")
        one.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)


def _phase_bars(
    axes: Axes,
    found: Sequence[Figures],
    of: Callable[[Figures], Sequence[Recovery] | Sequence[Restart]],
    phases: Mapping[str, str],
    what: str,
) -> None:
    """A bar for each point, of the medians of its phases; the smallest model above."""
    names, left = [f.point.name for f in found], [0.0] * len(found)
    for (name, words), color in zip(phases.items(), COLORS, strict=False):
        widths = [median([r.phases.get(name, 0.0) for r in of(f)]) or 0.0 for f in found]
        axes.barh(names, widths, left=left, height=0.6, color=color, label=words)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(f"{what}: seconds by phase (a normal step is in them)")
    axes.legend(fontsize=8, ncols=len(phases), columnspacing=1.0, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def _memory(axes: Axes, found: Sequence[Figures], checked: Sequence[Checked]) -> None:
    names = [f.point.name for f in found]
    axes.barh(names, [one.host_bytes / GB for one in checked], color=COLORS[4], height=0.6, label="planned, the node that has most")
    seen = [(f.point.name, f.host_bytes / GB) for f in found if f.host_bytes is not None]
    axes.plot([gigabytes for _, gigabytes in seen], [name for name, _ in seen], "o", color="black", label="found")
    limit = checked[0].plan.job.cluster.host_memory_bytes
    if limit is not None:
        axes.axvline(limit / GB, color=_GREY, linestyle=":", label="a node has")
    axes.invert_yaxis()
    axes.set_xlabel("GB of a node's host memory for snapshots")
    axes.legend(fontsize=8, frameon=False)
