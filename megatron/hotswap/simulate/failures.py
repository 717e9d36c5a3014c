"""When which nodes fail, and how long each is then repaired. Pure: the random source is handed in.

The trace does not depend on what a job makes of it: events come at a constant rate and name nodes of the allocation; a node that is
down already ignores its event. So each node that is up fails at the rate 1 / node_mtbf_s, whatever the others do, and all schemes
with the same seed meet the same failures.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from .inputs import Inputs


class Chance(Protocol):
    """A random source such as random.Random(seed): the only call is the one whose sequence Python promises to keep."""

    def random(self) -> float:
        """Uniform in [0, 1)."""


class Failure(NamedTuple):
    """Nodes that fail at one moment, and how long each of them takes to be repaired."""

    at_s: float
    nodes: tuple[int, ...]
    repair_s: tuple[float, ...]


class Trace:
    """The failures of one seed, drawn as they are asked for and kept, since several schemes read them."""

    def __init__(self, inputs: Inputs, chance: Chance) -> None:
        self._inputs = inputs
        self._chance = chance
        self._drawn: list[Failure] = []
        self._now = 0.0

    def __getitem__(self, index: int) -> Failure | None:
        """The failure of that number; None where nodes never fail."""
        if self._inputs.event_rate == 0.0:
            return None
        while len(self._drawn) <= index:
            self._drawn.append(self._draw())
        return self._drawn[index]

    def _exponential(self, mean: float) -> float:
        return -mean * math.log1p(-self._chance.random())

    def _draw(self) -> Failure:
        inputs = self._inputs
        self._now += self._exponential(1.0 / inputs.event_rate)
        grouped = self._chance.random() < inputs.group_share
        node = int(self._chance.random() * inputs.allocated)
        nodes: tuple[int, ...] = (node,)
        if grouped:
            first = node - node % inputs.group_nodes
            nodes = tuple(range(first, min(first + inputs.group_nodes, inputs.allocated)))
        repairs = tuple(inputs.repair_s if inputs.repair_fixed else self._exponential(inputs.repair_s) for _ in nodes)
        return Failure(self._now, nodes, repairs)
