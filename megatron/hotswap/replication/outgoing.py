"""A snapshot on its way out of this agent's memory: what every transport sends, and several holders share.

A chunk can be taken as soon as its bytes are in place, while the device still copies those behind it. Its checksum is computed
once, by whoever takes it first, and never on the event loop: by `chunk` in an executor, or by a transport's own thread in the same
pass over memory as the send (`await_bytes`, `learn`). The checksum of the whole comes last, out of those of the chunks.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import deadpool_ext

from ..errors import HotSwapError, SnapshotMismatch
from ..snapshot.layout import Header
from ..snapshot.slots import Slots
from .chunks import CHUNK_BYTES, Chunks

#: How often the progress of a copy is looked at: a chunk waits at most this long before it is sent on.
_COPY_POLL_S = 0.001
#: Chunks whose checksums can be computed at the same time. More than any transport has threads.
_AT_ONCE = 64


class Stopped(HotSwapError):
    """Whoever waited for a chunk was told to stop."""


class Outgoing:
    """See the module docstring. Made by `of_copy` or `of_slot`.

    `version` is the membership under which the snapshot is sent, 0 where there is none.
    """

    def __init__(self, slots: Slots, slot: int, identity: Header, version: int, available: Callable[[], int], chunk_bytes: int) -> None:
        self.slots, self.slot, self.version = slots, slot, version
        self.run_id, self.rank, self.generation = identity.run_id, identity.rank, identity.generation
        self.layout_hash = identity.layout_hash
        self.metadata_bytes, self.payload_bytes = identity.metadata_bytes, identity.payload_bytes
        self.chunks = Chunks(slots.slot_bytes, identity.metadata_bytes, identity.payload_bytes, chunk_bytes)
        self.promised: Header | None = None  # what the slot's own header says
        self._available = available
        self._crcs: dict[int, int] = {}
        self._locks = [threading.Lock() for _ in range(_AT_ONCE)]
        self._header: Header | None = None

    @classmethod
    def of_copy(
        cls,
        slots: Slots,
        slot: int,
        available: Callable[[], int],
        *,
        run_id: str,
        rank: int,
        generation: int,
        layout_hash: bytes,
        metadata_bytes: int,
        payload_bytes: int,
        version: int = 0,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> Outgoing:
        """A snapshot that is still being copied into its slot. Its metadata is there.

        `available` says, on any thread and at once, how many bytes of the payload are in place, counted from its beginning.
        """
        identity = Header(run_id, rank, generation, layout_hash, metadata_bytes, payload_bytes, 0)
        return cls(slots, slot, identity, version, available, chunk_bytes)

    @classmethod
    def of_slot(cls, slots: Slots, slot: int, header: Header, *, version: int = 0, chunk_bytes: int = CHUNK_BYTES) -> Outgoing:
        """A snapshot that is complete in its slot, under this header. Every byte is checked again as it goes out."""
        out = cls(slots, slot, header, version, lambda: header.payload_bytes, chunk_bytes)
        out.promised = header
        return out

    @property
    def identity(self) -> Header:
        """What the snapshot is. The checksum is that of the slot's header, or 0 where that is not known yet."""
        crc = 0 if self.promised is None else self.promised.crc32c
        return Header(self.run_id, self.rank, self.generation, self.layout_hash, self.metadata_bytes, self.payload_bytes, crc)

    @property
    def base(self) -> int:
        """The address that the chunks' offsets count from."""
        return self.slots.address(self.slot)

    def await_bytes(self, index: int, stop: threading.Event) -> tuple[int, int]:
        """(offset in the slot, length) of a chunk, for a thread, which is held until all its bytes are in place.

        Raises:
            Stopped: `stop` was set first.
        """
        needed = self.chunks.payload_needed(index)
        while self._available() < needed:
            if stop.wait(_COPY_POLL_S):
                raise Stopped(f"chunk {index} of rank {self.rank}, generation {self.generation} is not wanted any more")
        return self.chunks[index]

    def known(self, index: int) -> int | None:
        """The checksum of a chunk, if somebody has computed it."""
        return self._crcs.get(index)

    def learn(self, index: int, crc: int) -> None:
        """The checksum of a chunk, from who computed it. The first one stays: if two differ, memory has changed in between, and
        what was sent after the change does not go with the header."""
        self._crcs.setdefault(index, crc)

    async def chunk(self, index: int) -> tuple[int, int, int]:
        """(offset in the slot, length, CRC32C) of a chunk, once all its bytes are in place."""
        needed = self.chunks.payload_needed(index)
        while self._available() < needed:
            await asyncio.sleep(_COPY_POLL_S)
        return await asyncio.get_running_loop().run_in_executor(None, self._checked, index)

    def _checked(self, index: int) -> tuple[int, int, int]:
        offset, length = self.chunks[index]
        with self._locks[index % _AT_ONCE]:  # a second holder's thread waits for the first one's result
            crc = self._crcs.get(index)
            if crc is None:
                crc = self._crcs.setdefault(index, deadpool_ext.crc32c(self.base + offset, length))
        return offset, length, crc

    async def header(self) -> Header:
        """The header with the checksum of the whole; waits for every chunk.

        Raises:
            SnapshotMismatch: the slot's content is not what its header promises: it was damaged here and must not be used.
        """
        for index in range(len(self.chunks)):
            if index not in self._crcs:
                await self.chunk(index)
        if self._header is None:
            self._header = await asyncio.get_running_loop().run_in_executor(None, self._sum_up)
        return self._header

    def _sum_up(self) -> Header:
        whole = self.chunks.combined(self._crcs.__getitem__)
        if self.promised is not None and self.promised.crc32c != whole:
            raise SnapshotMismatch(
                f"rank {self.rank}, generation {self.generation}: the checksum of the slot here is {whole:08x}, its header says "
                f"{self.promised.crc32c:08x}: it was damaged in this node's memory and is not sent on; another source is needed"
            )
        return Header(self.run_id, self.rank, self.generation, self.layout_hash, self.metadata_bytes, self.payload_bytes, whole)
