"""Jobs under hot-swap for the tests: the grids, how one is run here, and what two runs must have in common."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.hotswap.cli.launch import Launch, run
from megatron.hotswap.coordinator.service import Scheduled

ROOT = Path(__file__).resolve().parents[2]
PHASES = ("forward", "backward", "grad-sync", "fence", "optimizer", "param-gather", "d2h", "h2h", "log", "eval", "save")
#: Evaluation and saving happen after these many steps, so faults of those phases strike there.
EVERY = 6

_MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 128 --log-interval 1 --eval-iters 1 "
    "--split 90,9,1 --num-workers 0 --hidden-dropout 0.1 --attention-dropout 0.1"
)


@dataclass(frozen=True)
class GridCase:
    """A shape of job: `nodes` virtual nodes of `ranks_per_node` ranks.

    Starting a process costs ten seconds of processor time (torch's imports), so most grids have one rank a node: then a node that
    comes back costs that once.
    """

    name: str
    nodes: int
    ranks_per_node: int
    flags: str

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def phases(self) -> tuple[str, ...]:
        """Those that its steps have. Without a distributed optimizer there are no sharded parameters to gather."""
        return tuple(p for p in PHASES if p != "param-gather" or "--use-distributed-optimizer" in self.flags)


GRIDS = {
    case.name: case
    for case in (
        GridCase("tp2-dp2", 4, 1, "--tensor-model-parallel-size 2 --use-distributed-optimizer"),
        GridCase("pp2-dp2", 4, 1, "--pipeline-model-parallel-size 2 --use-distributed-optimizer"),
        GridCase(
            "tp2-pp2-dp2",
            4,
            2,
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer",
        ),
        GridCase(
            "vpp",
            4,
            1,
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --use-distributed-optimizer",
        ),
        GridCase(
            "ep2-dp2",
            4,
            1,
            "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type allgather "
            "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --use-distributed-optimizer",
        ),
        GridCase(
            "bf16-overlap",
            4,
            1,
            "--tensor-model-parallel-size 2 --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        ),
        GridCase("no-distributed-optimizer", 4, 1, "--tensor-model-parallel-size 2"),
        GridCase(
            "sixteen",
            4,
            4,
            "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --num-experts 4 "
            "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --moe-token-dispatcher-type allgather "
            "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --bf16 --use-distributed-optimizer "
            "--overlap-grad-reduce --overlap-param-gather",
        ),
    )
}


#: Of the reference job (conftest.py) of the first grid.
REFERENCE_STEPS = 160
#: The first grid on nodes of two ranks each: the same job, so its steps are the same bits.
BY_TWO = GridCase("tp2-dp2 by two", 2, 2, GRIDS["tp2-dp2"].flags)


@dataclass(frozen=True)
class Fault:
    """One fault of a schedule."""

    action: str
    phase: str
    scope: str = "node"


def step_for(phase: str, step: int) -> int:
    """The first from this one on that has the phase: evaluation and saving happen every EVERY steps only."""
    return -(-step // EVERY) * EVERY if phase in ("eval", "save") else step


def schedule(faults: Sequence[Fault], world_size: int) -> tuple[list[Scheduled], int]:
    """Steps for the faults, two apart at least, on the first and the last rank in turn; and how many steps the job needs."""
    planned, step = [], 1
    for i, fault in enumerate(faults):
        step = step_for(fault.phase, step + 2)
        rank = world_size - 1 if i % 2 == 0 else 0
        planned.append(Scheduled(fault.action, fault.scope, rank, step, fault.phase))
    return planned, step + 3


def argv(case: GridCase, iterations: int, save: Path | None, extra: str = "", checkpoint_format: str = "torch") -> list[str]:
    """The Megatron command line of a case. Rates do not depend on the number of steps, so runs of different length agree.

    torch_dist, Megatron's default format, starts a process for every rank's every save: ten seconds of processor time each.
    """
    flags = f"{_MODEL} --train-iters {iterations} --lr-decay-iters 200 --eval-interval {EVERY} {case.flags} {extra}"
    saving = ["--save", str(save), "--save-interval", str(EVERY), "--ckpt-format", checkpoint_format] if save is not None else []
    waits = "--hot-swap-wait-for-spare-s 300 --hot-swap-respawn-timeout-s 300"  # processes start slowly on a machine that is full
    deadlines = "--hot-swap-lease-s 6 --hot-swap-collective-timeout-s 60 --hot-swap-halt-timeout-s 120"
    return [*flags.split(), *waits.split(), *deadlines.split(), "--hot-swap-check-groups", "yes", *saving]


def run_job(
    case: GridCase,
    run_dir: Path,
    command: list[str],
    *,
    spares: int = 0,
    faults: Sequence[Scheduled] = (),
    path: Sequence[Path] = (),
    **launch: Any,
) -> dict[str, Any]:
    """Run a job to its end; returns its summary. A killed node comes back as the next spare. `path` is where modules are found as well."""
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, [ROOT, *path]))
    callbacks = {name: launch.pop(name) for name in ("show", "started") if name in launch}
    job = Launch(
        case.nodes,
        case.ranks_per_node,
        spares,
        str(launch.pop("script", ROOT / "pretrain_gpt.py")),
        command,
        run_dir,
        faults=list(faults),
        return_lost_nodes_after_s=launch.pop("return_lost_nodes_after_s", 0.0 if faults else None),
        **launch,
    )
    code = asyncio.run(run(job, **callbacks))
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    assert code == summary["exit_code"]
    return summary


def steps(run_dir: Path) -> list[tuple[Any, ...]]:
    """What each step of a run was, exactly."""
    lines = map(json.loads, (run_dir / "steps.jsonl").read_text().splitlines())
    return [(x["step"], x["loss_hex"], x["grad_norm_hex"], x["consumed_samples"]) for x in lines]


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind."""
    return [x for x in map(json.loads, (run_dir / "events.jsonl").read_text().splitlines()) if x["kind"] == kind]


def validation_losses(run_dir: Path) -> dict[int, str]:
    """Megatron's validation lines, by iteration, from the logs of all workers; a repeated one must repeat its value."""
    found: dict[int, str] = {}
    for log in (run_dir / "logs").glob("node*.log"):
        for line in log.read_text(errors="replace").splitlines():
            if "validation loss at iteration" in line and "test set" not in line and "validation set" not in line:
                head, rest = line.split("|", 1)
                iteration = int(head.split()[-1])
                assert found.setdefault(iteration, rest) == rest, f"two values for iteration {iteration} in {log}"
    return found
