"""`python -m megatron.hotswap SCRIPT …`: hot-swap for anybody's Megatron script, with the same flags.

Without --hot-swap the script runs as if called directly. With it this process becomes the node's agent and starts the workers,
which run the script.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from . import config, environment
from .errors import HotSwapError
from .processes import leave


def run_as_agent(script: str, argv: Sequence[str]) -> NoReturn:
    """Be the agent of this node for `script argv…`; the process ends with the job."""
    leave(_agent(script, argv))


def _agent(script: str, argv: Sequence[str]) -> int:
    task = None if environment.launched() else environment.slurm_task()
    try:
        if task is not None:
            from .slurm.task import run_task

            return run_task(script, argv, task)
        from .agent.main import run_agent

        return run_agent(config.parse(argv), [script, *argv], {})
    except HotSwapError as failure:
        print(f"deadpool: {failure}", file=sys.stderr)
        return 2


def launch_or_train(script: str, train: Callable[[], None]) -> int:
    """What a script's `__main__` block calls: the agent with --hot-swap, else (and in a worker) the training itself."""
    if "--hot-swap" in sys.argv[1:] and not environment.in_training():
        run_as_agent(script, sys.argv[1:])
    if not environment.in_training():
        prepare_device()
    train()
    return 0


def prepare_device() -> None:
    """Plain training where there is no GPU: the device layer, and the flags it needs, shown. On a GPU what the wheel lacks."""
    from .device import cpu, wheel

    if not cpu.needed():
        wheel.use_built_dataset_helpers()
        return
    cpu.install()
    added = cpu.default_flags(sys.argv[1:])
    if added:
        print("no GPU here, so these flags are added: " + " ".join(added), flush=True)
        sys.argv += added


def main() -> int:
    """The command."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print("usage: python -m megatron.hotswap SCRIPT [its arguments] [--hot-swap …]", file=sys.stderr)
        return 2
    script, argv = sys.argv[1], sys.argv[2:]
    if "--hot-swap" in argv:
        run_as_agent(script, argv)
    sys.argv = [script, *argv]
    prepare_device()
    runpy.run_path(script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
