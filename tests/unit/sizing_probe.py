"""Builds real Megatron models, one rank of a grid at a time, and prints what a snapshot of each would hold.

stdin: a JSON list of {"world_size": N, "ranks": [r, …], "flags": "…"}. stdout: a JSON list of as many lists, one entry a rank.

A rank is built as a spare builds it: with process groups of torch's "fake" backend, which never communicate (topology/groups.py),
so a grid of eight ranks costs one process at a time. Each is a fork of this one, which has the imports behind it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron.hotswap.device import cpu

os.environ.update(cpu.environment())
cpu.install()

import torch  # noqa: E402 - the environment first
from megatron.training import training  # noqa: E402

import pretrain_gpt  # noqa: E402
from megatron.hotswap.patches.adapter import MegatronTrainer  # noqa: E402
from megatron.hotswap.patches.async_save import AsyncSaves  # noqa: E402
from megatron.hotswap.patches.parallel_state import create_through  # noqa: E402
from megatron.hotswap.recovery.execute import encode_metadata  # noqa: E402
from megatron.hotswap.snapshot.engine import layout_of  # noqa: E402
from megatron.hotswap.topology.groups import Groups  # noqa: E402


class Built(Exception):
    """Ends pretrain() once the model is built; carries what was found."""


def measure(trainer: MegatronTrainer, built: tuple[Any, ...]) -> dict[str, Any]:
    """Sizes of the rank that was built."""
    trainer.attach(*built)
    from megatron.training import get_args
    from megatron.training.training import num_floating_point_operations

    model = built[0]
    metadata = encode_metadata(trainer.metadata(0))
    layout = layout_of(trainer.tensors(), len(metadata))
    args = get_args()
    expert = [p for chunk in model for p in chunk.parameters() if not getattr(p, "allreduce", True)]
    return {
        "parameters": [[[name, p.numel()] for name, p in chunk.named_parameters()] for chunk in model],
        "expert_parameters": sum(p.numel() for p in expert),
        "flops": num_floating_point_operations(args, args.global_batch_size),
        "payload_bytes": layout.payload_bytes,
        "copied_bytes": sum(t.length_bytes for t in layout.tensors),
        "tensors": len(layout.tensors),
        "metadata_bytes": len(metadata),
        "slot_bytes": layout.slot_bytes,
    }


def build(rank: int, world_size: int, flags: list[str]) -> dict[str, Any]:
    """Run pretrain() as this rank up to the built optimizer."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    timeout = timedelta(seconds=60)
    groups = Groups(timeout, timeout)
    groups.fake = True
    create_through(groups)
    trainer = MegatronTrainer(groups, timeout, AsyncSaves(lambda note: None))
    original = training.setup_model_and_optimizer

    def setup(*args: Any, **kwargs: Any) -> Any:
        raise Built(measure(trainer, original(*args, **kwargs)))

    original_pretrain = training.pretrain

    def pretrain(*args: Any, **kwargs: Any) -> None:
        original_pretrain(*args, **kwargs)

    training.setup_model_and_optimizer = setup
    import megatron.training

    megatron.training.pretrain = pretrain
    sys.argv = ["pretrain_gpt.py", *flags]
    sys.argv += cpu.default_flags(sys.argv[1:])
    try:
        pretrain_gpt.main()
    except Built as done:
        found: dict[str, Any] = done.args[0]
        return found
    raise AssertionError("pretrain() ended before the model was built")


def in_a_fork(rank: int, world_size: int, flags: list[str], folder: Path) -> dict[str, Any]:
    """Megatron keeps its state in globals, so every rank has a process."""
    answer = folder / "answer.json"
    child = os.fork()
    if child == 0:
        os.dup2(2, 1)  # Megatron prints; the answer goes its own way
        try:
            found = build(rank, world_size, flags)
        except BaseException:
            found = {"error": traceback.format_exc()[-2000:]}
        answer.write_text(json.dumps(found))
        os._exit(0)
    os.waitpid(child, 0)
    found = json.loads(answer.read_text())
    answer.unlink()
    return found


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    cases = json.load(sys.stdin)
    answers = [
        [in_a_fork(rank, case["world_size"], case["flags"].split(), folder) for rank in case["ranks"]] for case in cases
    ]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
