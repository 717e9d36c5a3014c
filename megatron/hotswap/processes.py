"""What the project's child processes (workers, side processes) and those who watch them have in common."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, however that dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_in_words(status: int) -> str:
    """How a process ended, from what Popen.poll() says of it."""
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
