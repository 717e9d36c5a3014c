"""Standard output whose reader may stop, or go away, without anything else stopping.

Who shows a job also coordinates it. A terminal on which Ctrl-S was pressed, a pager that waits, a connection that hangs: each takes some
kilobytes more and then lets the writer wait, for hours perhaps. So a thread of its own writes, and waits.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import threading
import time
from typing import TextIO

from rich.console import Console

#: Of text that nobody has taken yet. Megatron's lines of an hour; more is in the logs.
WAITING_CHARS_MAX = 8 << 20
_LOOK_S = 0.02


class Patient(io.TextIOBase):
    """Writes to `stream` in another thread, in order. What does not fit any more is left out, which is said in its place."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._texts: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0  # characters
        self._left_out = 0  # lines
        self._gone = False
        threading.Thread(target=self._write, name="deadpool-output", daemon=True).start()

    def write(self, text: str) -> int:
        """Take it. Never waits."""
        with self._lock:
            if self._waiting + len(text) > WAITING_CHARS_MAX:
                self._left_out += text.count("\n")
                return len(text)
            if self._left_out:
                text = f"deadpool: {self._left_out} lines were left out here, since nobody read them; logs/ has them\n{text}"
                self._left_out = 0
            self._waiting += len(text)
        self._texts.put(text)
        return len(text)

    def flush(self) -> None:
        """The thread does, after each text."""

    def drain(self) -> None:
        """Return once all is written. Waits for the reader; Ctrl-C ends that."""
        while self._waiting:
            time.sleep(_LOOK_S)

    def isatty(self) -> bool:
        """Of the stream."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Of the stream."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the stream."""
        return self._stream.encoding

    def _write(self) -> None:
        while True:
            text = self._texts.get()
            if not self._gone:
                try:
                    self._stream.write(text)
                    self._stream.flush()
                except (OSError, ValueError):
                    self._give_up()
            with self._lock:
                self._waiting -= len(text)

    def _give_up(self) -> None:
        """Nobody reads any more (`deadpool run … | head`): the job goes on, in silence."""
        self._gone = True
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())  # or Python complains of what it could not flush at its end


class JobConsole(Console):
    """A console of a Patient."""

    def __init__(self, stream: TextIO) -> None:
        self.patient = Patient(stream)
        super().__init__(file=self.patient)
