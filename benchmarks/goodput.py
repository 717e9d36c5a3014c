"""What the same losses cost the same job, by hot swap and by checkpoint-restart: wall time over that of a run that nothing disturbs.

    python benchmarks/goodput.py [--steps 300] [--losses 10] [--seed 7]
    python benchmarks/goodput.py --quick      # 40 steps, 2 losses: that the chain works, no result

Five runs of one training command (TP 2 x DP 2, dropout on): undisturbed and plain, before and after the others; with checkpoints at a
guessed interval, which says what a save costs; by restart, at the interval that loses least by Daly's formula for these costs and this
rate of losses (simulate/theory.py); by hot swap. The last two lose the same nodes' ranks in the same steps and phases, drawn by a seed. A
spare is warm for each loss, and lost nodes do not come back: here their processes would take the training's cores to start on, which nodes
of a cluster do not. Wall time counts from the begin of the first step to the end of the last. The losses of all runs must be the same bits.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from disturbed import difference, launch
from jobs import recorded_steps, run_launch

from megatron.hotswap.cli.picture import COLORS
from megatron.hotswap.coordinator.service import Scheduled
from megatron.hotswap.simulate.theory import daly_interval, expected_wall

HERE = Path(__file__).resolve().parent
STEPS, LOSSES, SEED = 300, 10, 7
RANKS = 4
#: The first steps of a process are not normal ones; and every replica must be there again before the next loss.
FIRST_LOSS, APART_STEPS = 10, 10
#: At which what a save costs is measured.
CALIBRATION_STEPS, CALIBRATION_INTERVAL = 40, 5
PHASES = ("forward", "backward", "grad-sync", "optimizer", "param-gather")

MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --attention-dropout 0.1 "
    "--hidden-dropout 0.1 --tensor-model-parallel-size 2 --use-distributed-optimizer --micro-batch-size 4 --global-batch-size 32 "
    "--lr 4e-3 --lr-decay-iters 1000 --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --log-interval 1 --eval-iters 0 "
    "--eval-interval 100000 --split 99,1,0 --num-workers 0 --ckpt-format torch"
)
DEADLINES = (
    "--hot-swap-lease-s 6 --hot-swap-wait-for-spare-s 600 --hot-swap-respawn-timeout-s 300 --hot-swap-collective-timeout-s 60 "
    "--hot-swap-halt-timeout-s 120"
)


def schedule(steps: int, losses: int, seed: int) -> list[Scheduled]:
    """Which node is lost when: a rank of it, a step and a phase, by chance, at least APART_STEPS apart.

    Raises:
        ValueError: so many do not fit into so many steps.
    """
    chance = random.Random(seed)
    room = steps - FIRST_LOSS - 5 - (losses - 1) * APART_STEPS
    if room < 1:
        raise ValueError(f"{losses} losses at least {APART_STEPS} steps apart do not fit into {steps} steps; give more --steps")
    at = sorted(chance.randrange(room) for _ in range(losses))
    found = [FIRST_LOSS + step + i * APART_STEPS for i, step in enumerate(at)]
    return [Scheduled("kill", "node", chance.randrange(RANKS), step, chance.choice(PHASES)) for step in found]


def wall_s(run_dir: Path) -> float:
    """From the begin of the first step to the end of the last, s."""
    lines = recorded_steps(run_dir)
    return float(lines[-1]["t"] - lines[0]["t"] + lines[0]["step_s"])


def save_s(run_dir: Path, interval: int) -> float:
    """What a save costs, s: how much longer it is from a saved step to the end of the next one than between others, medians."""
    lines = recorded_steps(run_dir)
    gaps = {a["step"]: b["t"] - a["t"] for a, b in pairwise(lines) if a["step"] > interval}
    saved = [gap for step, gap in gaps.items() if step % interval == 0]
    others = [gap for step, gap in gaps.items() if step % interval]
    return max(0.0, statistics.median(saved) - statistics.median(others))


class Runs:
    """The runs of one comparison, in one folder."""

    def __init__(self, folder: Path, steps: int, faults: list[Scheduled]) -> None:
        self.folder, self.steps, self.faults = folder, steps, faults

    def restarting(self, name: str, interval: int, steps: int, faults: list[Scheduled]) -> dict[str, Any]:
        """Plain Megatron with checkpoints; returns its summary."""
        argv = [*self._flags(steps), "--save", str(self.folder / f"{name}-checkpoints"), "--save-interval", str(interval)]
        return self._run(name, argv, faults, on_failure="restart")

    def swapping(self) -> dict[str, Any]:
        """With hot swap; returns its summary."""
        return self._run("swap", self._flags(self.steps), self.faults)

    def _run(self, name: str, argv: list[str], faults: list[Scheduled], **settings: Any) -> dict[str, Any]:
        return run_launch(launch(self.folder / name, argv, len(faults), faults=list(faults), return_lost_nodes_after_s=None, **settings))

    def _flags(self, steps: int) -> list[str]:
        return [*MODEL.split(), *DEADLINES.split(), "--train-iters", str(steps)]


def best_interval(cost_s: float, step_s: float, undisturbed_s: float, losses: int) -> tuple[int, float]:
    """Steps between checkpoints that lose least, by Daly, and the mean time between losses that it is for, s."""
    mtbf_s = undisturbed_s / losses
    return max(1, round(daly_interval(cost_s, mtbf_s) / step_s)), mtbf_s


def compare(runs: Runs) -> dict[str, Any]:
    """Run all four; the figures."""
    losses = len(runs.faults)
    runs.restarting("undisturbed", 10 * runs.steps, runs.steps, [])
    first_s = wall_s(runs.folder / "undisturbed")
    step_s = first_s / runs.steps
    runs.restarting("calibration", CALIBRATION_INTERVAL, min(CALIBRATION_STEPS, runs.steps), [])
    cost_s = save_s(runs.folder / "calibration", CALIBRATION_INTERVAL)
    interval, mtbf_s = best_interval(cost_s, step_s, first_s, losses)
    print(f"a step takes {step_s:.3f} s, a save {cost_s:.3f} s: a checkpoint every {interval} steps", file=sys.stderr, flush=True)
    restart = runs.restarting("restart", interval, runs.steps, runs.faults)
    swap = runs.swapping()
    runs.restarting("undisturbed-again", 10 * runs.steps, runs.steps, [])  # a machine is not as fast all the time
    second_s = wall_s(runs.folder / "undisturbed-again")
    undisturbed_s = (first_s + second_s) / 2
    for name, summary in (("restart", restart), ("swap", swap)):
        if len(summary["recoveries"]) != losses:
            raise ValueError(f"{name}: {losses} losses were scheduled, and there were {len(summary['recoveries'])} recoveries")
    names = ("undisturbed", "calibration", "restart", "swap", "undisturbed-again")
    compared, differ = difference([runs.folder / name for name in names])
    walls = {"undisturbed": undisturbed_s, **{name: wall_s(runs.folder / name) for name in ("restart", "swap")}}
    lost = {name: walls[name] - undisturbed_s for name in ("restart", "swap")}
    restart_s = statistics.fmean(r["total_s"] for r in restart["recoveries"])
    predicted_s = expected_wall(undisturbed_s, interval * step_s, cost_s, restart_s, mtbf_s)
    over = {name: wall / undisturbed_s for name, wall in walls.items()}
    rerun = {name: sum(r["steps_rerun"] for r in summary["recoveries"]) for name, summary in (("restart", restart), ("swap", swap))}
    return {
        "swap_wall_over_undisturbed": {"value": over["swap"], "note": _note(swap, walls["swap"], undisturbed_s, rerun["swap"])},
        "restart_wall_over_undisturbed": {
            "value": over["restart"],
            "note": _note(restart, walls["restart"], undisturbed_s, rerun["restart"])
            + f"; saved every {interval} steps; Daly's wall time for these costs {predicted_s / undisturbed_s:.2f}",
        },
        "time_lost_restart_vs_swap": {
            "value": lost["restart"] / lost["swap"] if lost["swap"] > 0 else None,  # nothing that this machine's noise does not hide
            "note": f"{lost['restart']:.1f} s and {lost['swap']:.1f} s more than undisturbed, which took {first_s:.1f} s before and "
            f"{second_s:.1f} s after",
        },
        "steps_that_differ": {"value": differ, "note": f"{compared} steps compared between {len(names)} runs, and those that ran again"},
        "costs": {"step_s": step_s, "save_s": cost_s, "interval_steps": interval, "mtbf_s": mtbf_s, "restart_s": restart_s},
        "goodput": {name: 1.0 / ratio for name, ratio in over.items()},
        "walls_s": walls,
        "schedule": [{"step": f.at_step, "rank": f.rank, "phase": f.phase} for f in runs.faults],
        "recoveries": {"restart": restart["recoveries"], "swap": swap["recoveries"]},
    }


def _note(summary: dict[str, Any], wall: float, undisturbed_s: float, rerun: int) -> str:
    each = statistics.median(r["total_s"] for r in summary["recoveries"])
    count = len(summary["recoveries"])
    return f"{wall:.1f} s for {undisturbed_s:.1f} s of training; {count} losses, {each:.2f} s each (median), {rerun} steps run again"


def draw(path: Path, folder: Path, found: dict[str, Any]) -> None:
    """Steps over wall time, of the three."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    labels = {"undisturbed": "undisturbed", "swap": "hot swap", "restart": "checkpoint-restart, best interval"}
    for (name, label), color in zip(labels.items(), COLORS, strict=False):
        lines = recorded_steps(folder / name)
        begin = lines[0]["t"] - lines[0]["step_s"]
        seconds = [0.0, *(line["t"] - begin for line in lines)]
        axes.step(seconds, [0, *(line["step"] for line in lines)], where="post", color=color, label=f"{label}: {seconds[-1]:.0f} s")
    for loss in found["schedule"]:
        axes.axhline(loss["step"], color="0.8", linewidth=0.7, zorder=0)
    axes.set_xlabel("seconds since the first step began")
    axes.set_ylabel("steps, as they finally counted")
    axes.set_title(f"{len(found['schedule'])} nodes lost, in the steps of the grey lines", fontsize=10)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--losses", type=int, default=LOSSES)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--quick", action="store_true", help="40 steps, 2 losses; the picture is not kept")
    options = parser.parse_args()
    steps, losses = (40, 2) if options.quick else (options.steps, options.losses)
    with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as name:
        runs = Runs(Path(name), steps, schedule(steps, losses, options.seed))
        found = compare(runs)
        picture = (Path(name) if options.quick else HERE / "results") / "goodput.png"
        draw(picture, Path(name), found)
        print(f"{picture} has {picture.stat().st_size} bytes", file=sys.stderr)
    print(json.dumps({"job": {"steps": steps, "losses": losses, "seed": options.seed, "quick": options.quick}, **found}))


if __name__ == "__main__":
    main()
