"""The report of a sweep: report.md for people, figures.json for programs, of the same figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron.hotswap.cli.narrate import PHASE_WORDS
from megatron.hotswap.records import replace_file
from megatron.hotswap.simulate import published
from megatron.hotswap.sizing.advice import GB

from . import compare
from .checks import Checked
from .collect import Figures, Recovery, median
from .sweep import Restart, Sweep

FILES = ("report.md", "figures.json")
#: Phases of a restart (drive.py), in words.
RESTART_WORDS = {"end_s": "end", "start_s": "start", "load_s": "load", "first_step_s": "first step"}


def text(sweep: Sweep, found: Sequence[Figures], checked: Sequence[Checked]) -> str:
    """The whole report, as Markdown."""
    settings = sweep.settings
    parts = [
        f"# Scaling study: {sweep.site.title}\n\n{settings.pairs} pairs a point, in alternating order, on the same nodes; of each run "
        f"{settings.steps} steps are measured after {settings.warm_up}. Figures are medians over the pairs, with the least and the "
        "greatest where there are several."
    ]
    if sweep.site.machine is None:
        parts.append("This is a run on CPUs: it shows that the chain works, and says nothing about GPUs.")
    parts += [
        "## A step, with hot-swap and without\n\n" + _steps(found),
        "## Recovery\n\n" + _recovery(found),
        "## Host memory\n\n" + _memory(found, checked),
        "## As published, and here\n\n" + _published(found),
    ]
    ran_on = sorted({f"- {hardware}; {software}" for figures in found for hardware, software in figures.ran_on})
    if ran_on:
        parts.append("## Made on\n\nThe first node of each point, and what was installed there:\n\n" + "\n".join(ran_on))
    missing = [line for figures in found for line in figures.missing]
    if missing:
        parts.append("## What is missing\n\n" + "\n".join(f"- {' '.join(line.split())}" for line in missing))
    return "\n\n".join(parts) + "\n"


def write(folder: Path, report: str, figures: dict[str, Any]) -> None:
    """Both files."""
    contents = (report.encode(), (json.dumps(figures, indent=1) + "\n").encode())
    for name, content in zip(FILES, contents, strict=True):
        replace_file(folder / name, content)


def as_json(sweep: Sweep, found: Sequence[Figures], checked: Sequence[Checked]) -> dict[str, Any]:
    """All figures, each run's by itself. Seconds and bytes."""
    return {
        "site": sweep.site.key,
        "settings": msgspec.to_builtins(sweep.settings),
        "points": [
            {
                **msgspec.to_builtins(figures.point),
                "name": figures.point.name,
                "parameters": one.plan.parameters,
                "planned_host_bytes": one.host_bytes,
                "hot_swap": {str(pair): msgspec.to_builtins(run) for pair, run in sorted(figures.hot_swap.items())},
                "plain": {str(pair): msgspec.to_builtins(run) for pair, run in sorted(figures.plain.items())},
                "step_ratios": figures.ratios,
                "missing": figures.missing,
                "ran_on": [{"hardware": hardware, "software": software} for hardware, software in sorted(figures.ran_on)],
            }
            for figures, one in zip(found, checked, strict=True)
        ],
        "published": [msgspec.to_builtins(figure) for figure in (*published.FIGURES, published.ANY_SWAP)],
    }


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; columns as wide as their content, so that it can be read as it is."""
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(heads), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, rows)])


def _spread(values: Sequence[float], form: str = "{:.4g}") -> str:
    """The median, and both ends where they differ; a dash of none."""
    middle = median(values)
    if middle is None:
        return "-"
    low, high = form.format(min(values)), form.format(max(values))
    return form.format(middle) + ("" if low == high else f" ({low} to {high})")


def _steps(found: Sequence[Figures]) -> str:
    rows = []
    for figures in found:
        on, off = figures.hot_swap.values(), figures.plain.values()
        rows.append(
            (
                *(figures.point.name, str(figures.point.gpus), figures.point.grid(), str(figures.point.zero_stage), figures.point.source),
                _spread([run.step_s for run in off]),
                _spread([run.step_s for run in on]),
                _spread(figures.ratios, "{:.4f}"),
                _spread([1e3 * run.stall_s for run in on], "{:.3g}"),
                _spread([100 * run.stall_share for run in on], "{:.3g}"),
            )
        )
    heads = ("point", "ranks", "grid", "ZeRO", "grid from", "without, s", "with, s", "ratio of pairs", "stall, ms", "stall, %")
    return _table(heads, rows) + "\n\nStall: what training waited at the fence for copies, of a step."


def _recovery(found: Sequence[Figures]) -> str:
    swaps = [
        (
            *(f.point.name, *_phases(f.recoveries, PHASE_WORDS), _spread([r.total_s for r in f.recoveries])),
            _spread([r.steps_rerun for r in f.recoveries]),
            _spread([r.bytes_restored / GB for r in f.recoveries], "{:.3g}"),
        )
        for f in found
    ]
    restarts = [
        (f.point.name, *_phases(f.restarts, RESTART_WORDS), _spread([r.total_s for r in f.restarts]), _times_less(f)) for f in found
    ]
    return "\n\n".join(
        [
            "Seconds from the kill of a node to the end of the first step after it; the total is less a normal step.",
            _table(("hot-swap", *PHASE_WORDS.values(), "total", "steps again", "GB restored"), swaps),
            "The plain job, killed as a whole in the step after its checkpoint and started again at once in the same allocation: no time "
            "to notice, none in a queue, no step to repeat.",
            _table(("restart", *RESTART_WORDS.values(), "total", "over hot-swap"), restarts),
        ]
    )


def _phases(recoveries: Sequence[Recovery] | Sequence[Restart], names: Iterable[str]) -> list[str]:
    return [_spread([r.phases[name] for r in recoveries if name in r.phases], "{:.3g}") for name in names]


def _times_less(figures: Figures) -> str:
    costs = compare.pairs_of_costs([figures])
    return f"{costs[0][1] / costs[0][0]:.1f} times" if costs else "-"


def _memory(found: Sequence[Figures], checked: Sequence[Checked]) -> str:
    rows = [
        (
            figures.point.name,
            f"{one.host_bytes / GB:.4g}",
            "-" if figures.host_bytes is None else f"{figures.host_bytes / GB:.4g}",
            f"{max(size.payload_bytes for size in one.plan.sizes) / GB:.4g}",
        )
        for figures, one in zip(found, checked, strict=True)
    ]
    heads = ("point", "planned, GB a node", "found, GB on one node", "snapshot, GB a rank")
    return _table(heads, rows) + "\n\nPlanned: the node that has most. Found: what its kernel says on the node of the batch script."


def _published(found: Sequence[Figures]) -> str:
    rows = [(row.what, row.published, row.ours or "-") for row in compare.rows(found)]
    return _table(("figure", "published", "here"), rows) + f"\n\nPublished: {published.SOURCE}."
