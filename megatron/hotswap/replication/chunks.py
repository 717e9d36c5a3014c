"""How a snapshot is divided for its way between agents: fixed chunks, each with a checksum of its own.

Metadata comes first, then the payload, each cut at multiples of the chunk size; no chunk has bytes of both, since they do not
touch in a slot. Sender and holder compute the same division from four numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import deadpool_ext

from ..errors import SnapshotMismatch
from ..snapshot.layout import HEADER_BYTES

#: What a chunk costs beside its bytes (a turn of a Python loop, two system calls, waking who waits) is 20 to 40 us on a core of
#: today, and more where threads and processes share few cores. On two cores and loopback, of one bare C stream's rate: 0.74 with
#: 4 MiB, 0.97 with 8, 0.92 with 16 (medians of runs that differ by 0.05). More would only delay the first byte of a pipelined push.
CHUNK_BYTES = 8 << 20
#: Bounds for what a peer may announce. The least keeps the bookkeeping (100 to 200 bytes a chunk) below a hundredth of the data;
#: the most keeps a thread that is to be stopped from being busy with one chunk for longer than a tenth of a second.
CHUNK_BYTES_MIN, CHUNK_BYTES_MAX = 64 << 10, 256 << 20
SLOT_BYTES_MAX = 1 << 44  # 16 TiB: a length above this is not a slot but noise


@dataclass(frozen=True)
class Chunks:
    """The division of one snapshot. `chunks[i]` is (offset in the slot, length), both in bytes.

    Raises:
        SnapshotMismatch: the lengths cannot be those of a snapshot.
    """

    slot_bytes: int
    metadata_bytes: int
    payload_bytes: int
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        if not HEADER_BYTES + self.metadata_bytes + self.payload_bytes <= self.slot_bytes <= SLOT_BYTES_MAX:
            raise SnapshotMismatch(
                f"a slot of {self.slot_bytes} bytes (at most {SLOT_BYTES_MAX}) cannot hold {self.metadata_bytes} + {self.payload_bytes} "
                "bytes and a header"
            )
        if not CHUNK_BYTES_MIN <= self.chunk_bytes <= CHUNK_BYTES_MAX:
            raise SnapshotMismatch(f"chunks have {CHUNK_BYTES_MIN} to {CHUNK_BYTES_MAX} bytes, got {self.chunk_bytes}")

    @property
    def _of_metadata(self) -> int:
        return -(-self.metadata_bytes // self.chunk_bytes)

    def __len__(self) -> int:
        return self._of_metadata - (-self.payload_bytes // self.chunk_bytes)

    def __getitem__(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"chunk {index} of {len(self)}")
        if index < self._of_metadata:
            at = index * self.chunk_bytes
            return HEADER_BYTES + at, min(self.chunk_bytes, self.metadata_bytes - at)
        at = (index - self._of_metadata) * self.chunk_bytes
        return self.slot_bytes - self.payload_bytes + at, min(self.chunk_bytes, self.payload_bytes - at)

    def payload_needed(self, index: int) -> int:
        """How much of the payload, from its beginning, must be in place before this chunk is whole."""
        offset, length = self[index]
        return 0 if index < self._of_metadata else offset + length - (self.slot_bytes - self.payload_bytes)

    def combined(self, crc_of: Callable[[int], int]) -> int:
        """The checksum of metadata and payload, from those of the chunks."""
        whole = 0
        for index in range(len(self)):
            whole = deadpool_ext.crc32c_combine(whole, crc_of(index), self[index][1])
        return whole
