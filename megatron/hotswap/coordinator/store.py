"""Where a coordinator records what it has decided (control/decided.py), before it tells anybody.

The journal is a file of the run directory: a coordinator that is started again there takes the job up. coordinator/etcd.py keeps the
same elsewhere, where the loss of a node does not reach it.
"""

from __future__ import annotations

import abc
import fcntl
import os
import struct
import zlib
from pathlib import Path

from ..control.decided import SCHEMA, Decided, decode, encode
from ..errors import Malformed, UsageError

JOURNAL_FILE = "journal"
#: Little-endian: bytes of the record that follows, their CRC32.
_HEAD = struct.Struct("<II")
_RECORD_BYTES_MAX = 64 << 20
#: A journal that has grown beyond this begins again with its newest record.
_JOURNAL_BYTES_MAX = 16 << 20


class Store(abc.ABC):
    """One coordinator at a time has it."""

    @abc.abstractmethod
    def lead(self) -> Decided | None:
        """Become the job's one coordinator; may block until there is no other. Returns what was decided so far; None: nothing.

        Raises:
            UsageError: what is there cannot be taken up, or the store cannot be used.
        """

    @property
    def lost(self) -> str:
        """Why this process does not lead any more, in words; empty while it does. Asked all the time."""
        return ""

    @abc.abstractmethod
    def announce(self, address: str) -> None:
        """Agents that look for the coordinator are to find it at host:port. (The run directory's job.json says so, too.)

        Raises:
            Deposed, OSError: as `save`.
        """

    @abc.abstractmethod
    def save(self, decided: Decided) -> None:
        """Record it; on return it outlives this process. May block.

        Raises:
            Deposed: another coordinator has taken over: nothing was recorded, and nothing more may be decided here.
            OSError: it could not be recorded now.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Let another one lead."""


class Journal(Store):
    """Records one behind the other: a head, and a `Decided` in msgpack. The last whole one counts; what a crash has cut off does not."""

    def __init__(self, run_dir: Path, run_id: str) -> None:
        self.path = run_dir / JOURNAL_FILE
        self._run_id = run_id
        self._file: int | None = None

    def lead(self) -> Decided | None:
        """As Store.lead; does not wait: who has the file open lives on this machine, and is to be ended first."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{self.path} is in use: a coordinator of this job runs already; end it first, or leave it alone") from None
        found, end = newest(self.path)
        os.ftruncate(self._file, end)
        os.lseek(self._file, end, os.SEEK_SET)
        if found is not None and found.run_id != self._run_id:
            raise UsageError(
                f"{self.path} is the journal of run {found.run_id}, and this is run {self._run_id}: every job has a run directory of its "
                "own; give another one"
            )
        return found

    def announce(self, address: str) -> None:
        """As Store.announce: job.json, beside this file, says it."""

    def save(self, decided: Decided) -> None:
        """As Store.save."""
        assert self._file is not None, "lead first"
        raw = encode(decided)
        record = _HEAD.pack(len(raw), zlib.crc32(raw)) + raw
        begin = os.lseek(self._file, 0, os.SEEK_CUR)
        if begin > _JOURNAL_BYTES_MAX:
            return self._begin_again(record)
        try:
            _write_whole(self._file, record)
            os.fsync(self._file)
        except OSError:
            os.lseek(self._file, begin, os.SEEK_SET)  # the next attempt overwrites what there is of this one
            raise

    def _begin_again(self, record: bytes) -> None:
        """A file with this record only, in place of the present one; the lock is on it before anybody can find it."""
        temporary = self.path.with_suffix(".new")
        file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_whole(file, record)
            os.fsync(file)
            temporary.replace(self.path)
        except OSError:
            os.close(file)
            raise
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(folder)
        os.close(folder)
        assert self._file is not None
        os.close(self._file)
        self._file = file

    def close(self) -> None:
        """As Store.close."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _write_whole(file: int, record: bytes) -> None:
    rest = memoryview(record)
    while rest:
        rest = rest[os.write(file, rest) :]


def newest(path: Path) -> tuple[Decided | None, int]:
    """The last whole record of a journal, and where it ends: what follows was cut off while it was written.

    Raises:
        UsageError: it is no journal that can be taken up.
        OSError: it cannot be read.
    """
    last: bytes | None = None
    end = 0
    with open(path, "rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            length, crc = _HEAD.unpack(head)
            raw = file.read(length) if length <= _RECORD_BYTES_MAX else b""
            if len(raw) != length or zlib.crc32(raw) != crc:
                break
            last, end = raw, file.tell()
    if last is None:
        return None, 0
    try:
        decided: Decided = decode(last)
    except Malformed as wrong:
        raise UsageError(f"{path} cannot be taken up: {wrong}; was it written by another version? Start the job anew") from wrong
    require_schema(decided, str(path))
    return decided, end


def require_schema(decided: Decided, where: str) -> None:
    """Refuse what another version has recorded.

    Raises:
        UsageError: names both.
    """
    if decided.schema != SCHEMA:
        raise UsageError(
            f"{where} was written in schema {decided.schema}, and this version reads {SCHEMA}: a job is taken up by the version that began "
            "it; install that one, or start the job anew"
        )

