"""A snapshot on its way into this agent's memory: where each chunk belongs, and what must be right before it counts."""

from __future__ import annotations

import threading
from dataclasses import replace

from ..errors import PeerFault, SnapshotMismatch
from ..snapshot.layout import Header
from ..snapshot.slots import Slots
from .chunks import Chunks


class Incoming:
    """Chunks may come in any order and on several threads. Nothing is written into the slot but where `place` says.

    `identity` is the header as it was announced; its checksum is not looked at.
    """

    def __init__(self, slots: Slots, slot: int, identity: Header, chunk_bytes: int) -> None:
        self.slots, self.slot = slots, slot
        self._identity = replace(identity, crc32c=0)
        self._chunks = Chunks(slots.slot_bytes, identity.metadata_bytes, identity.payload_bytes, chunk_bytes)
        self._crcs: dict[int, int] = {}
        self._begun: set[int] = set()
        self._lock = threading.Lock()
        self._refusal: str | None = None

    @property
    def _what(self) -> str:
        return f"rank {self._identity.rank}, generation {self._identity.generation}"

    def refuse(self, why: str) -> None:
        """Take no more chunks."""
        self._refusal = why

    def place(self, index: int, length: int) -> int:
        """The address for a chunk, which is now expected.

        Raises:
            SnapshotMismatch: there is no such chunk, it has another length, or it came before.
            PeerFault: no more are taken.
        """
        if self._refusal is not None:
            raise PeerFault(self._refusal)
        if index >= len(self._chunks) or length != self._chunks[index][1]:
            raise SnapshotMismatch(f"{self._what}: chunk {index} of {length} bytes came; it has {len(self._chunks)} and none such")
        with self._lock:
            if index in self._begun:
                raise SnapshotMismatch(f"{self._what}: chunk {index} came twice")
            self._begun.add(index)
        return self.slots.address(self.slot) + self._chunks[index][0]

    def arrived(self, index: int, found: int, promised: int) -> None:
        """A chunk is in its place; `found` is the checksum of what came.

        Raises:
            SnapshotMismatch: it was damaged on its way, or in the sender's memory after it was summed.
        """
        if found != promised:
            raise SnapshotMismatch(
                f"{self._what}, chunk {index}: the checksum is {found:08x} on arrival, {promised:08x} at the sender: the chunk was damaged"
            )
        self._crcs[index] = found

    def finish(self, header: Header) -> None:
        """Every chunk has come; is it the snapshot that this header describes?

        Raises:
            SnapshotMismatch: chunks are missing, or the header is another's, or its checksum is not that of the chunks together.
        """
        if len(self._crcs) != len(self._chunks):
            raise SnapshotMismatch(f"{self._what}: {len(self._crcs)} of {len(self._chunks)} chunks came")
        if replace(header, crc32c=0) != self._identity:
            raise SnapshotMismatch(f"{self._what} was announced and begun, the header that came last is another's: {header}")
        found = self._chunks.combined(self._crcs.__getitem__)
        if found != header.crc32c:
            raise SnapshotMismatch(f"{self._what}: the checksum is {found:08x} on arrival, {header.crc32c:08x} at the sender")
