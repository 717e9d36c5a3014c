"""A Transport without a network, for the conformance suite: agents in one process find each other by address in a registry."""

from __future__ import annotations

from typing import ClassVar

import deadpool_ext
from megatron.hotswap.errors import HotSwapError, PeerFault, SnapshotMismatch
from megatron.hotswap.replication.incoming import Incoming
from megatron.hotswap.replication.outgoing import Outgoing
from megatron.hotswap.replication.transfer import ReplicaStore, Reserve, Transport
from megatron.hotswap.snapshot.layout import Header
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

    async def push(self, address: str, outgoing: Outgoing) -> bool:
        store = self._peer(address)
        try:
            store.admit(outgoing.identity, outgoing.version)
            held = store.held_as(outgoing.identity)
            if held is not None and held == await outgoing.header():
                return False
            theirs, place = store.reserve(outgoing.identity, outgoing.slots.slot_bytes, outgoing.version, outgoing.keep)
            incoming = Incoming(theirs, place, outgoing.identity, outgoing.chunks.chunk_bytes)
            await _copy(outgoing, incoming)
        except HotSwapError as refused:
            raise PeerFault(f"{address} refused: {refused}") from refused
        header = await outgoing.header()
        incoming.finish(header)
        store.complete(header, place, outgoing.version, theirs)
        return True

    async def fetch(self, address: str, run_id: str, rank: int, generation: int, reserve: Reserve) -> tuple[Slots, int, Header]:
        try:
            slots, slot = self._peer(address).find(rank, generation)
        except SnapshotMismatch as missing:
            raise PeerFault(str(missing)) from missing
        header = slots.header(slot)
        header.require(run_id=run_id, rank=rank, generation=generation)
        mine, place = reserve(header, slots.slot_bytes)
        outgoing = Outgoing.of_slot(slots, slot, header)
        incoming = Incoming(mine, place, header, outgoing.chunks.chunk_bytes)
        await _copy(outgoing, incoming)
        incoming.finish(await outgoing.header())
        mine.write_header(place, header)
        return mine, place, header

    async def close(self) -> None:
        self.serving.pop(self._address, None)


async def _copy(outgoing: Outgoing, incoming: Incoming) -> None:
    """Chunk by chunk, each checked on arrival."""
    for index in range(len(outgoing.chunks)):
        offset, length, crc = await outgoing.chunk(index)
        place = incoming.place(index, length)
        deadpool_ext.memcpy(place, outgoing.base + offset, length)
        incoming.arrived(index, deadpool_ext.crc32c(place, length), crc)
