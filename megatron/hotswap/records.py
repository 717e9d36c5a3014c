"""The files of a run directory (job.json, summary.json, steps.jsonl …), read: as the type says, or one error that names file and line.
And replaced: whole or not at all.

Such a file may be cut off, of another version, or somebody else's: no content of it costs more memory than a record may have. Python's
own reader is used, since these files may have NaN, which JSON proper has not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from .errors import UsageError

#: A step's record has some hundred bytes, a recovery's in the summary some thousand, the start of 100,000 ranks two million.
_LINE_BYTES_MAX = 16 << 20
_OBJECT_BYTES_MAX = 64 << 20


def parse(raw: bytes, kind: Any) -> Any:
    """One JSON text, as a value of `kind`.

    Raises:
        ValueError: it is none, and why.
    """
    try:
        return msgspec.convert(json.loads(raw), kind)
    except RecursionError:
        raise ValueError("it is nested deeper than any record is") from None
    except msgspec.ValidationError as wrong:
        raise ValueError(str(wrong)) from None


def read_object(path: Path, kind: Any) -> Any:
    """The one object of a file.

    Raises:
        OSError: it cannot be read.
        UsageError: it is no such object.
    """
    with open(path, "rb") as file:
        raw = file.read(_OBJECT_BYTES_MAX + 1)
    try:
        if len(raw) > _OBJECT_BYTES_MAX:
            raise ValueError(f"it has more than {_OBJECT_BYTES_MAX} bytes")
        return parse(raw, kind)
    except ValueError as wrong:
        raise UsageError(f"{path} is not what a job writes ({wrong}); was the job cut off while it wrote?") from wrong


def replace_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Put it in the place of what is there. Who reads meanwhile has the old content, or the new. It is not flushed to the medium.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    temporary.replace(path)


def read_lines(path: Path, kind: Any, what: str) -> Iterator[Any]:
    """The records of a file, one a line; `what` says what they are, for the error.

    Raises:
        OSError: it cannot be read.
        UsageError: a line is no such record.
    """
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(_LINE_BYTES_MAX + 1):
            number += 1
            try:
                if len(line) > _LINE_BYTES_MAX:
                    raise ValueError(f"it has more than {_LINE_BYTES_MAX} bytes")
                record = parse(line, kind)
            except ValueError as wrong:
                raise UsageError(f"{path} line {number} is not {what} ({wrong}); was the job cut off while it wrote?") from wrong
            yield record
