"""What a loss costs, by hot swap and by checkpoint-restart: the same model, data, launcher, faults and clocks.

    python benchmarks/recovery.py [--faults 10] [--intervals 10 20 40]
    python benchmarks/recovery.py --quick      # two of each: that the chain works, no result

Hot swap by kind of loss (a node killed, a node that falls silent, a process killed, a collective that fails), checkpoint-restart at
several intervals by nodes killed. The time to the first new step counts from the fault to the end of the first step that had never been
completed before, less a normal step: a restart has to run the steps since its checkpoint again first. Megatron's own in-process restart
is tried (inprocess.py), and how far it comes is said.

A restart is given the best of it: the newest checkpoint lies in this machine's own file system, in the format that is quickest to write
here (torch; torch_dist starts a process for each rank's every save), a warm spare waits, nobody waits in a queue.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import inprocess
from disturbed import Faults, Kind, difference, launch
from jobs import lines_of, recorded_steps, run_launch

from megatron.hotswap.cli.picture import COLORS

HERE = Path(__file__).resolve().parent
FAULTS, INTERVALS = 10, (10, 20, 40)
SPARES = 1
KINDS: tuple[Kind, ...] = ("node killed", "node silent", "process killed", "collective failed")
#: The rung of the ladder that each kind is to end on.
RUNGS = {"node killed": "swap", "node silent": "swap", "process killed": "respawn", "collective failed": "reset"}
PHASES = ("detect_s", "halt_s", "plan_s", "rebuild_s", "restore_s", "first_step_s")

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --attention-dropout 0.1 "
    "--hidden-dropout 0.1 --tensor-model-parallel-size 2 --use-distributed-optimizer --micro-batch-size 4 --global-batch-size 16 "
    "--lr 1e-3 --lr-decay-iters 1000 --train-iters 20000 --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --log-interval 1 "
    "--eval-iters 0 --eval-interval 100000 --split 99,1,0 --num-workers 0 --ckpt-format torch"
)
#: A process that is killed again within the window costs its node; here each loss is to be of its own kind.
DEADLINES = (
    "--hot-swap-lease-s 6 --hot-swap-respawn-window-s 0.1 --hot-swap-respawn-timeout-s 300 --hot-swap-wait-for-spare-s 600 "
    "--hot-swap-collective-timeout-s 60 --hot-swap-halt-timeout-s 120"
)


def flags(*more: str) -> list[str]:
    """Megatron's, and hot-swap's deadlines."""
    return [*MODEL.split(), *DEADLINES.split(), *more]


def measured(run_dir: Path, summary: dict[str, Any], kinds: Sequence[Kind]) -> list[dict[str, Any]]:
    """Every recovery of a job, with what caused it.

    Raises:
        ValueError: there are not as many as faults, or one did not end on its rung.
    """
    struck, recoveries = lines_of(run_dir / "injections.jsonl"), summary["recoveries"]
    if not len(struck) == len(recoveries) == len(kinds):
        raise ValueError(f"{len(kinds)} faults were wanted, {len(struck)} struck, and there were {len(recoveries)} recoveries")
    completed = {x["step"]: x.get("first_t", x["t"]) for x in recorded_steps(run_dir)}
    found = []
    for kind, fault, r in zip(kinds, struck, recoveries, strict=True):
        first_new = r["generation"] + r["steps_rerun"] + 1
        to_new_step_s = completed[first_new] - fault["t"] - r["normal_step_s"]
        kept = {name: r[name] for name in ("kind", "phases", "total_s", "normal_step_s", "steps_rerun", "attempts", "generation")}
        found.append({"loss": kind, "step": fault["step"], "to_new_step_s": round(to_new_step_s, 6), **kept})
    return found


def by_swap(folder: Path, faults: int) -> list[dict[str, Any]]:
    """One job with all kinds of losses in turn."""
    kinds = [kind for _ in range(faults) for kind in KINDS]
    run_dir = folder / "swap"
    summary = run_launch(launch(run_dir, flags(), SPARES), Faults(kinds, run_dir, 2 + SPARES))
    rows = measured(run_dir, summary, kinds)
    wrong = [row for row in rows if row["kind"] != RUNGS[row["loss"]]]
    if wrong:
        raise ValueError(f"a loss was answered on another rung than it is to show: {wrong[0]}")
    return rows


def by_restart(folder: Path, interval: int, faults: int) -> list[dict[str, Any]]:
    """A job with checkpoints at one interval, that loses a node again and again, at any distance from the last checkpoint."""
    kinds: list[Kind] = ["node killed"] * faults
    run_dir = folder / f"restart-{interval}"
    argv = flags("--save", str(folder / f"checkpoints-{interval}"), "--save-interval", str(interval))
    job = launch(run_dir, argv, SPARES, on_failure="restart")
    summary = run_launch(job, Faults(kinds, run_dir, 2 + SPARES, spread_steps=interval, seed=interval))
    return measured(run_dir, summary, kinds)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least, largest, quartiles and count."""
    quarters = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
        "quartiles": [round(quarters[0], 4), round(quarters[2], 4)],
        "n": len(values),
    }


def of_rows(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the recoveries of one kind come to."""
    return {
        "to_new_step_s": spread([row["to_new_step_s"] for row in rows]),
        "total_s": spread([row["total_s"] for row in rows]),
        "phases": {name: spread([row["phases"][name] for row in rows]) for name in PHASES},
        "steps_rerun": spread([row["steps_rerun"] for row in rows]),
        "normal_step_s": spread([row["normal_step_s"] for row in rows]),
    }


def seconds(found: dict[str, Any]) -> dict[str, Any]:
    """A figure: the median, with its spread and phases in the note."""
    total = found["to_new_step_s"]
    phases = ", ".join(f"{name.removesuffix('_s').replace('_', ' ')} {found['phases'][name]['median']:.2f}" for name in PHASES)
    rerun = found["steps_rerun"]
    note = f"{total['min']:.2f} to {total['max']:.2f} s in {total['n']}; {phases}; {rerun['min']:g} to {rerun['max']:g} steps run again"
    return {"value": total["median"], "note": note}


def figures(swaps: list[dict[str, Any]], restarts: dict[int, list[dict[str, Any]]], runs: Sequence[Path]) -> dict[str, Any]:
    """What all of it says."""
    swapped = {kind: of_rows([row for row in swaps if row["loss"] == kind]) for kind in KINDS}
    restarted = {interval: of_rows(rows) for interval, rows in restarts.items()}
    best = min(restarted, key=lambda interval: restarted[interval]["to_new_step_s"]["median"])
    swap_s, restart_s = (x["to_new_step_s"]["median"] for x in (swapped["node killed"], restarted[best]))
    shares = [row["steps_rerun"] / (interval / 2) for interval, rows in restarts.items() for row in rows]
    compared, differ = difference(runs)
    return {
        "restart_vs_swap_to_new_step": {
            "value": restart_s / swap_s,
            "note": f"a node killed: {restart_s:.2f} s by restart at the best of {len(restarted)} intervals ({best} steps), "
            f"{swap_s:.2f} s by hot swap",
        },
        **{f"{RUNGS[kind]}_{kind.replace(' ', '_')}_s": seconds(found) for kind, found in swapped.items()},
        **{f"restart_interval_{interval}_s": seconds(found) for interval, found in restarted.items()},
        "swap_steps_rerun_max": {"value": max(row["steps_rerun"] for row in swaps), "note": f"completed steps, {len(swaps)} losses"},
        "restart_steps_rerun_vs_half_interval": {"value": statistics.fmean(shares), "note": f"mean of {len(shares)} restarts"},
        "steps_that_differ": {"value": differ, "note": f"{compared} steps compared between {len(runs)} runs, and those that ran again"},
        "swap": swapped,
        "restart": restarted,
        "recoveries": {"swap": swaps, "restart": restarts},
    }


def draw(path: Path, found: dict[str, Any]) -> None:
    """Medians of the phases, one bar a kind; above each bar's end the spread; what a restart runs again at the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bars = {f"{RUNGS[kind]}: {kind}": x for kind, x in found["swap"].items()}
    bars |= {f"restart, saved every {interval} steps": x for interval, x in found["restart"].items()}
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    names = list(bars)[::-1]
    left = dict.fromkeys(names, 0.0)
    for i, phase in enumerate(PHASES):
        width = [bars[name]["phases"][phase]["median"] for name in names]
        label = phase.removesuffix("_s").replace("_", " ") + (", and starting new processes" if phase == "halt_s" else "")
        axes.barh(names, width, left=list(left.values()), color=COLORS[i % len(COLORS)], label=label, height=0.6)
        left = {name: left[name] + w for name, w in zip(names, width, strict=True)}
    ends = {name: x["to_new_step_s"]["median"] + x["normal_step_s"]["median"] for name, x in bars.items()}
    rerun = [max(0.0, ends[name] - left[name]) for name in names]
    axes.barh(names, rerun, left=list(left.values()), color="0.75", label="steps run again", height=0.6)
    for y, name in enumerate(names):
        x = bars[name]["to_new_step_s"]
        axes.plot([x["min"], x["max"]], [y, y], color="black", linewidth=1)
        axes.plot([x["median"]], [y], "k|", markersize=10)
        axes.annotate(f" {x['median']:.2f} s", (max(x["max"], left[name]), y), va="center", fontsize=8)
    axes.set_xlabel("seconds from the fault to the end of the first new step\nlines, figures: least, median, largest, less a normal step")
    axes.margins(x=0.1)
    axes.legend(frameon=False, fontsize=8, loc="best")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=FAULTS, help="of each kind, and at each interval")
    parser.add_argument("--intervals", type=int, nargs="+", default=list(INTERVALS))
    parser.add_argument("--quick", action="store_true", help="two faults of each, one interval; the picture is not kept")
    options = parser.parse_args()
    faults, intervals = (2, options.intervals[:1]) if options.quick else (options.faults, options.intervals)
    with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as name:
        folder = Path(name)
        swaps = by_swap(folder, faults)
        restarts = {interval: by_restart(folder, interval, faults) for interval in intervals}
        found = figures(swaps, restarts, [folder / "swap", *(folder / f"restart-{interval}" for interval in intervals)])
        found |= inprocess.figures(folder)
        picture = (folder if options.quick else HERE / "results") / "recovery.png"
        draw(picture, found)
        print(f"{picture} has {picture.stat().st_size} bytes", file=sys.stderr)
    print(json.dumps({"quick": options.quick, **found}))


if __name__ == "__main__":
    main()
