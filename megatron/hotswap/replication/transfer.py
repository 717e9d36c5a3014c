"""The interface of a host-to-host (H2H) transport, and the replica store that all of them fill.

A transport moves whole snapshots between the memories of two agents: `push` puts one into a holder's slots, `fetch` brings one
back. Before memory is taken for one, the receiver has checked run, rank, generation and lengths; each chunk's checksum is checked
when it arrives, and both return only when that of the whole is right too. tests/conformance runs one suite on every transport.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import replace

from ..errors import PeerFault, SnapshotMismatch
from ..snapshot.layout import Header
from ..snapshot.slots import REPLICA_SLOTS, Slots, next_slot
from .outgoing import Outgoing

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
        self.version = 0  # newest membership version that this agent knows
        #: This agent's own snapshots, which a peer with the same payload may fetch.
        self.own: Callable[[int, int], tuple[Slots, int] | None] = lambda rank, generation: None

    def admit(self, header: Header, version: int) -> None:
        """May this snapshot, sent under membership `version`, change anything here?

        Raises:
            SnapshotMismatch: it is of another run.
            PeerFault: it is not to be taken now, or was sent under a membership that is over.
        """
        if header.run_id != self._run_id:
            raise SnapshotMismatch(f"a snapshot of run {header.run_id!r} was sent to run {self._run_id!r}; it is refused")
        if version < self.version:
            raise PeerFault(
                f"rank {header.rank}, generation {header.generation} was sent under membership {version}, which is over: {self.version} "
                "is known here"
            )
        if self.frozen:
            raise PeerFault("the membership is over; what is held here stays as it was reported until the plan is made")

    def reserve(self, header: Header, slot_bytes: int, version: int = 0, keep: int = -1) -> tuple[Slots, int]:
        """Memory for an incoming snapshot. What the slot held is invalid from now on; it is not that of generation `keep`, the
        newest that the sender knows to be committed.

        Raises:
            SnapshotMismatch: it is of another run.
            PeerFault: it is not to be taken now, or is older than what is here.
            UsageError: there is no room.
        """
        self.admit(header, version)
        slots = self._slots.get(header.rank)
        if slots is None or slots.slot_bytes != slot_bytes:
            if slots is not None:
                self._free(header.rank)
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

    def held_as(self, identity: Header) -> Header | None:
        """The header of the complete replica here that agrees with `identity` in all but the checksum, if there is one.

        Such a replica must not be overwritten by the same bytes from a sender that may die over it.
        """
        try:
            slots, slot = self.find(identity.rank, identity.generation)
            held = slots.header(slot)
        except SnapshotMismatch:
            return None
        return held if replace(held, crc32c=identity.crc32c) == identity else None

    def complete(self, header: Header, slot: int, version: int = 0, slots: Slots | None = None) -> None:
        """The snapshot is here and checked: it may be restored from. `slots` is where it was received.

        Raises:
            PeerFault: its membership ended while it was under way, or its memory was given up.
        """
        if self.frozen or version < self.version:
            raise PeerFault("the membership ended while this snapshot was under way; it was not reported and is not kept")
        if header.rank not in self._slots or (slots is not None and slots is not self._slots[header.rank]):
            raise PeerFault(f"the memory for rank {header.rank} was given up while generation {header.generation} was under way")
        self._slots[header.rank].write_header(slot, header)
        self._complete[header.rank][slot] = header.generation

    def generations(self) -> dict[int, tuple[int, ...]]:
        """Rank -> complete generations."""
        return {rank: tuple(sorted(slots.values())) for rank, slots in self._complete.items() if slots}

    def find(self, rank: int, generation: int) -> tuple[Slots, int]:
        """The slot with a complete replica, or with the own snapshot of a rank that lives here.

        Raises:
            SnapshotMismatch: there is none.
        """
        own = self.own(rank, generation)
        if own is not None:
            return own
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
            self._free(rank)

    def _free(self, rank: int) -> None:
        self._slots.pop(rank).close()
        self._complete.pop(rank, None)

    @property
    def held_bytes(self) -> int:
        """Host memory that the replicas take now."""
        return sum(slots.slot_bytes * slots.count for slots in tuple(self._slots.values()))  # metrics ask from another thread


class Transport(abc.ABC):
    """Moves snapshots between agents."""

    async def check(self) -> str:
        """Whether it can work on this node, asked before anything is started; returns what moves the bytes, in words.

        Raises:
            UsageError: it cannot, and why, and what to do.
        """
        return "TCP"  # which every node has

    @abc.abstractmethod
    async def serve(self, replicas: ReplicaStore) -> str:
        """Begin to take and give snapshots; returns this agent's address for peers."""

    @abc.abstractmethod
    async def push(self, address: str, outgoing: Outgoing) -> bool:
        """Send a snapshot to the holder at `address`; returns when it has been received and checked there. False: it was there before,
        and nothing travelled.

        Begins with the chunks that are in place. A holder that is slow to take them makes it take longer and nothing else; a
        cancelled push has let go of the slot's memory when it ends. Several holders may be pushed to at once.

        Raises:
            PeerFault: the holder is gone, or refused it.
            SnapshotMismatch: the own slot is damaged (Outgoing.header); the holder has not taken it for good.
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

