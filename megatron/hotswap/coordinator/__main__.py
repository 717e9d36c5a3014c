"""A job's coordinator as a process of its own: `python -m megatron.hotswap.coordinator --run-dir DIR`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from ..errors import HotSwapError
from ..security import files as credentials
from .job_file import JOB_FILE, announce, read_setup
from .service import Coordinator

LEFT = 4


async def serve(run_dir: Path, host: str, port: int) -> int:
    """Coordinate the job until it is over."""
    setup = read_setup(run_dir)
    shown = credentials.read(run_dir, "coordinator", setup.control.run_id)
    coordinator = Coordinator(replace(setup.control, token=shown.token), run_dir)
    announce(run_dir, await coordinator.start(host, port), setup.control.run_id)
    await coordinator.ended.wait()
    await coordinator.stop()
    (run_dir / JOB_FILE).unlink(missing_ok=True)
    return coordinator.control.exit_code or 0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    try:
        return asyncio.run(serve(args.run_dir, args.host, args.port))
    except HotSwapError as failure:
        print(f"deadpool: {failure}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
