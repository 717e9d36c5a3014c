"""The things of interleavings.py: slots of two parts, nodes, ranks, and actors."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from megatron.hotswap.replication import transfer
from megatron.hotswap.snapshot.layout import Header

PARTS = 2
SLOT_BYTES = 8192
RUN_ID = "run"
#: An actor yields None where anything may happen next, or a condition that it waits for.
Actor = Generator[Callable[[], bool] | None, None, None]


class PartSlots:
    """Two slots of PARTS parts. A part is (rank, generation), or anything else once damaged."""

    def __init__(self) -> None:
        self.slot_bytes = SLOT_BYTES
        self.parts: list[list[Any]] = [[None] * PARTS, [None] * PARTS]
        self.headers: list[Header | None] = [None, None]
        self.written_in = [0, 0]  # the membership of whoever wrote it
        self.replaced: Header | None = None  # what the last slot that was invalidated had held

    @classmethod
    def create(cls, slot_bytes: int, count: int) -> PartSlots:
        """As Slots.create."""
        return cls()

    def invalidate(self, slot: int) -> None:
        """As Slots.invalidate."""
        self.replaced, self.headers[slot] = self.headers[slot], None

    def write_header(self, slot: int, header: Header) -> None:
        """As Slots.write_header."""
        self.headers[slot] = header

    def header(self, slot: int) -> Header | None:
        """As Slots.header, for a slot that is complete."""
        return self.headers[slot]

    def checksum(self, slot: int) -> int:
        """Of the content as it is now."""
        return zlib.crc32(repr(self.parts[slot]).encode())

    def go_back(self, generation: int) -> None:
        """What is newer counts no more: it is of steps that will be run again."""
        self.headers = [h if h is not None and h.generation <= generation else None for h in self.headers]

    def close(self) -> None:
        """As Slots.close."""


class Node:
    """One life of one host, with its replicas."""

    def __init__(self, name: str, version: int) -> None:
        self.name = name
        self.version = version  # of the membership that it works in
        self.alive, self.halted = True, False
        self.replicas = transfer.ReplicaStore(RUN_ID, lambda wanted_bytes: None)
        self.receiving: dict[tuple[int, int], Process] = {}  # (rank, slot) -> transfer that writes there


@dataclass
class Rank:
    """One rank: the live state and the control block's words. None is "no generation"."""

    rank: int
    node: Node
    live: int = 0  # step that the live state is the result of
    done: int | None = 0  # newest completed step, or None for a replaced rank without a state
    own: PartSlots = field(default_factory=PartSlots)
    held: dict[int, int] = field(default_factory=dict)  # own slot -> generation that is there or on its way there
    complete: set[int] = field(default_factory=set)  # generations that are whole in the own slots
    copied: int = -1
    acknowledged: int = -1
    committed: int = -1
    void: int = -1
    copying: bool = False
    replicated: set[tuple[int, str]] = field(default_factory=set)  # (generation, holder) acknowledged in this life

    @property
    def newest(self) -> int:
        """The newest generation in the own slots, or on its way there."""
        return max(self.held.values(), default=-1)

    def slot_of(self, generation: int) -> int:
        """Where a generation is."""
        return next(slot for slot, there in self.held.items() if there == generation)


@dataclass
class Process:
    """An actor, the node that its end depends on, and what it waits for."""

    actor: Actor
    node: Node | None
    kind: str
    waits: Callable[[], bool] | None = None
    delivered: bool = False  # of a transfer: all parts are at the holder, which goes on alone if the sender ends
