"""Real training jobs for benchmarks: the same Megatron command with hot-swap, and plainly under torchrun; and what their logs say."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from megatron.hotswap.cli.launch import Launch, run
from megatron.hotswap.coordinator.service import Coordinator

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "pretrain_gpt.py"
JOB_TIMEOUT_S = 1800.0
POLL_INTERVAL_S = 0.1

_ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+ \|.*elapsed time per iteration \(ms\): ([0-9.]+)")


class JobFailed(Exception):
    """A job did not end well, so it measures nothing."""


def environment() -> dict[str, str]:
    """This process's, with the project importable and one thread a rank, as torchrun has it."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def run_hot_swap(
    run_dir: Path, nodes: int, ranks_per_node: int, argv: list[str], look: Callable[[int], None] = lambda step: None
) -> dict[str, Any]:
    """Run a job on virtual nodes; `look(last step)` is called about ten times a second. Returns its summary.

    Raises:
        JobFailed: it did not end with code 0.
    """

    def show(coordinator: Coordinator) -> None:
        last = coordinator.recorder.last_step
        look(0 if last is None else last.step)

    return run_launch(Launch(nodes, ranks_per_node, 0, str(SCRIPT), argv, run_dir), show)


def run_launch(launch: Launch, show: Callable[[Coordinator], None] = lambda coordinator: None) -> dict[str, Any]:
    """Run a job of `deadpool run`'s to its end; returns its summary.

    Raises:
        JobFailed: it did not end with code 0.
    """
    os.environ.update(environment())
    code = asyncio.run(run(launch, show))
    summary: dict[str, Any] = json.loads((launch.run_dir / "summary.json").read_text())
    if code:
        raise JobFailed(f"the job in {launch.run_dir.name} ended with code {code}: {summary['ended']}; see {launch.run_dir / 'logs'}")
    return summary


def run_plain(run_dir: Path, ranks: int, argv: list[str], look: Callable[[int], None] = lambda step: None) -> Path:
    """Run the same command without hot-swap, under torchrun; returns the log of all ranks.

    Raises:
        JobFailed: it did not end with code 0, or not in time.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    log = run_dir / "plain.log"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)]
    torchrun += ["--log-dir", str(run_dir / "torchrun")]  # else it leaves a folder among the temporary files
    deadline = time.monotonic() + JOB_TIMEOUT_S
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*torchrun, str(SCRIPT), *argv], env=environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise JobFailed(f"the plain job did not end within {JOB_TIMEOUT_S} s; its log is {log}")
            look(max(step_times(log), default=0))
            time.sleep(POLL_INTERVAL_S)
    finally:
        _end(process)
    if process.returncode:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise JobFailed(f"the plain job ended with code {process.returncode}:\n{end}")
    return log


def _end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun and its ranks, if they have not ended."""
    if process.poll() is None:
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        for child in children:
            child.kill()
    process.wait()


def step_times(*logs: Path) -> dict[int, float]:
    """Step -> seconds, as Megatron's own log says (with --log-interval 1), the same clock with hot-swap and without."""
    found = {}
    for log in logs:
        for line in log.read_text(errors="replace").splitlines() if log.is_file() else ():
            match = _ITERATION.search(line)
            if match:
                found[int(match[1])] = float(match[2]) / 1e3
    return found


def hot_swap_step_times(run_dir: Path) -> dict[int, float]:
    """The same from the workers' logs of a job with hot-swap."""
    return step_times(*(log for log in (run_dir / "logs").glob("*.log") if not log.name.startswith("agent-")))


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def recorded_steps(run_dir: Path) -> list[dict[str, Any]]:
    """steps.jsonl."""
    return lines_of(run_dir / "steps.jsonl")
