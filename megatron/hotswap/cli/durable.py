"""Durable generations as a job's start sees them: where they go, and which of them the job goes on from."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..control.config import Durable
from ..errors import UsageError
from ..recovery.plan import Beginning, DurableFolder, choose_beginning
from ..snapshot import durable, manifest
from .checks import loads_where_it_saves, megatron_flags

_TRACKER = "latest_checkpointed_iteration.txt"


def shape_of(flags: argparse.Namespace, world_size: int) -> dict[str, int]:
    """The sizes that must be the same for a snapshot to be loaded, by their flags."""
    return {
        manifest.WORLD_SIZE: world_size,
        "tensor-model-parallel-size": flags.tensor_model_parallel_size,
        "pipeline-model-parallel-size": flags.pipeline_model_parallel_size,
        "context-parallel-size": flags.context_parallel_size,
        "expert-model-parallel-size": flags.expert_model_parallel_size,
    }


def durable_of(argv: Sequence[str], world_size: int, keep: int) -> Durable | None:
    """What the core must know of --save; None without it. What a reused --save has of another course of training is set aside.

    Raises:
        UsageError: it cannot be read, or the newest generation was written on another grid.
    """
    flags = megatron_flags(argv)
    if flags.save is None:
        return None
    root = Path(flags.save).absolute() / manifest.FOLDER
    shape = shape_of(flags, world_size)
    begin, refused = _beginning(flags, root, shape)
    for other in begin.aside:
        try:
            durable.set_aside(root, other.folder)
        except OSError as failure:
            raise UsageError(
                f"{root / other.folder} is of another course of training than the one that begins now, and could not be set aside: "
                f"{failure}; move it away, or give another --save"
            ) from failure
    return Durable(str(root), shape, keep, begin.load, tuple(refused), _checkpoints(flags))


def _checkpoints(flags: argparse.Namespace) -> str:
    """Where Megatron saves now and then, if that is where this command, started again, loads from."""
    goes_on = flags.save_interval and not flags.finetune and loads_where_it_saves(flags)
    return str(Path(flags.save).resolve()) if goes_on else ""


def _beginning(flags: argparse.Namespace, root: Path, shape: dict[str, int]) -> tuple[Beginning, list[str]]:
    try:
        manifests, folders, refused = durable.find(root)
    except OSError as failure:
        raise UsageError(f"{root} cannot be read: {failure}; let this user read it, or give another --save") from failure
    whole = zip(manifests, folders, strict=True)
    found = [DurableFolder(folder, x.generation, x.run_id, tuple(sorted(x.shape.items()))) for x, folder in whole]
    saved = _iteration(flags.save)
    loads = 0 if flags.load is None or flags.finetune else _iteration(flags.load)
    begin = choose_beginning(found, saved, loads, shape)
    if isinstance(begin, str):
        raise UsageError(f"{root}: {begin}")
    if refused and not begin.load and not loads:  # else there is a newer or as good a place to begin from
        raise UsageError(
            f"a durable generation is damaged, and there is no other: {refused[0]}; move it away to begin anew, or give --load for "
            "Megatron's own checkpoint"
        )
    return begin, refused


def _iteration(folder: str) -> int:
    """Of the newest checkpoint that Megatron has there; 0: none. ("release" is one without iterations.)"""
    try:
        text = Path(folder, _TRACKER).read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0


def describe(settings: Durable | None) -> list[str]:
    """For the summary at start."""
    if settings is None:
        return [
            "  no --save: where no spare comes in time, the job ends with code 75 and has nowhere to write what it has trained; with "
            "--save DIR it does, and the same command goes on from there"
        ]
    lines = [
        f"  where no spare comes in time, the newest generation goes to {settings.root} (the newest {settings.keep} are kept), and the job "
        "ends with code 75"
    ]
    if not settings.checkpoints:
        lines.append(
            "  where a rank is lost with all its copies, the job ends with code 1; with --save-interval and --load DIR, DIR being that of "
            "--save, it ends with code 75, and the same command goes on from Megatron's newest checkpoint"
        )
    lines += [f"  cannot be used: {refused}" for refused in settings.refused]
    if settings.begin:
        first = settings.begin[0]
        lines.append(f"  goes on from durable generation {first.generation} of run {first.run_id}: {settings.root}/{first.folder}")
    return lines
