"""Follows the workers' log files, those that appear later included."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

#: Read of one file in one turn at most, so that a worker that writes without end cannot hold the display.
_TURN_BYTES_MAX = 1 << 20
_LINE_BYTES_MAX = 1 << 20


class LogTail:
    """New whole lines of logs/NODE-INCARNATION-WORKER.log. The agents' own logs are not Megatron's, and left out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._rest: dict[Path, bytes] = {}

    def read(self, final: bool = False) -> Iterator[tuple[str, str]]:
        """(file name, line) of what was written since the last call. `final`: an unfinished last line counts too."""
        for path in sorted(self._folder.glob("*.log")):
            if path.name.startswith("agent-"):
                continue
            with open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read() if final else file.read(_TURN_BYTES_MAX)
            self._read[path] = self._read.get(path, 0) + len(data)
            rest = self._rest.get(path, b"")
            if len(rest) > _LINE_BYTES_MAX:  # a worker that writes no end of line cannot fill our memory
                data, rest = rest + b"\n" + data, b""
            *lines, rest = (rest + data).split(b"\n")
            if final and rest:
                lines, rest = [*lines, rest], b""
            self._rest[path] = rest
            for line in lines:
                yield path.name, line.decode(errors="replace").rstrip("\r")
