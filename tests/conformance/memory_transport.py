"""A Transport without a network, for the conformance suite: agents in one process find each other by address in a registry."""

from __future__ import annotations

from typing import ClassVar

from megatron.hotswap.errors import HotSwapError, PeerFault, SnapshotMismatch
from megatron.hotswap.replication.transfer import ReplicaStore, Reserve, Transport
from megatron.hotswap.snapshot.layout import HEADER_BYTES, Header
from megatron.hotswap.snapshot.slots import Slots


class MemoryTransport(Transport):
    """Copies bytes from slot to slot."""

    serving: ClassVar[dict[str, tuple[str, ReplicaStore]]] = {}  # address -> token, store
    count = 0

    def __init__(self, token: str, interface: str = "") -> None:
        self._token = token
        self._address = ""

    async def serve(self, replicas: ReplicaStore) -> str:
        MemoryTransport.count += 1
        self._address = f"memory:{MemoryTransport.count}"
        self.serving[self._address] = (self._token, replicas)
        return self._address

    def _peer(self, address: str) -> ReplicaStore:
        token, store = self.serving.get(address, ("", None))
        if store is None:
            raise PeerFault(f"nobody is at {address}")
        if token != self._token:
            raise PeerFault(f"{address} does not know this token")
        return store

    async def push(self, address: str, slots: Slots, slot: int, header: Header) -> None:
        store = self._peer(address)
        try:
            theirs, place = store.reserve(header, slots.slot_bytes)
            _copy(slots, slot, theirs, place, header)
            store.complete(header, place)
        except HotSwapError as refused:
            raise PeerFault(f"{address} refused: {refused}") from refused

    async def fetch(self, address: str, run_id: str, rank: int, generation: int, reserve: Reserve) -> tuple[Slots, int, Header]:
        try:
            slots, slot = self._peer(address).find(rank, generation)
        except SnapshotMismatch as missing:
            raise PeerFault(str(missing)) from missing
        header = slots.header(slot)
        header.require(run_id=run_id, rank=rank, generation=generation)
        mine, place = reserve(header, slots.slot_bytes)
        _copy(slots, slot, mine, place, header)
        mine.write_header(place, header)
        return mine, place, header

    async def close(self) -> None:
        self.serving.pop(self._address, None)


def _copy(source: Slots, slot: int, target: Slots, place: int, header: Header) -> None:
    """Metadata and payload, checked on arrival."""
    for part in (slice(HEADER_BYTES, HEADER_BYTES + header.metadata_bytes), slice(source.slot_bytes - header.payload_bytes, None)):
        target.view(place)[part] = source.view(slot)[part]
    found = target.checksum(place, header.metadata_bytes, header.payload_bytes)
    if found != header.crc32c:
        raise SnapshotMismatch(f"the checksum is {found:08x} on arrival, {header.crc32c:08x} at the sender")
