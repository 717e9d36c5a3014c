"""The layout of a snapshot and the header in front of it. Pure.

A slot is  [header, 4 KiB][metadata, fixed room][payload].  The payload is flat: each tensor at an aligned offset, in an order
that follows from the model alone, so that any process which builds the same rank computes the same layout, and equal hashes mean
equal meaning of every byte. The header is written last and names run, rank, generation, layout and checksum; a snapshot that
does not match in each of them is never loaded (guarantee 6).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import SnapshotMismatch

HEADER_BYTES = 4096
ALIGNMENT_BYTES = 64  # a cache line, and more than any element size: copies never share a line
MAGIC = b"DEADPOOL"
FORMAT_VERSION = 1
#: magic, format, rank, generation, metadata bytes, payload bytes, crc32c of metadata+payload, run id, layout hash
_HEADER = struct.Struct("<8sIIQQQI32s32s")
_HEADER_CHECK = struct.Struct("<I")


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length_bytes: int


@dataclass(frozen=True)
class Layout:
    """Names, types, shapes and offsets of everything in a payload, and the room for metadata before it."""

    tensors: tuple[TensorSpec, ...]
    metadata_room_bytes: int
    payload_bytes: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: header, metadata room and payload."""
        return HEADER_BYTES + self.metadata_room_bytes + self.payload_bytes

    @property
    def hash(self) -> bytes:
        """32 bytes that are equal exactly if two payloads mean the same (the room for metadata may differ between processes)."""
        digest = hashlib.sha256(f"{FORMAT_VERSION} {self.payload_bytes}\n".encode())
        for t in self.tensors:
            digest.update(f"{t.name} {t.dtype} {t.shape} {t.offset} {t.length_bytes}\n".encode())
        return digest.digest()


def metadata_room_bytes(metadata_bytes: int) -> int:
    """Room for metadata whose first record has this size: twice that and 4 KiB, rounded up, because counters grow by a few digits in
    a long run while the random states keep their size."""
    return -(-(2 * metadata_bytes + 4096) // 4096) * 4096


def plan_layout(tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata_bytes: int) -> Layout:
    """Lay out (name, dtype, shape, bytes) in the given order. `metadata_bytes` is the size of a first metadata record."""
    specs, offset, names = [], 0, set()
    for name, dtype, shape, length_bytes in tensors:
        if name in names:
            raise ValueError(f"tensor names in a layout must be unique, got {name!r} twice")
        names.add(name)
        specs.append(TensorSpec(name, dtype, tuple(shape), offset, length_bytes))
        offset += -(-length_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return Layout(tuple(specs), metadata_room_bytes(metadata_bytes), offset)


@dataclass(frozen=True)
class Header:
    """What a slot says of its content. `crc32c` covers the metadata's bytes, then the payload's."""

    run_id: str
    rank: int
    generation: int
    layout_hash: bytes
    metadata_bytes: int
    payload_bytes: int
    crc32c: int

    def pack(self) -> bytes:
        """HEADER_BYTES bytes, ending in zeros, with a checksum of the header itself."""
        run_id = self.run_id.encode()
        if len(run_id) > 32:
            raise ValueError(f"a run id has at most 32 bytes, got {len(run_id)}: {self.run_id!r}")
        body = _HEADER.pack(
            MAGIC,
            FORMAT_VERSION,
            self.rank,
            self.generation,
            self.metadata_bytes,
            self.payload_bytes,
            self.crc32c,
            run_id,
            self.layout_hash,
        )
        body += _HEADER_CHECK.pack(_fold(body))
        return body + bytes(HEADER_BYTES - len(body))

    @classmethod
    def unpack(cls, raw: bytes) -> Header:
        """Read a header.

        Raises:
            SnapshotMismatch: not a header of this format, or damaged.
        """
        if len(raw) < _HEADER.size + _HEADER_CHECK.size:
            raise SnapshotMismatch(f"a snapshot header has {HEADER_BYTES} bytes, got {len(raw)}")
        body = bytes(raw[: _HEADER.size])
        (check,) = _HEADER_CHECK.unpack_from(raw, _HEADER.size)
        if body[:8] != MAGIC:
            raise SnapshotMismatch(f"a snapshot begins with {MAGIC!r}, got {body[:8]!r}: the slot is empty or not a slot")
        if check != _fold(body):
            raise SnapshotMismatch("the snapshot header is damaged: its own checksum does not match")
        _, version, rank, generation, metadata, payload, crc, run_id, layout_hash = _HEADER.unpack(body)
        if version != FORMAT_VERSION:
            raise SnapshotMismatch(f"snapshot format {FORMAT_VERSION} is read here, got {version}")
        try:
            text = run_id.rstrip(b"\0").decode()
        except UnicodeDecodeError as noise:
            raise SnapshotMismatch(f"a run id is text, the snapshot header has {run_id!r}") from noise
        return cls(text, rank, generation, layout_hash, metadata, payload, crc)

    def require(self, *, run_id: str, rank: int, generation: int, layout_hash: bytes | None = None) -> None:
        """Check that this is the snapshot that was asked for.

        Raises:
            SnapshotMismatch: names every field that differs.
        """
        wanted = {"run": run_id, "rank": rank, "generation": generation}
        found = {"run": self.run_id, "rank": self.rank, "generation": self.generation}
        if layout_hash is not None:
            wanted["layout"], found["layout"] = layout_hash.hex()[:12], self.layout_hash.hex()[:12]
        wrong = [f"{k} is {found[k]!r}, asked for {wanted[k]!r}" for k in wanted if found[k] != wanted[k]]
        if wrong:
            raise SnapshotMismatch("the snapshot is another one: " + "; ".join(wrong))


def _fold(body: bytes) -> int:
    return int.from_bytes(hashlib.sha256(body).digest()[:4], "little")
