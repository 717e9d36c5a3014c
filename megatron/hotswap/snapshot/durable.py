"""Durable generations in files: written whole or not at all, read back checked. See manifest.py for what lies where.

Everything here may take long, and a file system that does not answer may hold a thread for ever: it runs in threads of its own, and
says after every piece that it goes on (`alive`), where the caller may also stop it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import deadpool_ext

from ..errors import HotSwapError, SnapshotMismatch
from . import manifest as mf
from .layout import HEADER_BYTES, Header, metadata_room_bytes
from .slots import Slots

_PIECE_BYTES = 8 << 20
#: What is written goes to the medium in parts of this size: one call that flushes hundreds of gigabytes would look like a hang.
_FLUSH_BYTES = 256 << 20

Alive = Callable[[], None]


class WriteStopped(HotSwapError):
    """What was being written is not wanted any more."""


class SnapshotGone(HotSwapError):
    """The slot was given to another generation before this one was taken from it."""


class Unseen(HotSwapError):
    """There is no such generation where this node looks."""


@dataclass(frozen=True)
class Content:
    """A complete snapshot in memory: its header, and metadata and payload by (slots, offset in the slots' memory, bytes).

    `unchanged` says whether the memory still holds it. Whoever overwrites a slot wipes out its header first, so memory whose header
    is the same after it was read was the same all the time.
    """

    header: Header
    parts: tuple[tuple[Slots, int, int], ...]
    unchanged: Callable[[], bool]
    own: Slots | None = None  # memory that was taken for this alone

    def __enter__(self) -> Content:
        return self

    def __exit__(self, *failure: object) -> None:
        if self.own is not None:
            self.own.close()

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return HEADER_BYTES + sum(length for _, _, length in self.parts)


def in_slot(
    slots: Slots, slot: int, header: Header, payload_in: tuple[Slots, int] | None = None, own: Slots | None = None
) -> Content:
    """The snapshot in a slot, under this header; its payload in another slot, where that has the same bits (replication/envelope.py).

    Raises:
        SnapshotMismatch: the other slot has no header.
    """
    kept, there = payload_in or (slots, slot)
    known = header if payload_in is None else kept.header(there)

    def unchanged() -> bool:
        try:
            return kept.header(there) == known
        except SnapshotMismatch:
            return False

    metadata = (slots, slot * slots.slot_bytes + HEADER_BYTES, header.metadata_bytes)
    payload = (kept, (there + 1) * kept.slot_bytes - header.payload_bytes, header.payload_bytes)
    return Content(header, (metadata, payload), unchanged, own)


def copy_of(content: Content, alive: Alive) -> Content:
    """The same snapshot in memory of its own, out of the way of training.

    Raises:
        SnapshotGone: it was overwritten meanwhile.
        UsageError: the system refuses the memory.
    """
    slots = Slots.create(content.file_bytes, 1)
    at = HEADER_BYTES
    for source, offset, length in content.parts:
        for begin in range(0, length, _PIECE_BYTES):
            size = min(_PIECE_BYTES, length - begin)
            slots.span(at + begin, size)[:] = source.span(offset + begin, size)
            alive()
        at += length
    slots.write_header(0, content.header)
    if not content.unchanged():
        slots.close()
        raise SnapshotGone(f"generation {content.header.generation} was overwritten while it was copied")
    return in_slot(slots, 0, content.header, own=slots)


def write_snapshot(path: Path, content: Content, alive: Alive) -> None:
    """Write a snapshot's file, to the medium.

    Raises:
        OSError: the file system refuses.
        SnapshotGone: the memory was overwritten meanwhile.
        SnapshotMismatch: what is in memory does not match its checksum.
        WriteStopped: by `alive`.
    """
    crc, unflushed = 0, 0
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        _write_all(fd, memoryview(content.header.pack()))
        for slots, offset, length in content.parts:
            base = slots.address(0) + offset
            for begin in range(0, length, _PIECE_BYTES):
                size = min(_PIECE_BYTES, length - begin)
                crc = deadpool_ext.crc32c(base + begin, size, crc)
                _write_all(fd, slots.span(offset + begin, size))
                unflushed += size
                if unflushed >= _FLUSH_BYTES:
                    os.fdatasync(fd)
                    unflushed = 0
                alive()
        os.fsync(fd)
    finally:
        os.close(fd)
    if not content.unchanged():
        raise SnapshotGone(f"generation {content.header.generation} was overwritten while it was written")
    if crc != content.header.crc32c:
        raise SnapshotMismatch(
            f"rank {content.header.rank}, generation {content.header.generation}: the checksum in memory is {crc:08x}, its header says "
            f"{content.header.crc32c:08x}"
        )
    sync_folder(path.parent)


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def sync_folder(folder: Path) -> None:
    """Names in it to the medium."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_manifest(root: Path, folder: str, manifest: mf.Manifest, alive: Alive) -> None:
    """See that every file is there as it was written, then make the generation whole.

    Raises:
        OSError: the file system refuses.
        SnapshotMismatch: a file is not there, or another one: not all nodes write to the same place, or it has lost something.
    """
    for rank in range(len(manifest.files)):
        try:
            with _opened(root / folder / mf.file_name(rank)) as (fd, length):
                manifest.require(rank, Header.unpack(os.pread(fd, HEADER_BYTES, 0)), length)
        except FileNotFoundError as missing:
            raise SnapshotMismatch(
                f"the file of rank {rank} was written by another node and is not seen here, in {root / folder}: --save must be on a file "
                "system that all nodes share"
            ) from missing
        alive()
    new = root / folder / f".{mf.MANIFEST}.new"
    with open(new, "wb") as file:
        file.write(mf.encode(manifest))
        file.flush()
        os.fsync(file.fileno())
    new.replace(root / folder / mf.MANIFEST)
    sync_folder(root / folder)
    sync_folder(root)


class _opened:
    """A regular file, opened to be read, with its length."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> tuple[int, int]:
        # What is no file, such as a pipe, must not hold the one who opens it.
        self._fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(self._fd)
            raise SnapshotMismatch(f"{self._path} is not a file")
        return self._fd, found.st_size

    def __exit__(self, *failure: object) -> None:
        os.close(self._fd)


def read_manifest(root: Path, folder: str) -> mf.Manifest:
    """The manifest of a generation.

    Raises:
        Unseen: there is none.
        SnapshotMismatch: it is damaged, or no manifest.
        OSError: it cannot be read.
    """
    if mf.parse_name(folder) is None:
        raise SnapshotMismatch(f"{folder!r} is not the name of a durable generation")
    try:
        with _opened(root / folder / mf.MANIFEST) as (fd, length):
            if length > mf.MANIFEST_BYTES_MAX:
                raise SnapshotMismatch(f"{root / folder / mf.MANIFEST} has {length} bytes, more than {mf.MANIFEST_BYTES_MAX}")
            raw = b"".join(iter(lambda: os.read(fd, 1 << 20), b""))
    except FileNotFoundError as missing:
        raise Unseen(f"{root / folder / mf.MANIFEST} is not there") from missing
    return mf.decode(raw, folder)


def read_snapshot(
    folder: Path, manifest: mf.Manifest, rank: int, run_id: str, make_slots: Callable[[int], Slots], alive: Alive
) -> Header:
    """Fill slot 0 of what `make_slots(bytes of a slot)` returns with a rank's snapshot; returns the header that it has there.

    Everything is checked (guarantee 6): the header and the sizes before memory is taken, the checksum in memory. The header that
    the slot gets is of the run that goes on.

    Raises:
        SnapshotMismatch: it is damaged, or another snapshot.
        OSError: it cannot be read.
        UsageError: there is no room (make_slots).
    """
    path = folder / mf.file_name(rank)
    try:
        with _opened(path) as (fd, length):
            header = Header.unpack(os.pread(fd, HEADER_BYTES, 0))
            manifest.require(rank, header, length)
            slot_bytes = HEADER_BYTES + metadata_room_bytes(header.metadata_bytes) + header.payload_bytes
            slots = make_slots(slot_bytes)
            slots.invalidate(0)
            _read(fd, HEADER_BYTES, slots.span(HEADER_BYTES, header.metadata_bytes), alive)
            _read(fd, HEADER_BYTES + header.metadata_bytes, slots.span(slot_bytes - header.payload_bytes, header.payload_bytes), alive)
    except FileNotFoundError as missing:
        raise SnapshotMismatch(f"{path} is missing") from missing
    except SnapshotMismatch as wrong:
        raise SnapshotMismatch(f"{path}: {wrong}") from wrong
    found = slots.checksum(0, header.metadata_bytes, header.payload_bytes)
    if found != header.crc32c:
        raise SnapshotMismatch(f"{path}: the checksum is {found:08x}, its header says {header.crc32c:08x}: the file is damaged")
    here = Header(run_id, rank, header.generation, header.layout_hash, header.metadata_bytes, header.payload_bytes, header.crc32c)
    slots.write_header(0, here)
    return here


def _read(fd: int, offset: int, into: memoryview, alive: Alive) -> None:
    while into:
        count = os.preadv(fd, [into[:_PIECE_BYTES]], offset)
        if count == 0:
            raise SnapshotMismatch(f"the file ends {len(into)} bytes too early")
        into, offset = into[count:], offset + count
        alive()


def find(root: Path) -> tuple[list[mf.Manifest], list[str], list[str]]:
    """The manifests of the whole generations below `root`, their folders, and what was found and cannot be used, in words.

    Raises:
        OSError: the folder is there and cannot be read.
    """
    manifests, folders, refused = [], [], []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in sorted(os.listdir(root)):
            if mf.parse_name(name) is None:
                continue
            try:
                manifests.append(read_manifest(root, name))
                folders.append(name)
            except Unseen:
                continue
            except (SnapshotMismatch, OSError) as damaged:
                refused.append(f"{root / name}: {damaged}")
    return manifests, folders, refused


def prune(root: Path, newest: str, keep: int) -> Sequence[str]:
    """Remove what is not needed now that `newest` is whole: whole generations before the `keep` newest, and what never became whole.

    Newer is what has the higher generation; of one generation, the one written last. Generations that were set aside are a user's to
    remove. Returns the names that are gone.

    Raises:
        OSError: one cannot be removed.
    """
    names = [name for name in os.listdir(root) if mf.parse_name(name) is not None and name != newest]
    whole = [name for name in names if (root / name / mf.MANIFEST).exists()]
    torn = [name for name in names if name not in whole and not (root / name / mf.SET_ASIDE).exists()]

    def age(name: str) -> tuple[int, float]:
        parsed = mf.parse_name(name)
        assert parsed is not None
        return parsed.generation, (root / name / mf.MANIFEST).stat().st_mtime

    old = sorted(whole, key=age, reverse=True)[max(0, keep - 1) :]
    for name in old:
        (root / name / mf.MANIFEST).unlink()  # first: half of a generation must never look like a whole one
    for name in [*old, *torn]:
        shutil.rmtree(root / name)
    return [*old, *torn]


def set_aside(root: Path, folder: str) -> None:
    """No job begins from this generation any more; nothing is removed."""
    (root / folder / mf.MANIFEST).rename(root / folder / mf.SET_ASIDE)
