"""Causing a fault on purpose: kill or freeze a node (one process group), an agent or a worker, at once or at a moment. What a worker
causes itself (worker/faults.py) is only written down here; cables are the launcher's."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import msgspec

from ..control.messages import WORKER_FAULTS, Injection

INJECTIONS_FILE = "injections.jsonl"
_FILE_BYTES_MAX = 16 << 20


class _Struck(msgspec.Struct):
    """Of a line there, what is read again."""

    t: float
    node: str


def write_down(injection: Injection, run_dir: Path) -> None:
    """That it strikes now: detection is measured from then."""
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


def strike(injection: Injection, run_dir: Path, agent_pid: int, worker_pid: int) -> None:
    """Do it now; written down first, since nobody may be left to do so afterwards."""
    write_down(injection, run_dir)
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
        with open(run_dir / INJECTIONS_FILE, "rb") as file:
            lines = file.read(_FILE_BYTES_MAX).splitlines()
    except FileNotFoundError:
        return None
    struck = [strike for line in lines if (strike := _read(line)) is not None]
    return max((x.t for x in struck if x.node in nodes and x.t <= before), default=None)


def _read(line: bytes) -> _Struck | None:
    """None: who wrote it was struck itself before the line was whole."""
    try:
        return msgspec.json.decode(line, type=_Struck)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
