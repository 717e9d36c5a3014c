"""RUN_DIR/run.png: the loss over the steps with the recoveries marked, and where each recovery's seconds went.

A program of its own (`python -m megatron.hotswap.cli.picture RUN_DIR`), since matplotlib takes a second to import.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..records import read_lines, read_object
from .narrate import PHASE_WORDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Okabe and Ito's colours, which the colour-blind can tell apart.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")


class _Step(msgspec.Struct):
    step: int
    loss: dict[str, float]


class _Recovery(msgspec.Struct):
    kind: str
    generation: int
    nodes_lost: list[str]
    phases: dict[str, float]
    total_s: float
    ranks_respawned: list[int] = []


class _Summary(msgspec.Struct):
    steps: int
    recoveries: list[_Recovery]


def read_run(run_dir: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Of the steps and the summary of a run, what is drawn.

    Raises:
        UsageError: a file is damaged.
    """
    steps = [msgspec.structs.asdict(line) for line in read_lines(run_dir / "steps.jsonl", _Step, "the record of a step")]
    return steps, msgspec.to_builtins(read_object(run_dir / "summary.json", _Summary))


def draw_loss(axes: Axes, steps: Sequence[Mapping[str, Any]], label: str, color: str, **style: Any) -> None:
    """One run's first loss over its steps."""
    rows = [(step["step"], next(iter(step["loss"].values()))) for step in steps if step["loss"]]
    axes.plot([x for x, _ in rows], [y for _, y in rows], color=color, label=label, **style)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.25)


def mark_recoveries(axes: Axes, recoveries: Sequence[Mapping[str, Any]]) -> None:
    """A line where a fault struck: in the step after the generation that was gone back to."""
    for recovery in recoveries:
        lost = ", ".join([*recovery["nodes_lost"], *(f"rank {r}" for r in recovery.get("ranks_respawned", ()))])
        axes.axvline(recovery["generation"] + 1, color=COLORS[5], linestyle="--", linewidth=1)
        axes.annotate(
            f"{lost} lost" if lost else "a collective failed",
            (recovery["generation"] + 1, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(4, -12),
            textcoords="offset points",
            color=COLORS[5],
            fontsize=9,
        )


def draw_phases(axes: Axes, recoveries: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> None:
    """A stacked bar for each recovery."""
    left = [0.0] * len(recoveries)
    for (name, words), color in zip(PHASE_WORDS.items(), COLORS, strict=False):
        widths = [recovery["phases"][name] for recovery in recoveries]
        axes.barh(list(labels), widths, left=left, color=color, label=words, height=0.6)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds from the fault to the end of the first step after it")
    axes.legend(fontsize=8, ncols=len(PHASE_WORDS), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def draw_run(run_dir: Path) -> Path:
    """Draw it; returns the file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps, summary = read_run(run_dir)
    recoveries = summary["recoveries"]
    rows = 2 if recoveries else 1
    heights = [3.4, 0.9 + 0.35 * len(recoveries)][:rows]
    figure, all_axes = plt.subplots(
        rows, 1, figsize=(8, sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
    )
    axes = [row[0] for row in all_axes]
    draw_loss(axes[0], steps, "loss", COLORS[0])
    mark_recoveries(axes[0], recoveries)
    axes[0].set_title(f"{run_dir.name}: {summary['steps']} steps, recoveries: {len(recoveries)}", fontsize=10)
    if recoveries:
        draw_phases(
            axes[1],
            recoveries,
            [f"{i}: {', '.join(r['nodes_lost']) or r['kind']}" for i, r in enumerate(recoveries, 1)],
        )
    path = run_dir / "run.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


if __name__ == "__main__":
    draw_run(Path(sys.argv[1]))
