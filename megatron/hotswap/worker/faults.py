"""Faults that a training thread causes in its own process, on purpose: what breaks one process of a node that is well."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

from ..errors import InjectedFault

#: Longer than any deadline of a job: who hangs is ended from outside.
_FOR_EVER_S = 86_400
#: What is left to take when memory runs out, and the pieces in which it is taken.
_LEFT_BYTES, _PIECE_BYTES = 64 << 20, 16 << 20


def cause(action: str) -> None:
    """Do it, on the calling thread. Some raise, some end the process, some never return."""
    _CAUSES[action]()


def _raise() -> None:
    raise InjectedFault("an error of the program's own (a fault on purpose)")


def _crash() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # nobody wants gigabytes of core file from a crash on purpose
    ctypes.string_at(0)


def _run_out_of_memory() -> None:
    """Until an allocation is refused, for good: the limit stays."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + _LEFT_BYTES, most))
    hoard = []
    try:
        while True:
            hoard.append(bytearray(_PIECE_BYTES))
    except MemoryError:
        hoard.clear()  # what there is must be enough to say so
        raise


def _hang() -> None:
    time.sleep(_FOR_EVER_S)


def _spin() -> None:
    """In C, with Python's lock held: no other thread of the process runs Python any more. It sleeps, since who waits for the lock
    cannot tell the difference, and other processes want the processor."""
    ctypes.PyDLL(None).sleep(_FOR_EVER_S)


_CAUSES: dict[str, Callable[[], None]] = {
    "exit": _raise,
    "segv": _crash,
    "oom": _run_out_of_memory,
    "hang": _hang,
    "spin": _spin,
}
