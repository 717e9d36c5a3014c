"""Bad input is answered in words before any process starts: sizes, data files, the checkpoint, the script."""

from __future__ import annotations

import argparse
import glob
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..errors import UsageError
from ..topology.grid import Grid
from .checkpoint_args import saved_flags

_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_HEAD_BYTES = 34
_DTYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}

_PARALLEL_SIZES = (
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "context-parallel-size",
    "expert-model-parallel-size",
)
_SIZES = (
    "num-layers",
    "num-attention-heads",
    "hidden-size",
    "ffn-hidden-size",
    "max-position-embeddings",
    "global-batch-size",
    "micro-batch-size",
    "num-experts",
    "train-iters",
)
_DATA_PATHS = ("data-path", "train-data-path", "valid-data-path", "test-data-path")
_LEASE_ON_SHARED_CORES_S = 10
#: Sizes that a checkpoint and the command must agree on, as Megatron's flags name them.
_MODEL_SIZES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "max_position_embeddings",
    "num_experts",
)


class PlainParser(argparse.ArgumentParser):
    """Answers a mistake with an error that the command shows, not with a usage page."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"the training command cannot be read: {message}; correct it")


def megatron_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Those of Megatron's flags that can be checked without it."""
    parser = PlainParser(allow_abbrev=False, add_help=False)
    for name in _PARALLEL_SIZES:
        parser.add_argument(f"--{name}", type=int, default=1)
    for name in _SIZES:
        parser.add_argument(f"--{name}", type=int)
    for name in _DATA_PATHS:
        parser.add_argument(f"--{name}", nargs="*", default=[])
    parser.add_argument("--load")
    parser.add_argument("--save")
    parser.add_argument("--save-interval", "--persistent-save-interval", type=int)
    parser.add_argument("--use-checkpoint-args", action="store_true")
    parser.add_argument("--finetune", action="store_true")
    args, _ = parser.parse_known_args(list(argv))
    return args


def loads_where_it_saves(flags: argparse.Namespace) -> bool:
    """Whether --load and --save, of which there is one, are the same folder."""
    return flags.load is not None and Path(flags.load).resolve() == Path(flags.save).resolve()


def grid_of(argv: Sequence[str], world_size: int) -> Grid:
    """The grid that Megatron's flags describe."""
    args = megatron_flags(argv)
    return Grid(
        world_size, args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    )


def check_nodes(nodes: int, ranks_per_node: int, spares: int) -> None:
    """Check what is asked of the machines.

    Raises:
        UsageError: states the rule, the values and what to do.
    """
    for flag, value, least in (("--nodes", nodes, 1), ("--ranks-per-node", ranks_per_node, 1), ("--spares", spares, 0)):
        if value < least:
            raise UsageError(f"{flag} must be at least {least}, got {value}")
    if nodes == 1:
        raise UsageError(
            "replicas need at least two nodes, since a rank and its replica must not be lost together, and "
            f"--nodes is {nodes}: "
            f"spread the ranks over two (--nodes 2 --ranks-per-node {max(1, ranks_per_node // 2)}), or train "
            "without hot-swap: "
            "torchrun pretrain_gpt.py …"
        )


def check_command(script: str, argv: Sequence[str], world_size: int) -> None:
    """Check a Megatron command line for what can be known before it starts.

    Raises:
        UsageError: states the rule, the values and what to do.
    """
    if not Path(script).is_file():
        raise UsageError(
            f"the training script {script!r} is not a file; give the path of a script such as pretrain_gpt.py"
        )
    for flag, ours in (("--hot-swap-run-dir", "--run-dir"), ("--world-size", "--nodes"), ("--hot-swap-on-failure", "--on-failure")):
        if any(word == flag or word.startswith(f"{flag}=") for word in argv):
            raise UsageError(f"{flag} is set by `deadpool run` itself; leave it out after --, and give {ours} before it")
    args = megatron_flags(argv)
    _check_sizes(args, grid_of(argv, world_size))
    for value in [path for name in _DATA_PATHS for path in getattr(args, name.replace("-", "_"))]:
        if not _is_number(value):
            check_data(value)
    if args.load is not None:
        check_checkpoint(args)


def _check_sizes(args: argparse.Namespace, grid: Grid) -> None:
    def divides(what: str, value: int | None, by_what: str, by: int) -> None:
        if value is not None and value % by:
            raise UsageError(
                f"{what} must be a multiple of {by_what}: {value} is not a multiple of {by}; change one of them"
            )

    for name in (*_PARALLEL_SIZES, *_SIZES):
        value = getattr(args, name.replace("-", "_"))
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be at least 1, got {value}")
    divides("--num-layers", args.num_layers, "--pipeline-model-parallel-size", grid.pipeline)
    divides("--num-attention-heads", args.num_attention_heads, "--tensor-model-parallel-size", grid.tensor)
    if args.num_attention_heads is not None:
        divides("--hidden-size", args.hidden_size, "--num-attention-heads", args.num_attention_heads)
    divides("--num-experts", args.num_experts, "--expert-model-parallel-size", args.expert_model_parallel_size)
    if args.micro_batch_size is not None:
        per_step = args.micro_batch_size * grid.data
        divides("--global-batch-size", args.global_batch_size, "--micro-batch-size x data-parallel size", per_step)


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def check_checkpoint(args: argparse.Namespace) -> None:
    """Check that --load has a checkpoint, and one of this model.

    Megatron begins anew, silently, where --load has nothing; with --load and --save alike that is how a job starts.

    Raises:
        UsageError: there is none, or it is of another model.
    """
    folder = Path(args.load)
    tracker = folder / "latest_checkpointed_iteration.txt"
    if not tracker.is_file():
        if args.load == args.save:
            return
        what = "no checkpoint in it (no latest_checkpointed_iteration.txt)" if folder.is_dir() else "no such directory"
        raise UsageError(f"--load {folder}: there is {what}; give a directory that --save wrote, or leave --load out")
    if args.use_checkpoint_args:
        return
    saved = saved_flags(folder, tracker.read_text().strip())
    for name in _MODEL_SIZES:
        given, there = getattr(args, name), saved.get(name)
        if given is not None and there is not None and given != there:
            flag = "--" + name.replace("_", "-")
            raise UsageError(
                f"--load {folder} is a checkpoint of another model: it was saved with {flag} {there}, and this "
                f"job has {flag} "
                f"{given}; load another checkpoint or give the sizes it was saved with"
            )


def flags_added_here(argv: Sequence[str]) -> list[str]:
    """Flags that the CPU device layer will add on this machine; none where it has a GPU.

    Raises:
        UsageError: a flag needs a GPU, and there is none.
    """
    if glob.glob("/dev/nvidia[0-9]*"):
        return []
    from ..device import cpu

    return cpu.default_flags(list(argv))


def lease_for_shared_cores(argv: Sequence[str], ranks: int) -> list[str]:
    """A longer lease where virtual nodes have no more cores than ranks and the user has not chosen one.

    Seen on two cores with four ranks, while each of them started the process that writes its checkpoint: single threads waited up to
    3.3 s for their turn.
    """
    chosen = any(word == "--hot-swap-lease-s" or word.startswith("--hot-swap-lease-s=") for word in argv)
    return [] if chosen or ranks < len(os.sched_getaffinity(0)) else ["--hot-swap-lease-s", str(_LEASE_ON_SHARED_CORES_S)]


def check_data(prefix: str) -> None:
    """Check that PREFIX.bin and PREFIX.idx are there and fit each other (megatron-core's indexed dataset).

    Raises:
        UsageError: missing or truncated.
    """
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index, data):
        if not path.is_file():
            raise UsageError(
                f"the dataset {prefix} needs {path}, and there is no such file; make it with "
                "tools/preprocess_data.py, and give its "
                "path without .bin or .idx"
            )
    again = "preprocess the text again"
    with open(index, "rb") as file:
        head = file.read(_INDEX_HEAD_BYTES)
        if len(head) < _INDEX_HEAD_BYTES or head[:9] != _INDEX_MAGIC:
            raise UsageError(
                f"{index} is not a Megatron index file, or is cut short ({len(head)} bytes of head); {again}"
            )
        _, code, sequences, documents = struct.unpack("<QBQQ", head[9:])
        if code not in _DTYPE_BYTES:
            raise UsageError(f"{index} names the unknown token type {code}; {again}")
        wanted = _INDEX_HEAD_BYTES + 4 * sequences + 8 * sequences + 8 * documents
        there = index.stat().st_size
        if there < wanted:
            raise UsageError(f"{index} is cut short: it has {there} bytes and announces {wanted}; {again}")
        lengths = file.read(4 * sequences)
    tokens = sum(memoryview(lengths).cast("i")) if lengths else 0
    token_bytes, there = _DTYPE_BYTES[code], data.stat().st_size
    if there != tokens * token_bytes:
        raise UsageError(
            f"{data} does not fit its index: it has {there} bytes, the index says {tokens * token_bytes} "
            f"({tokens} tokens of "
            f"{token_bytes} bytes); one of them is cut short or of another run: {again}"
        )


def describe_grid(grid: Grid, expert: int) -> str:
    """`TP 2 x DP 2`: the parallel sizes above one."""
    sizes: dict[str, Any] = {"TP": grid.tensor, "CP": grid.context, "PP": grid.pipeline, "DP": grid.data, "EP": expert}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
