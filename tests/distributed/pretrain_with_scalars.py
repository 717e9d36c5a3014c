"""pretrain_gpt.py where --tensorboard-dir makes a writer that needs no package: a line a scalar, in scalars.jsonl there."""

from __future__ import annotations

import argparse
import json
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.training import global_vars


class Lines:
    """What Megatron asks of a SummaryWriter; only scalars are kept. A process that is killed leaves every line that it wrote."""

    def __init__(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        self._file = open(os.path.join(folder, "scalars.jsonl"), "a", buffering=1)  # noqa: SIM115 - as long as the process

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        self._file.write(json.dumps([name, float(value), iteration]) + "\n")

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def make_writer(args: argparse.Namespace) -> None:
    if args.tensorboard_dir and args.rank == args.world_size - 1:
        global_vars._GLOBAL_TENSORBOARD_WRITER = Lines(args.tensorboard_dir)


if __name__ == "__main__":
    global_vars._set_tensorboard_writer = make_writer
    runpy.run_path(str(Path(__file__).parents[2] / "pretrain_gpt.py"), run_name="__main__")
