"""A durable generation on disk: names, and the manifest that makes it whole. Pure.

    SAVE/hot-swap/generation_0000000040_RUN_2_1/          of run RUN, begun under membership 2, attempt 1
        rank_000000.snapshot  rank_000001.snapshot  …     each a header of 4 KiB, metadata, payload (layout.py)
        manifest.json                                     written last: without it nothing here counts

The manifest is one line of JSON and below it the SHA-256 of that line. It names no file: their names follow from the ranks, and a
folder's name is checked before it is used, so nothing that was read can lead out of the folder.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import msgspec

from ..errors import SnapshotMismatch
from .layout import HEADER_BYTES, Header

FOLDER = "hot-swap"
MANIFEST = "manifest.json"
#: What an earlier course of training has left in a reused --save is not removed, only not counted any more.
SET_ASIDE = "manifest.set-aside.json"
FORMAT = 1
#: Larger than any manifest of 100,000 ranks (some 120 bytes each).
MANIFEST_BYTES_MAX = 32 << 20
WORLD_SIZE = "world-size"
_NAME = re.compile(r"generation_(\d{10})_([0-9A-Za-z.-]{1,32})_(\d{1,9})_(\d{1,9})")


@dataclass(frozen=True)
class Name:
    """What a folder's name says."""

    generation: int
    run_id: str
    version: int  # of the membership in which it was begun
    attempt: int

    def __str__(self) -> str:
        return f"generation_{self.generation:010d}_{self.run_id}_{self.version}_{self.attempt}"


def parse_name(folder: str) -> Name | None:
    """Read a folder's name; None for any other name."""
    found = _NAME.fullmatch(folder)
    return None if found is None else Name(int(found[1]), found[2], int(found[3]), int(found[4]))


def file_name(rank: int) -> str:
    """The file of a rank's snapshot."""
    return f"rank_{rank:06d}.snapshot"


class DurableFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's snapshot: bytes of the file, CRC32C of metadata and payload, hash of the layout in hex."""

    length: int
    crc32c: int
    layout: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What belongs to a whole generation."""

    format: int
    run_id: str
    generation: int
    shape: dict[str, int]  # sizes of the grid, by their flags
    files: tuple[DurableFile, ...]  # of rank 0, 1, …

    def require(self, rank: int, header: Header, length: int) -> None:
        """Check that a file is the one that belongs here.

        Args:
            rank: whose file it is.
            header: in the file.
            length: of the file, bytes.

        Raises:
            SnapshotMismatch: names what differs.
        """
        file = self.files[rank]
        header.require(run_id=self.run_id, rank=rank, generation=self.generation, layout_hash=bytes.fromhex(file.layout))
        said = HEADER_BYTES + header.metadata_bytes + header.payload_bytes
        if not length == file.length == said:
            raise SnapshotMismatch(f"the file has {length} bytes, its header says {said}, the manifest {file.length}")
        if header.crc32c != file.crc32c:
            raise SnapshotMismatch(f"the file's header says the checksum {header.crc32c:08x}, the manifest {file.crc32c:08x}")


def encode(manifest: Manifest) -> bytes:
    """The content of manifest.json."""
    line = msgspec.json.encode(manifest)
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


_DECODER = msgspec.json.Decoder(Manifest)


def decode(raw: bytes, folder: str) -> Manifest:
    """Read the manifest of the folder with this name.

    Raises:
        SnapshotMismatch: it is damaged, of another format, or not that folder's.
    """
    name = parse_name(folder)
    if name is None:
        raise SnapshotMismatch(f"{folder!r} is not the name of a durable generation")
    if len(raw) > MANIFEST_BYTES_MAX:
        raise SnapshotMismatch(f"{MANIFEST} has more than {MANIFEST_BYTES_MAX} bytes")
    line, _, rest = raw.partition(b"\n")
    if rest != hashlib.sha256(line).hexdigest().encode() + b"\n":
        raise SnapshotMismatch(f"{MANIFEST} is damaged or cut short: its own checksum does not match")
    try:
        manifest = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as damaged:
        raise SnapshotMismatch(f"{MANIFEST} cannot be read: {damaged}") from damaged
    wrong = _wrong(manifest, name)
    if wrong:
        raise SnapshotMismatch(f"{MANIFEST} {wrong}")
    return manifest


def _wrong(manifest: Manifest, name: Name) -> str:
    """What is not as it must be, in words; empty if nothing is."""
    if manifest.format != FORMAT:
        return f"has format {manifest.format}, format {FORMAT} is read here"
    if (manifest.generation, manifest.run_id) != (name.generation, name.run_id):
        return f"is of generation {manifest.generation} of run {manifest.run_id!r}, and lies in the folder {name}"
    if not manifest.files or manifest.shape.get(WORLD_SIZE) != len(manifest.files):
        return f"names {len(manifest.files)} files for {manifest.shape.get(WORLD_SIZE)} ranks"
    for rank, file in enumerate(manifest.files):
        if file.length < HEADER_BYTES or not 0 <= file.crc32c < 1 << 32 or not re.fullmatch(r"[0-9a-f]{64}", file.layout):
            return f"has an impossible entry for rank {rank}: {file}"
    return ""
