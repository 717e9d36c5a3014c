"""The interface of a host-to-host (H2H) transport, and the replica store that all of them fill.

A transport moves whole snapshots between the memories of two agents: `push` puts one into a holder's slots, `fetch` brings one
back. Both return only when the receiver has checked run, rank, generation and checksum. tests/conformance runs one suite on
every transport.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable

from ..errors import PeerFault, SnapshotMismatch
from ..snapshot.layout import Header
from ..snapshot.slots import REPLICA_SLOTS, Slots, next_slot

#: Called with the header of an incoming snapshot; returns the slot memory to receive it in.
Reserve = Callable[[Header, int], tuple[Slots, int]]


class ReplicaStore:
    """The replicas that this agent holds for ranks of other nodes: two slots a rank."""

    def __init__(self, run_id: str, require_room: Callable[[int], None]) -> None:
        self._run_id = run_id
        self._require_room = require_room
        self._slots: dict[int, Slots] = {}
        self._complete: dict[int, dict[int, int]] = {}  # rank -> slot -> generation
        self.frozen = False  # between the report of what is held and the plan made from it, nothing may change

    def reserve(self, header: Header, slot_bytes: int, keep: int = -1) -> tuple[Slots, int]:
        """Memory for an incoming snapshot. What the slot held is invalid from now on; it is not that of generation `keep`, the
        newest that the sender knows to be committed.

        Raises:
            SnapshotMismatch: it is of another run.
            PeerFault: it is not to be taken now, or is older than what is here.
            UsageError: there is no room.
        """
        if header.run_id != self._run_id:
            raise SnapshotMismatch(f"a snapshot of run {header.run_id!r} was sent to run {self._run_id!r}; it is refused")
        if self.frozen:
            raise PeerFault("the membership is over; what is held here stays as it was reported until the plan is made")
        slots = self._slots.get(header.rank)
        if slots is None or slots.slot_bytes != slot_bytes:
            self._require_room(slot_bytes * REPLICA_SLOTS)
            slots = self._slots[header.rank] = Slots.create(slot_bytes, REPLICA_SLOTS)
            self._complete[header.rank] = {}
        held = self._complete[header.rank]
        newest = max(held.values(), default=-1)
        if newest > header.generation:  # no recovery goes back that far, so only a node that was given up can send it
            raise PeerFault(f"generation {header.generation} of rank {header.rank} is older than generation {newest}, which is held here")
        same = [slot for slot, generation in held.items() if generation == header.generation]
        slot = same[0] if same else next_slot(held, keep)
        held.pop(slot, None)
        slots.invalidate(slot)
        return slots, slot

    def holds(self, header: Header) -> bool:
        """Whether this very snapshot is here, complete: then it must not be overwritten by the same from a sender that may die."""
        try:
            slots, slot = self.find(header.rank, header.generation)
            return slots.header(slot) == header
        except SnapshotMismatch:
            return False

    def complete(self, header: Header, slot: int) -> None:
        """The snapshot is here and checked: it may be restored from."""
        if self.frozen:
            raise PeerFault("the membership ended while this snapshot was under way; it was not reported and is not kept")
        self._slots[header.rank].write_header(slot, header)
        self._complete[header.rank][slot] = header.generation

    def generations(self) -> dict[int, tuple[int, ...]]:
        """Rank -> complete generations."""
        return {rank: tuple(sorted(slots.values())) for rank, slots in self._complete.items() if slots}

    def find(self, rank: int, generation: int) -> tuple[Slots, int]:
        """The slot with a complete replica.

        Raises:
            SnapshotMismatch: there is none.
        """
        for slot, there in self._complete.get(rank, {}).items():
            if there == generation:
                return self._slots[rank], slot
        raise SnapshotMismatch(f"no replica of rank {rank}, generation {generation} is here")

    def go_back(self, generation: int) -> None:
        """The job goes on from this generation: replicas of newer ones are of steps that will be run again."""
        for rank, held in self._complete.items():
            self._complete[rank] = {slot: there for slot, there in held.items() if there <= generation}

    def drop(self, keep: frozenset[int]) -> None:
        """Free the replicas of ranks that this agent no longer holds for."""
        for rank in self._slots.keys() - keep:
            self._slots.pop(rank).close()
            self._complete.pop(rank, None)


class Transport(abc.ABC):
    """Moves snapshots between agents."""

    @abc.abstractmethod
    async def serve(self, replicas: ReplicaStore) -> str:
        """Begin to take and give snapshots; returns this agent's address for peers."""

    @abc.abstractmethod
    async def push(self, address: str, slots: Slots, slot: int, header: Header) -> None:
        """Send one own slot to the holder at `address`; returns when it has been received and checked there.

        Raises:
            PeerFault: the holder is gone or refused it.
        """

    @abc.abstractmethod
    async def fetch(self, address: str, run_id: str, rank: int, generation: int, reserve: Reserve) -> tuple[Slots, int, Header]:
        """Bring a replica from the agent at `address` into memory that `reserve` gives.

        Raises:
            PeerFault: the holder is gone or has no such replica.
            SnapshotMismatch: what came is not what was asked for.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Stop serving and drop every connection."""


async def checksum(slots: Slots, slot: int, header: Header) -> int:
    """The checksum of a slot's content, computed without holding the event loop."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(None, slots.checksum, slot, header.metadata_bytes, header.payload_bytes)
