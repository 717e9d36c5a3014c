"""Who trains: lost positions are filled from spares, or the job goes on without them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from ..replication.placement import Holders, place
from ..topology.grid import Grid
from .inputs import Inputs


class Pool(Protocol):
    """The nodes of a job, by number."""

    def fail(self, nodes: Iterable[int]) -> list[int]:
        """These nodes, which were up, are down. Returns the positions whose loss interrupts training."""

    def repaired(self, node: int) -> None:
        """It is up again."""

    def staff(self) -> float:
        """Bring in who can be; returns the share of the job's speed at which it can go on, 0 where it cannot."""

    def could_grow(self) -> bool:
        """Whether staff() would now give a greater share than the last time."""


class SparePool:
    """Every position must be filled. A repaired node becomes a spare."""

    def __init__(self, inputs: Inputs) -> None:
        self._position = {node: node for node in range(inputs.nodes)}
        self._spares = deque(range(inputs.nodes, inputs.allocated))
        self._vacant: list[int] = []

    def fail(self, nodes: Iterable[int]) -> list[int]:
        lost = []
        for node in nodes:
            position = self._position.pop(node, None)
            if position is None:
                self._spares.remove(node)
            else:
                lost.append(position)
        self._vacant += lost
        return lost

    def repaired(self, node: int) -> None:
        self._spares.append(node)

    def staff(self) -> float:
        while self._vacant and self._spares:
            self._position[self._spares.popleft()] = self._vacant.pop()
        return 0.0 if self._vacant else 1.0

    def could_grow(self) -> bool:
        return False


class ShrinkingPool:
    """A data-parallel replica of the model trains while all of its nodes are up; the others go on without it. No spares."""

    def __init__(self, inputs: Inputs) -> None:
        self._size = inputs.replica_nodes
        self._nodes = inputs.nodes
        self._missing = [0] * (inputs.nodes // inputs.replica_nodes)
        self._training = [True] * len(self._missing)

    def fail(self, nodes: Iterable[int]) -> list[int]:
        lost = []
        for node in nodes:
            if node < self._nodes:
                replica = node // self._size
                self._missing[replica] += 1
                if self._training[replica]:
                    lost.append(node)
        for node in lost:
            self._training[node // self._size] = False
        return lost

    def repaired(self, node: int) -> None:
        if node < self._nodes:
            self._missing[node // self._size] -= 1

    def staff(self) -> float:
        self._training = [missing == 0 for missing in self._missing]
        return sum(self._training) / len(self._training)

    def could_grow(self) -> bool:
        return any(missing == 0 and not training for missing, training in zip(self._missing, self._training, strict=True))


class Copies:
    """Where the copies of each position's state are, by the placement that a job would use (replication/placement.py), one rank a node.

    Positions keep their holders through swaps, as a spare takes the position with what it holds.
    """

    def __init__(self, inputs: Inputs) -> None:
        names = [f"node{n}" for n in range(inputs.nodes)]
        groups = [f"group{n // inputs.group_nodes}" for n in range(inputs.nodes)]
        domains = groups if inputs.leave_group and inputs.group_nodes > 1 else None
        self._holders: Holders = place(Grid(inputs.nodes, 1, 1, 1), names, inputs.replicas, domains)

    def survive(self, gone: set[int]) -> bool:
        """Whether every lost position has a holder that is not lost."""
        return all(any(holder not in gone for holder in self._holders[position]) for position in gone)
