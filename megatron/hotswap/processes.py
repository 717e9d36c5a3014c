"""What the project's child processes (workers, side processes) and those who watch them have in common."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies, however that dies.

    Args:
        parent: its process id, where this process is to end at once if that has died already. (Process 1 as a parent says nothing:
            in a container the parent itself may be process 1.)
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(3)


def end_in_words(status: int) -> str:
    """How a process ended, from what Popen.poll() says of it."""
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
