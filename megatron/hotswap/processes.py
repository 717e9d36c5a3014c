"""What the project's child processes (workers, side processes) and those who watch them have in common."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import math
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

#: One that neither Slurm, nor Megatron, nor a user's shell sends.
STACKS_SIGNAL = signal.SIGRTMIN + 7
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_END_CHECK_S = 0.005
#: What Python's resource tracker may take to clean up, once it is alone.
_TRACKER_S = 1.0


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies, however that dies.

    Args:
        parent: its process id, where this process is to end at once if that has died already. (Process 1 as a parent says nothing:
            in a container the parent itself may be process 1.)
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(3)


def write_stacks_when_asked() -> None:
    """From now on STACKS_SIGNAL has this process write where each of its threads is, even if one of them keeps Python's lock."""
    faulthandler.register(STACKS_SIGNAL, all_threads=True)


def leave(code: int) -> NoReturn:
    """End this process at once; what was printed is kept. Not in Python's own way: a thread of ours that comes back from the engine, or
    from torch, while Python takes itself down finds no lock to take, and pybind11 ends the process with an abort, whatever its exit
    code was to be. Nor are there destructors that would wait for peers."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def adopt_orphans() -> None:
    """From now on, what the descendants of this process leave behind when they die becomes this process's children."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_children(variable: str, own: Collection[int] = (), within_s: float = math.inf) -> bool:
    """End the children of this process that have this environment variable ("NAME=value"), and theirs, which become its children in turn.
    A process that has died leaves them: a data loader's workers, a checkpoint's writer. They hold what it held: sockets, shared memory,
    a device. Python's own resource tracker is killed last: it ends by itself once the others have, and takes their named semaphores away.

    Args:
        variable: what they were told, and tell their own children.
        own: process ids of those that are to stay.
        within_s: one that hangs in the kernel is not waited for any longer.

    Returns:
        Whether none is left.
    """
    deadline = time.monotonic() + within_s
    tracked_until = time.monotonic() + _TRACKER_S
    dying: set[int] = set()  # one that dies has lost its variables before it leaves its children to this process
    while True:
        left = {pid for pid in _children() if pid not in own and _has(pid, variable)}
        trackers = {pid for pid in left if _tracks_resources(pid)}
        if left - trackers:
            tracked_until = time.monotonic() + _TRACKER_S
        for pid in left if time.monotonic() > tracked_until else left - trackers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        gone = {pid for pid in dying | left if _reaped(pid)}
        for pid in gone:
            remove_shared_memory(pid)
        dying = (dying | left) - gone
        if not left and not dying:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_END_CHECK_S)


def remove_shared_memory(pid: int) -> None:
    """Of a process that is gone: torch names shared memory after its maker, and takes the name away at once. One that was killed in
    between has not."""
    for path in Path("/dev/shm").glob(f"torch_{pid}_*"):
        with contextlib.suppress(OSError):  # another user's
            path.unlink()


def _reaped(pid: int) -> bool:
    """Whether the child is gone, and what it left is this process's."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _children() -> list[int]:
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, (task / "children").read_text().split())
    return found


def _has(pid: int, variable: str) -> bool:
    try:
        return variable.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _tracks_resources(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def end_in_words(status: int) -> str:
    """How a process ended, from what Popen.poll() says of it."""
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
