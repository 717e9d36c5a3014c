"""Which rank's agent holds whose replica. Pure.

A holder must not share a failure domain (here: the node) with the rank it protects (guarantee 5). Within that rule the next rank
of the data-parallel ring is preferred, since it trains the same shard of the model and so has the same layout, and the load is
spread: where several nodes qualify, the one that holds least so far is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import UsageError
from ..topology.grid import Grid


def place(grid: Grid, node_of: Sequence[str]) -> tuple[int, ...]:
    """For each rank the rank whose agent holds its replica.

    Args:
        grid: the sizes; `node_of` has one node name for each of its ranks.

    Raises:
        UsageError: there is only one node, so no replica could survive its loss.
    """
    if len(node_of) != grid.world_size:
        raise UsageError(f"placement needs a node for each of {grid.world_size} ranks, got {len(node_of)}")
    if len(set(node_of)) < 2:
        raise UsageError(
            f"replicas need at least two nodes, since a rank and its holder must not fail together: all {grid.world_size} ranks "
            f"are on node {node_of[0]!r}; start the job on two nodes or more, or train without --hot-swap"
        )
    load = dict.fromkeys(node_of, 0)
    holders = []
    for rank in range(grid.world_size):
        holder = _choose(grid.data_ring(rank), rank, node_of, load)
        if holder is None:  # the ring does not leave the node (or the data-parallel size is 1): any rank elsewhere
            after = [(rank + i) % grid.world_size for i in range(1, grid.world_size)]
            holder = _choose(after, rank, node_of, load)
        assert holder is not None, "two nodes exist, so some rank is elsewhere"
        load[node_of[holder]] += 1
        holders.append(holder)
    return tuple(holders)


def _choose(candidates: Sequence[int], rank: int, node_of: Sequence[str], load: Mapping[str, int]) -> int | None:
    """The candidate on another node whose node holds least; the earlier one wins a tie."""
    elsewhere = [c for c in candidates if node_of[c] != node_of[rank]]
    return min(elsewhere, key=lambda c: load[node_of[c]], default=None)


def fatal_nodes(holders: Sequence[int], node_of: Sequence[str]) -> tuple[str, ...]:
    """Nodes whose loss *alone* would take a snapshot and its only replica. Empty by construction; shown at start."""
    return tuple(sorted({node_of[r] for r, h in enumerate(holders) if node_of[r] == node_of[h]}))
