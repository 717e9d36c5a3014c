"""Bad input is answered in words before any process starts: sizes, data files, the checkpoint, the script."""

from __future__ import annotations

import argparse
import struct
from collections.abc import Sequence
from pathlib import Path

from ..errors import UsageError
from ..topology.grid import Grid

_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_DTYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}


def _flags(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size", "expert-model-parallel-size"):
        parser.add_argument(f"--{name}", type=int, default=1)
    for name in ("num-layers", "num-attention-heads", "hidden-size", "global-batch-size", "micro-batch-size", "num-experts"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("data-path", "train-data-path", "valid-data-path", "test-data-path"):
        parser.add_argument(f"--{name}", nargs="*", default=[])
    parser.add_argument("--load")
    args, _ = parser.parse_known_args(list(argv))
    return args


def grid_of(argv: Sequence[str], world_size: int) -> Grid:
    """The grid that Megatron's flags describe."""
    args = _flags(argv)
    return Grid(world_size, args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size)


def check_command(script: str, argv: Sequence[str], world_size: int) -> None:
    """Check a Megatron command line for what can be known before it starts.

    Raises:
        UsageError: states the rule, the values and what to do.
    """
    if not Path(script).is_file():
        raise UsageError(f"the training script {script!r} is not a file; give the path of a script such as pretrain_gpt.py")
    args = _flags(argv)
    grid = grid_of(argv, world_size)
    _check_sizes(args, grid)
    for value in [*args.data_path, *args.train_data_path, *args.valid_data_path, *args.test_data_path]:
        if not _is_number(value):
            check_data(value)
    if args.load and not Path(args.load).is_dir():
        raise UsageError(f"--load {args.load}: there is no such directory; give a checkpoint directory that --save wrote, or leave --load out")


def _check_sizes(args: argparse.Namespace, grid: Grid) -> None:
    def divides(what: str, value: int | None, by_what: str, by: int) -> None:
        if value is not None and value % by:
            raise UsageError(f"{what} must be a multiple of {by_what}: {value} is not a multiple of {by}; change one of them")

    divides("--num-layers", args.num_layers, "--pipeline-model-parallel-size", grid.pipeline)
    divides("--num-attention-heads", args.num_attention_heads, "--tensor-model-parallel-size", grid.tensor)
    if args.num_attention_heads is not None:
        divides("--hidden-size", args.hidden_size, "--num-attention-heads", args.num_attention_heads)
    divides("--num-experts", args.num_experts, "--expert-model-parallel-size", args.expert_model_parallel_size)
    if args.micro_batch_size is not None:
        divides("--global-batch-size", args.global_batch_size, "--micro-batch-size x data-parallel size", args.micro_batch_size * grid.data)


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def check_data(prefix: str) -> None:
    """Check that PREFIX.bin and PREFIX.idx are there and fit each other (megatron.core.datasets.indexed_dataset's format).

    Raises:
        UsageError: missing or truncated.
    """
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index, data):
        if not path.is_file():
            raise UsageError(
                f"the dataset {prefix} needs {path}, and there is no such file; make it with tools/preprocess_data.py, and give its "
                "path without .bin or .idx"
            )
    with open(index, "rb") as file:
        head = file.read(34)
        if len(head) < 34 or head[:9] != _INDEX_MAGIC:
            raise UsageError(f"{index} is not a Megatron index file, or is cut short ({len(head)} bytes of head); preprocess the text again")
        _, code, sequences, documents = struct.unpack("<QBQQ", head[9:34])
        if code not in _DTYPE_BYTES:
            raise UsageError(f"{index} names the unknown token type {code}; preprocess the text again")
        wanted = 34 + 4 * sequences + 8 * sequences + 8 * documents
        if index.stat().st_size < wanted:
            raise UsageError(f"{index} is cut short: it has {index.stat().st_size} bytes and announces {wanted}; preprocess the text again")
        lengths = file.read(4 * sequences)
    tokens = sum(struct.unpack(f"<{sequences}i", lengths))
    if data.stat().st_size != tokens * _DTYPE_BYTES[code]:
        raise UsageError(
            f"{data} does not fit its index: it has {data.stat().st_size} bytes, the index says {tokens * _DTYPE_BYTES[code]} "
            f"({tokens} tokens of {_DTYPE_BYTES[code]} bytes); one of them is cut short or of another run: preprocess the text again"
        )
