"""Processes that are found again by a file: pid and start time, so that a pid that the kernel has given to another is never signalled."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_POLL_S = 0.02
_KILLED_WITHIN_S = 2.0


def start_time(pid: int) -> str | None:
    """When the kernel started a process, in its ticks; None: it is gone, or dead and not waited for yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if fields[0] == "Z" else fields[19]


class Recorded:
    """The processes of one folder, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, name: str, pid: int) -> None:
        """Remember it."""
        (self.folder / name).write_text(f"{pid} {start_time(pid)}")

    def pid(self, name: str) -> int | None:
        """The process of that name, if that very one still lives."""
        try:
            pid, began = (self.folder / name).read_text().split()
        except (OSError, ValueError):
            return None
        return int(pid) if start_time(int(pid)) == began else None

    def forget(self, name: str) -> None:
        """Nobody needs to find it again."""
        (self.folder / name).unlink(missing_ok=True)

    def end(self, name: str, number: signal.Signals = signal.SIGKILL, patience_s: float = 3.0) -> None:
        """End it and wait until it is gone; by SIGKILL if the signal does not do it in time."""
        pid = self.pid(name)
        if pid is not None:
            for attempt, wait_s in ((number, patience_s), (signal.SIGKILL, _KILLED_WITHIN_S)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, attempt)
                if self._gone_within(name, wait_s):
                    break
        self.forget(name)

    def _gone_within(self, name: str, wait_s: float) -> bool:
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if self.pid(name) is None:
                return True
            time.sleep(_POLL_S)
        return False
