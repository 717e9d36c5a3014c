"""The demo's summary.json, table and picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron.hotswap.cli import picture
from megatron.hotswap.cli.narrate import PHASE_WORDS, bytes_in_words
from megatron.hotswap.cli.verify import Comparison
from megatron.hotswap.coordinator.recorder import write_summary

RECOVERY_KEYS = ("kind", "nodes_lost", "phases", "total_s", "steps_rerun", "bytes_restored")


def finish(folder: Path, undisturbed: Path, swapped: Path, restart_s: float) -> None:
    """Write FOLDER/summary.json and FOLDER/demo.png, and the restart's cost into the disturbed run's own summary."""
    summary = json.loads((swapped / "summary.json").read_text())
    summary["restart_baseline_s"] = restart_s
    write_summary(swapped, summary)
    write_summary(folder, demo_summary(summary))
    draw(folder / "demo.png", undisturbed, swapped)


def demo_summary(summary: dict[str, Any]) -> dict[str, Any]:
    """The fields that the demo promises, and no others."""
    return {
        "steps": summary["steps"],
        "bit_identical": summary["bit_identical"],
        "recoveries": [{key: recovery[key] for key in RECOVERY_KEYS} for recovery in summary["recoveries"]],
        "restart_baseline_s": round(summary["restart_baseline_s"], 6),
        "exposed_stall_fraction": summary["exposed_stall_fraction"],
    }


def show(console: Console, folder: Path, found: Comparison, resumed: Comparison) -> None:
    """The result in words and one table."""
    summary = json.loads((folder / "summary.json").read_text())
    restart_s = summary["restart_baseline_s"]
    for recovery in summary["recoveries"]:
        console.print(_table(recovery, restart_s))
        ratio = restart_s / recovery["total_s"] if recovery["total_s"] > 0 else float("inf")
        lost = ", ".join(recovery["nodes_lost"])
        console.print(f"Hot-swap after the loss of {lost}: {recovery['total_s']:.2f} s.", markup=False)
        console.print(f"Restart from a checkpoint: {restart_s:.2f} s, {ratio:.1f} times as long.", markup=False)
        console.print(
            f"{bytes_in_words(recovery['bytes_restored'])} came back from memory; completed steps run again: "
            f"{recovery['steps_rerun']}.",
            markup=False,
        )
    same = "the same, bit for bit" if found.identical else f"DIFFERENT: {found.difference}"
    console.print(
        f"Losses, gradient norms and samples of {found.compared} steps with and without the fault: {same}.",
        markup=False,
    )
    again = "the same, bit for bit" if resumed.identical else f"DIFFERENT: {resumed.difference}"
    console.print(f"First steps after the restart from the checkpoint: {again}.", markup=False)
    console.print(f"bit_identical: {str(summary['bit_identical']).lower()}", style="bold", markup=False)
    console.print(f"{folder / 'summary.json'}\n{folder / 'demo.png'}", markup=False)


def _table(recovery: dict[str, Any], restart_s: float) -> Table:
    table = Table(title="From the SIGKILL to the end of the first step after it", title_justify="left")
    table.add_column("phase")
    table.add_column("seconds", justify="right")
    for name, words in PHASE_WORDS.items():
        table.add_row(words, f"{recovery['phases'][name]:.3f}")
    table.add_row(
        "less a normal step", f"{recovery['total_s'] - sum(recovery['phases'].values()):.3f}", end_section=True
    )
    table.add_row("hot-swap", f"{recovery['total_s']:.3f}", style="bold")
    table.add_row("restart from a checkpoint", f"{restart_s:.3f}")
    return table


def draw(path: Path, undisturbed: Path, swapped: Path) -> None:
    """Both losses over each other, and the recovery's seconds beside the restart's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    reference, _ = picture.read_run(undisturbed)
    steps, _ = picture.read_run(swapped)
    summary = json.loads((swapped / "summary.json").read_text())
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 5.2), height_ratios=(3, 1.3), layout="constrained")
    picture.draw_loss(above, reference, "undisturbed", picture.COLORS[4], linewidth=5, alpha=0.6)
    label = "a node killed, a spare swapped in"
    picture.draw_loss(above, steps, label, "black", linewidth=1.2, marker=".", markersize=4)
    picture.mark_recoveries(above, summary["recoveries"])
    above.legend(frameon=False)
    same = {True: "bit-identical", False: "DIFFERENT", None: "not compared"}[summary["bit_identical"]]
    above.set_title(f"GPT on TP 2 x DP 2, two virtual nodes: losses with and without the fault are {same}", fontsize=10)
    recoveries = summary["recoveries"]
    picture.draw_phases(below, recoveries, [f"hot-swap {r['total_s']:.1f} s" for r in recoveries])
    restart_s = summary["restart_baseline_s"]
    below.barh([f"restart {restart_s:.1f} s"], [restart_s], color=picture.COLORS[6], height=0.6)
    below.set_xlabel("seconds to the end of the next step (figures at the left: less a normal step)")
    figure.savefig(path, dpi=100)
    plt.close(figure)
