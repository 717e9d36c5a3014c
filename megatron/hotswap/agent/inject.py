"""Causing a fault on purpose: kill or freeze a node (one process group), an agent or a worker, at once or at a moment. What a worker
causes itself (worker/faults.py) is only written down here."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from ..control.messages import WORKER_FAULTS, Injection

INJECTIONS_FILE = "injections.jsonl"


def strike(injection: Injection, run_dir: Path, agent_pid: int, worker_pid: int) -> None:
    """Do it now. The time is written first, since nobody is left to write it afterwards: detection is measured from it."""
    line = {
        "t": time.time(),
        "node": injection.node,
        "action": injection.action,
        "scope": injection.scope,
        "step": injection.at_step,
        "phase": injection.phase,
    }
    fd = os.open(run_dir / INJECTIONS_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(fd, (json.dumps(line) + "\n").encode())
    os.close(fd)
    if injection.action in WORKER_FAULTS:
        return
    number = signal.SIGKILL if injection.action == "kill" else signal.SIGSTOP
    if injection.scope == "node":
        os.killpg(os.getpgid(agent_pid), number)
    else:
        os.kill(agent_pid if injection.scope == "agent" else worker_pid, number)


def last_strike(run_dir: Path, nodes: list[str], before: float) -> float | None:
    """When one of these nodes was last struck (seconds since the epoch), if it was."""
    try:
        lines = (run_dir / INJECTIONS_FILE).read_text().splitlines()
    except FileNotFoundError:
        return None
    times = [x["t"] for x in map(json.loads, lines) if x["node"] in nodes and x["t"] <= before]
    return max(times, default=None)
