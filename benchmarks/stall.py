"""What hot-swap costs a job in which nothing fails: exposed stall, and the time of whole steps with it and without.

A small GPT, tensor parallel 2, pipeline parallel 2, data parallel 2: 8 ranks on 2 virtual nodes of this machine. The same command
runs with hot-swap and plainly under torchrun, in turns; step times are those of Megatron's own log in both, the first ones dropped,
and each pair gives one ratio. Exposed stall is what the training thread waits at the fence, as the run records it.

The promise (at most 1 % of the step) presupposes that copying takes at most half a step; the copy times are those that the agents
measure: from the snapshot's begin until the holder has it, checked, of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from jobs import hot_swap_step_times, recorded_steps, run_hot_swap, run_plain, step_times

NODES, RANKS_PER_NODE = 2, 4
PAIRS, STEPS, WARM_UP = 3, 40, 10
COPY_MAX_FRACTION = 0.5

MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer "
    "--micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 1024 "
    "--log-interval 1 --eval-iters 0 --eval-interval 100000 --split 99,1,0 --num-workers 0"
)


def flags(steps: int) -> list[str]:
    """Megatron's."""
    return [*MODEL.split(), "--train-iters", str(steps)]


def with_hot_swap(folder: Path, steps: int) -> dict[str, Any]:
    """One run: median step, stall and copy times."""
    summary = run_hot_swap(folder, NODES, RANKS_PER_NODE, flags(steps))
    times = [s for step, s in hot_swap_step_times(folder).items() if step > WARM_UP]
    counted = [line for line in recorded_steps(folder) if line["step"] > WARM_UP]
    return {
        "step_s": statistics.median(times),
        "exposed_stall_fraction": sum(x["exposed_stall_s"] for x in counted) / sum(x["step_s"] for x in counted),
        "copy": summary["copy"],
    }


def without(folder: Path, steps: int) -> float:
    """One plain run: its median step in seconds."""
    return statistics.median(s for step, s in step_times(run_plain(folder, NODES * RANKS_PER_NODE, flags(steps))).items() if step > WARM_UP)


def pairs(count: int, steps: int, folder: Path) -> list[dict[str, Any]]:
    """Run them, in turns."""
    done = []
    for pair in range(count):
        on_first = pair % 2 == 0
        hot = with_hot_swap(folder / f"hot-swap-{pair}", steps) if on_first else {}
        plain_s = without(folder / f"plain-{pair}", steps)
        hot = hot or with_hot_swap(folder / f"hot-swap-{pair}", steps)
        done.append({**hot, "plain_step_s": plain_s, "ratio": hot["step_s"] / plain_s})
        print(
            f"pair {pair + 1} of {count}: a step takes {hot['step_s']:.4f} s with hot-swap, {plain_s:.4f} s without; "
            f"exposed stall {hot['exposed_stall_fraction']:.3%}; copying takes {hot['copy']['total_s']:.4f} s",
            file=sys.stderr,
        )
    return done


def figures(done: list[dict[str, Any]]) -> dict[str, Any]:
    """What they say."""
    step_s = statistics.median(d["step_s"] for d in done)
    copy = {name: statistics.median(d["copy"][name] for d in done) for name in ("d2h_s", "h2h_s", "total_s")}
    fraction = copy["total_s"] / step_s
    stalls = [d["exposed_stall_fraction"] for d in done]
    ratios = [d["ratio"] for d in done]
    stall: dict[str, Any] = {
        "value": statistics.median(stalls),
        "note": f"{min(stalls):.3%} to {max(stalls):.3%} in {len(done)} runs; copying takes {fraction:.0%} of a step of {step_s:.3f} s",
    }
    if fraction > COPY_MAX_FRACTION:
        stall["condition"] = f"copying takes {fraction:.0%} of the step, and the promise is for {COPY_MAX_FRACTION:.0%} at most"
    return {
        "exposed_stall_fraction": stall,
        "step_ratio_on_off": {
            "value": statistics.median(ratios),
            "note": f"whole step with hot-swap against without, {min(ratios):.3f} to {max(ratios):.3f} in {len(done)} pairs; "
            f"{NODES * RANKS_PER_NODE} ranks and 2 agents share this machine's cores, so copying takes time from training here",
        },
        "copy_fraction_of_step": {"value": fraction, "note": f"D2H {copy['d2h_s']:.4f} s, checksum and H2H {copy['h2h_s']:.4f} s"},
        "pairs": done,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    if args.steps <= WARM_UP:
        parser.error(f"--steps must be greater than the {WARM_UP} that are dropped, got {args.steps}")
    with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as folder:
        print(json.dumps(figures(pairs(args.pairs, args.steps, Path(folder)))))


if __name__ == "__main__":
    main()
