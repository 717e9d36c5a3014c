"""Many swaps in one job: nothing grows from the third on, and the losses are those of an undisturbed run (guarantees 7 and 8).

    python benchmarks/swaps.py [--swaps 50] [--ranks-per-node 4]

Two nodes and a spare (TP 2, PP 2, DP the rest). The second node is killed again and again, in all phases of a step; each killed node
comes back as the next spare. The first node's processes live through all of it: after each recovery the kernel is asked what they have.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from jobs import SCRIPT, lines_of, recorded_steps, run_hot_swap, run_launch
from memory import role, usage

from megatron.hotswap.cli.launch import Launch
from megatron.hotswap.coordinator.service import Coordinator, Scheduled

#: A fault is armed some steps ahead, and one that is armed on a node before it dies is lost with it.
STEPS_A_SWAP = 4
LEVEL_FROM = 3  # swaps
#: Where the losses strike, in turn.
PHASES = ("forward", "backward", "grad-sync", "fence", "optimizer", "param-gather", "d2h", "log")

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --use-distributed-optimizer "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 255 "
    "--log-interval 1 --eval-iters 0 --eval-interval 100000 --split 99,1,0 --num-workers 0 --tensor-model-parallel-size 2 "
    "--hot-swap-wait-for-spare-s 600 --hot-swap-check-groups yes"
)


@dataclass(frozen=True)
class Look:
    """What the processes of the node that lives on have, all together, after a swap; and its shared memory."""

    swaps: int
    memory_kib: int
    descriptors: int
    sockets: int
    threads: int
    shared_bytes: int


def look(node: str, swaps: int) -> Look:
    """Ask the kernel about the workers of a node of this job."""
    found = []
    sockets, shared = 0, {}
    for process in psutil.Process().children(recursive=True):
        try:
            if role(process.cmdline()) == "worker" and process.environ().get("DEADPOOL_NODE") == node:
                found.append(usage(process.pid, swaps))
                for path in _descriptors(process.pid):
                    target = os.readlink(path)
                    sockets += target.startswith("socket:")
                    if target.startswith("/memfd:"):
                        shared[os.stat(path).st_ino] = os.stat(path).st_size
        except (psutil.Error, OSError):
            continue
    return Look(
        swaps,
        sum(u.memory_kib for u in found),
        sum(u.descriptors for u in found),
        sockets,
        sum(u.threads for u in found),
        sum(shared.values()),
    )


def _descriptors(pid: int) -> list[str]:
    return [entry.path for entry in os.scandir(f"/proc/{pid}/fd")]


def disturbed(run_dir: Path, swaps: int, ranks_per_node: int, argv: list[str]) -> tuple[dict[str, Any], list[Look]]:
    """The job with its losses; its summary, and a look after each."""
    last_rank = 2 * ranks_per_node - 1
    faults = [Scheduled("kill", "node", last_rank, STEPS_A_SWAP * (i + 1), PHASES[i % len(PHASES)]) for i in range(swaps)]
    looks: list[Look] = []

    def show(coordinator: Coordinator) -> None:
        done, last = len(coordinator.recorder.recoveries), coordinator.recorder.last_step
        if done > len(looks) and last is not None and last.step > STEPS_A_SWAP * done:  # one whole step after it
            looks.append(look("node0", done))
            print(f"{done} swaps: {asdict(looks[-1])}", file=sys.stderr)

    job = Launch(2, ranks_per_node, 1, str(SCRIPT), argv, run_dir, faults=faults, return_lost_nodes_after_s=0.0)
    return run_launch(job, show), looks


def outs_by_phase(run_dir: Path) -> dict[str, list[float]]:
    """Phase of a step -> seconds from each halt order of a loss there until the last survivor was out."""
    outs: dict[str, list[float]] = {phase: [] for phase in PHASES}
    struck = ""
    for event in lines_of(run_dir / "events.jsonl"):
        if event["kind"] == "inject":
            struck = event["reason"].rsplit(" ", 1)[-1]
        elif event["kind"] == "recovered":
            outs[struck].append(event["recovery"]["survivors_out_s"])
    return outs


def undisturbed(run_dir: Path, swaps: int, ranks_per_node: int, argv: list[str]) -> list[Look]:
    """The job without losses; a look at the steps at which `disturbed` has its own. Megatron's first hundred steps grow by themselves."""
    looks: list[Look] = []

    def show(step: int) -> None:
        if len(looks) < swaps and step > STEPS_A_SWAP * (len(looks) + 1):
            looks.append(look("node0", len(looks) + 1))

    run_hot_swap(run_dir, 2, ranks_per_node, argv, show)
    return looks


def growth(looks: list[Look], name: str) -> int:
    """From the third swap on: the median of the last looks less that of the first ones."""
    values = [getattr(each, name) for each in looks if each.swaps >= LEVEL_FROM]
    window = max(1, len(values) // 5)
    return int(statistics.median(values[-window:]) - statistics.median(values[:window]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=50)
    parser.add_argument("--ranks-per-node", type=int, default=4)
    options = parser.parse_args()
    pipeline = ["--pipeline-model-parallel-size", "2"] if options.ranks_per_node >= 4 else []
    steps = STEPS_A_SWAP * (options.swaps + 1) + 2
    argv = [*MODEL.split(), *pipeline, "--train-iters", str(steps)]
    with tempfile.TemporaryDirectory() as folder:
        plain = undisturbed(Path(folder) / "undisturbed", options.swaps, options.ranks_per_node, argv)
        summary, looks = disturbed(Path(folder) / "disturbed", options.swaps, options.ranks_per_node, argv)
        outs = outs_by_phase(Path(folder) / "disturbed")
        was, wanted = (
            [(x["step"], x["loss_hex"], x["grad_norm_hex"]) for x in recorded_steps(Path(folder) / name)]
            for name in ("disturbed", "undisturbed")
        )
    recoveries = summary["recoveries"]
    totals = [r["total_s"] for r in recoveries]
    figures = {
        "swaps": len(recoveries),
        "steps_that_differ": sum(a != b for a, b in zip(was, wanted, strict=True)),
        **{f"{name}_growth": growth(looks, name) for name in ("descriptors", "sockets", "threads", "shared_bytes")},
        "memory_growth_kib": {
            "value": growth(looks, "memory_kib") - growth(plain, "memory_kib"),
            "note": f"of {options.ranks_per_node} workers together, from swap {LEVEL_FROM} to {len(recoveries)}: by "
            f"{growth(looks, 'memory_kib')} KiB, and by {growth(plain, 'memory_kib')} KiB in the same steps undisturbed",
        },
        "recovery_median_s": {"value": round(statistics.median(totals), 2), "note": f"longest {max(totals):.2f} s"},
        "out_median_s": {
            "value": round(max(statistics.median(found) for found in outs.values() if found), 3),
            "note": "from the halt order to the last survivor out of its collective; medians by phase of the loss: "
            + ", ".join(f"{phase} {statistics.median(found):.3f}" for phase, found in outs.items() if found)
            + f"; longest {max(map(max, filter(None, outs.values()))):.3f} s",
        },
    }
    print(json.dumps({**figures, "looks": [asdict(each) for each in looks]}))


if __name__ == "__main__":
    main()
