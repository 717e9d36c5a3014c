"""Fakes of time, network, nodes and memory for the simulator. Nothing here decides; the real Control does.

A node is one failure domain: it can be killed (its connections close), lose power (they do not), freeze and thaw, or be cut off
from the coordinator while its peers still reach it. Streams between an agent and the coordinator keep their order, as gRPC's do;
messages of different agents overtake each other, and an agent's message may arrive once more, later.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron.hotswap.snapshot.layout import Header

RUN_ID = "run"


class Clock:
    """Simulated time: a heap of calls."""

    def __init__(self, rng: random.Random) -> None:
        self.now = 0.0
        self.rng = rng
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = itertools.count()

    def after(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        """Call later."""
        heapq.heappush(self._heap, (self.now + delay, next(self._count), call, args))

    def about(self, mean: float) -> float:
        """A delay around `mean`; one in twenty is ten times as long."""
        draw = self.rng.random
        return (0.2 + 1.6 * draw()) * mean * (10.0 if draw() < 0.05 else 1.0)

    def run(self, until_s: float, over: Callable[[], bool]) -> None:
        """Make one call after the other, until it is over, or so late, or nothing is left to do."""
        heap, pop = self._heap, heapq.heappop
        while heap and self.now < until_s and not over():
            self.now, _, call, args = pop(heap)
            call(*args)


class Node:
    """One life of one host. What happens on it goes through `run`."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        self.clock = clock
        self.alive = True
        self.frozen = False
        self.thawed_at = 0.0
        self._deferred: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def run(self, call: Callable[..., None], *args: Any) -> None:
        """Do something on this node: now, after it thaws, or never."""
        if not self.alive:
            return
        if self.frozen:
            self._deferred.append((call, args))
        else:
            call(*args)

    def after(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        """Do something on this node later."""
        self.clock.after(delay, self.run, call, *args)

    def thaw(self) -> None:
        """Go on where it was."""
        self.frozen, self.thawed_at = False, self.clock.now
        deferred, self._deferred = self._deferred, []
        for call, args in deferred:
            self.run(call, *args)


class Stream:
    """One direction between an agent and the coordinator: ordered, delayed, can be cut and healed."""

    def __init__(self, clock: Clock, deliver: Callable[[Any], None], repeat_chance: float, repeat_s: float = 0.0) -> None:
        self._clock = clock
        self._repeat_s = repeat_s  # after which what arrives again does so
        self._deliver = deliver
        self._repeat_chance = repeat_chance
        self._free_at = 0.0
        self._held: list[Any] = []
        self._cuts = 0
        self._sent = self._arrived = 0
        self._lost: range | None = None  # messages that never arrive

    def send(self, message: Any) -> None:
        """Put one message on the way."""
        clock = self._clock
        self._sent += 1
        self._free_at = max(self._free_at, clock.now + clock.about(0.002))
        clock.after(self._free_at - clock.now, self._arrive, message, self._sent)
        if self._repeat_chance and clock.rng.random() < self._repeat_chance:
            clock.after(self._free_at - clock.now + clock.about(self._repeat_s), self._arrive, message, self._sent)

    def _arrive(self, message: Any, number: int) -> None:
        if self._cuts:
            self._held.append((message, number))
            return
        self._arrived = max(self._arrived, number)
        if self._lost is None or number not in self._lost:
            self._deliver(message)

    def lose(self, rng: random.Random) -> None:
        """Its sender is gone: of what is on its way, the end is lost."""
        self._lost = range(rng.randint(self._arrived, self._sent) + 1, self._sent + 1)

    def sever(self) -> None:
        """Nothing gets through until it is healed as often."""
        self._cuts += 1

    def heal(self) -> None:
        """What was held arrives now, unless it is severed in another way too."""
        self._cuts -= 1
        if self._cuts == 0:
            held, self._held = self._held, []
            for message, number in held:
                self._arrive(message, number)


@dataclass(frozen=True)
class Content:
    """What a snapshot's bytes are: the state of a rank after a step. Training is deterministic, so equal ones are equal bits."""

    rank: int
    generation: int


@dataclass
class Snapshot:
    """A complete snapshot in some slot, and the membership under which it was written there."""

    content: Content
    version: int
    rotten: bool = False  # its bytes do not match their checksum any more
    torn: bool = False  # its copy never ended, though somebody has sealed it


@dataclass
class FakeSlots:
    """Stands for snapshot.slots.Slots under the real ReplicaStore: memory without bytes."""

    slot_bytes: int
    count: int
    headers: list[Header | None] = field(default_factory=list)
    snapshots: list[Snapshot | None] = field(default_factory=list)

    @classmethod
    def create(cls, slot_bytes: int, count: int) -> FakeSlots:
        """As Slots.create."""
        return cls(slot_bytes, count, [None] * count, [None] * count)

    def write_header(self, slot: int, header: Header) -> None:
        """As Slots.write_header."""
        self.headers[slot] = header

    def invalidate(self, slot: int) -> None:
        """As Slots.invalidate. The bytes are about to be overwritten."""
        self.headers[slot] = None
        self.snapshots[slot] = None

    def close(self) -> None:
        """As Slots.close."""


class Rendezvous:
    """Collectives: complete when every rank of the group has come, unless the membership was aborted first."""

    def __init__(self, clock: Clock, check: Callable[[tuple[Any, ...], dict[int, int]], None], network: Any) -> None:
        self._clock = clock
        self._check = check
        self._network = network
        self._held: list[tuple[tuple[Any, ...], dict[int, tuple[int, Node, Callable[[], None]]]]] = []
        self._open: dict[tuple[Any, ...], dict[int, tuple[int, Node, Callable[[], None]]]] = {}
        self.aborted = 0  # memberships up to this one have been aborted by somebody

    def enter(self, key: tuple[Any, ...], group: frozenset[int], rank: int, state: int, node: Node, then: Callable[[], None]) -> None:
        """Rank `rank`, whose live generation is `state`, enters. key[0] is the membership's version."""
        if key[0] <= self.aborted:
            return
        present = self._open.setdefault(key, {})
        present[rank] = (state, node, then)
        if len(present) == len(group):
            del self._open[key]
            self._complete(key, present)

    def _complete(self, key: tuple[Any, ...], present: dict[int, tuple[int, Node, Callable[[], None]]]) -> None:
        if key[0] <= self.aborted:
            return
        if not self._network.whole([node.name for _, node, _ in present.values()]):
            self._held.append((key, present))
            return
        self._check(key, {r: s for r, (s, _, _) in present.items()})
        for _, there, go in present.values():
            there.after(self._clock.about(0.003), go)

    def reachable_again(self) -> None:
        """What could not complete, since its ranks did not reach each other, does now."""
        held, self._held = self._held, []
        for key, present in held:
            self._complete(key, present)

    def abort(self, version: int) -> None:
        """Some rank has closed its communicators of this membership: what is not complete never will be."""
        if version > self.aborted:
            self.aborted = version
            self._open = {k: v for k, v in self._open.items() if k[0] > version}
