"""`deadpool simulate --plot FILE`: where each scheme's time goes, and its goodput."""

from __future__ import annotations

from pathlib import Path

from ..errors import UsageError
from ..simulate.inputs import HOUR_S
from ..simulate.study import Study
from .picture import COLORS

#: Where time is lost, and its words in the legend.
PARTS = {
    "saving_s": "saving checkpoints",
    "rerun_s": "steps run again",
    "down_s": "recovering",
    "waiting_s": "waiting for a node",
    "slow_s": "fewer nodes",
    "stall_s": "exposed stall",
}


def draw(found: Study, path: Path) -> None:
    """Write the picture; the ending of the file's name says its kind.

    Raises:
        UsageError: it cannot be written, or matplotlib does not know that ending.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=(3, 2), sharey=True, layout="constrained")
    names = [result.scheme.name for result in found.results]
    begin = [0.0] * len(names)
    for (part, words), color in zip(PARTS.items(), COLORS, strict=False):
        hours = [result.of(lambda o, part=part: getattr(o, part)).mean / HOUR_S for result in found.results]
        left.barh(names, hours, left=begin, color=color, label=words, height=0.6)
        begin = [a + b for a, b in zip(begin, hours, strict=True)]
    left.invert_yaxis()
    left.set_xlabel("hours lost")
    left.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    goodputs = [result.goodput for result in found.results]
    right.errorbar(
        [100 * g.mean for g in goodputs], names, xerr=[100 * (g.half or 0.0) for g in goodputs], fmt="o", color=COLORS[0], capsize=3
    )
    right.set_xlabel("goodput, %, with the 95 % confidence interval")
    right.grid(alpha=0.25)
    inputs = found.inputs
    right.set_title(f"{inputs.steps:,} steps on {inputs.nodes} nodes and {inputs.spares} spares", fontsize=10)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as failure:
        raise UsageError(f"{path} cannot be drawn ({failure}); name a file that can be written and ends in .png, .svg or .pdf") from None
    finally:
        plt.close(figure)
