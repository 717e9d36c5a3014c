"""A job's coordinator as a process of its own: `python -m megatron.hotswap.coordinator --run-dir DIR`.

It takes up whatever job setup.json describes: from its beginning, or, where the store has decisions, from there. Killed and started again,
it goes on; training does not stop meanwhile. SIGTERM and SIGINT end this process and not the job.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..errors import Deposed, HotSwapError, UsageError
from ..security import files as credentials
from .job_file import JOB_FILE, Setup, announce, read_setup
from .service import Coordinator
from .stores import open_store

#: Exit code of a coordinator that has left its job to another one.
LEFT = 4
_SHOW_INTERVAL_S = 0.1


async def serve(run_dir: Path, host: str, port: int, show: Callable[[Coordinator], None] = lambda c: None) -> int | None:
    """Coordinate the job of this run directory until it is over, or another coordinator has it; returns the exit code. None: it has lost
    the job to another one, or etcd, and stands by: call again.

    Args:
        run_dir: has setup.json and the credentials.
        host: the address to listen on, by which agents reach it.
        port: 0 is any free one.
        show: called ten times a second, and once more at the end.

    Raises:
        UsageError: what is there cannot be coordinated; in words.
    """
    setup = _setup(run_dir)
    shown = credentials.read(run_dir, "coordinator", setup.control.run_id)
    store = open_store(setup.store, run_dir, setup.control.run_id)
    loop = asyncio.get_running_loop()
    try:
        decided = await loop.run_in_executor(None, store.lead)
        coordinator = Coordinator(replace(setup.control, token=shown.token), run_dir, store, decided)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, coordinator.leave, f"it got {number.name}")
        address = await coordinator.start(host, port)
        try:
            await loop.run_in_executor(None, store.announce, address)
            announce(run_dir, address, setup.control.run_id)
        except (Deposed, OSError) as away:
            coordinator.stand_by(str(away))
        if setup.metrics_port and not coordinator.deposed:
            await coordinator.serve_metrics(setup.metrics_address, setup.metrics_port, host)
        while not coordinator.ended.is_set():
            show(coordinator)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(coordinator.ended.wait(), _SHOW_INTERVAL_S)
        await coordinator.stop()
        show(coordinator)
    finally:
        store.close()
    if coordinator.deposed:
        print(f"deadpool: this coordinator leaves the job to another one: {coordinator.deposed}", file=sys.stderr, flush=True)
        return None if coordinator.may_lead_again else LEFT
    (run_dir / JOB_FILE).unlink(missing_ok=True)
    return 1 if coordinator.control.exit_code is None else coordinator.control.exit_code


def _setup(run_dir: Path) -> Setup:
    try:
        return read_setup(run_dir)
    except OSError as missing:
        raise UsageError(
            f"{run_dir} has no job to coordinate ({missing}); whatever starts a job (deadpool run, or its first task under Slurm) writes "
            "setup.json there: give that job's --run-dir"
        ) from missing


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m megatron.hotswap.coordinator", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="the job's run directory")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="where agents reach it (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, metavar="PORT", help="0 is any free one (default: %(default)s)")
    args = parser.parse_args()
    try:
        while (code := asyncio.run(serve(args.run_dir, args.host, args.port))) is None:
            pass
        return code
    except HotSwapError as failure:
        print(f"deadpool: {failure}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
