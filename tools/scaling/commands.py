"""Megatron's command line of a point: the same with hot-swap and without, on mock data, so that no site needs files for it."""

from __future__ import annotations

import shlex
from pathlib import Path

from .points import Point
from .sites import Site

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "pretrain_gpt.py"


def model_flags(point: Point, site: Site) -> list[str]:
    """What decides sizes and speeds: the model, the grid, the batch, the precision."""
    shape = point.shape
    sizes = {
        "num-layers": shape.layers,
        "hidden-size": shape.hidden,
        "num-attention-heads": shape.heads,
        "seq-length": point.sequence,
        "max-position-embeddings": point.sequence,
        "tensor-model-parallel-size": point.tensor,
        "pipeline-model-parallel-size": point.pipeline,
        "micro-batch-size": point.micro_batch,
        "global-batch-size": point.global_batch,
        "vocab-size": point.vocabulary,
    }
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    words += ["--tokenizer-type", "NullTokenizer"]
    if point.zero_stage == 1:
        words.append("--use-distributed-optimizer")
    if site.machine is not None:
        words.append("--bf16")
        words += ["--overlap-grad-reduce", "--overlap-param-gather"] if point.zero_stage == 1 else []
        words += ["--sequence-parallel"] if point.tensor > 1 else []
    return [*words, *shlex.split(site.megatron)]


def training_command(point: Point, site: Site, steps: int) -> list[str]:
    """The script and its flags for so many steps. Each step is logged, since its time is read from Megatron's own log."""
    fixed = "--lr 1.5e-4 --mock-data --split 99,1,0 --log-interval 1 --eval-iters 0 --eval-interval 1000000"
    words = [*model_flags(point, site), *fixed.split(), "--train-iters", str(steps)]
    return [str(SCRIPT), *words, *(["--num-workers", "0"] if site.machine is None else [])]


def hot_swap_command(point: Point, site: Site, steps: int) -> list[str]:
    """With hot-swap's own flags, but for those that the start itself sets."""
    interface = ["--hot-swap-interface", site.interface] if site.interface else []
    return [*training_command(point, site, steps), *interface]


def plain_command(point: Point, site: Site, steps: int, save_step: int, checkpoint: Path) -> list[str]:
    """Without hot-swap. It saves once, and begins at what was saved where there is something: started again, it is the same command."""
    flags = ["--save", str(checkpoint), "--load", str(checkpoint), "--save-interval", str(save_step)]
    return [*training_command(point, site, steps), *flags]
