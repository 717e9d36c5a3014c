"""How far a tool has come: a bar on a terminal, a few plain lines anywhere else (a log file, a batch job)."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from types import TracebackType

# In a log, a line every so often tells that the job lives; more would bury what matters.
LOG_INTERVAL_S = 30.0


class Progress(AbstractContextManager["Progress"]):
    """Progress in bytes, on stderr.

    Args:
        what: one word for what is being done.
        total_bytes: where `update` ends.
    """

    def __init__(self, what: str, total_bytes: int) -> None:
        self._what = what
        self._total_bytes = max(1, total_bytes)
        self._last_line_s = time.monotonic()
        self._bar = _terminal_bar(what, total_bytes) if sys.stderr.isatty() else None

    def update(self, done_bytes: int) -> None:
        """Shows that `done_bytes` of the total are done."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done_bytes, refresh=True)
            return
        now = time.monotonic()
        if now - self._last_line_s >= LOG_INTERVAL_S:
            self._last_line_s = now
            self.say(f"{self._what}: {100 * done_bytes // self._total_bytes} % of {self._total_bytes / 1e6:.1f} MB")

    def say(self, line: str) -> None:
        """A line of text that does not break the bar."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _terminal_bar(what: str, total_bytes: int):  # type: ignore[no-untyped-def]  # rich is imported where it is needed
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    # No thread of its own: the workers are forked while it is on the screen.
    bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False)
    bar.add_task(what, total=total_bytes)
    return bar
