"""Which rank's agent holds whose replica. Pure.

A holder must not share a failure domain (here: the node) with the rank it protects (guarantee 5). Within that rule the next rank
of the data-parallel ring is preferred, since it trains the same shard of the model and so has the same layout, and the load is
spread: where several nodes qualify, the one that holds least so far is taken, and afterwards replicas move along chains of nodes
from the fullest to the emptiest until no chain is left. So the fullest node holds as little as the rule allows.

How little? With k ranks on every node, in order, a node holds at most 2k replicas. Proof: "the next rank of the ring on another
node" is among the choices, so the best choice is no worse. By it a node holds, of each pipeline stage that it shares, at most the
ranks of the one node before it in that stage's rings, k at most; and rings that leave a node belong to two stages at most: the
one that ends on it and the one that begins there. It is reached: 3 nodes of 4, context 2, pipeline 2, where the middle node is
all that both other nodes' rings have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

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
    candidates = [_candidates(grid, rank, node_of) for rank in range(grid.world_size)]
    for choices in candidates:
        holder = min(choices, key=lambda c: load[node_of[c]])  # the earlier one wins a tie
        load[node_of[holder]] += 1
        holders.append(holder)
    while _even_out(holders, candidates, node_of, load):
        pass
    return tuple(holders)


def _candidates(grid: Grid, rank: int, node_of: Sequence[str]) -> list[int]:
    """Ranks that may hold: the ring's, and where the ring does not leave the node (or has one rank), any on another node."""
    ring = [c for c in grid.data_ring(rank) if node_of[c] != node_of[rank]]
    after = ((rank + i) % grid.world_size for i in range(1, grid.world_size))
    return ring or [c for c in after if node_of[c] != node_of[rank]]


def _even_out(holders: list[int], candidates: Sequence[Sequence[int]], node_of: Sequence[str], load: dict[str, int]) -> bool:
    """Move one replica from the fullest node that can give one, over a chain of nodes, to one that holds at least two less."""
    ranks_of: dict[str, list[int]] = {node: [] for node in load}
    for rank, holder in enumerate(holders):
        ranks_of[node_of[holder]].append(rank)
    for source in sorted(load, key=lambda node: -load[node]):
        came: dict[str, tuple[int, int]] = {}  # node -> (replica that moves to it, its new holder)
        queue = deque([source])
        while queue:
            node = queue.popleft()
            if load[node] <= load[source] - 2:
                load[source] -= 1
                load[node] += 1
                while node != source:
                    rank, holder = came[node]
                    node, holders[rank] = node_of[holders[rank]], holder
                return True
            for rank in ranks_of[node]:
                for holder in candidates[rank]:
                    if node_of[holder] not in came and node_of[holder] != source:
                        came[node_of[holder]] = (rank, holder)
                        queue.append(node_of[holder])
    return False


def fatal_nodes(holders: Sequence[int], node_of: Sequence[str]) -> tuple[str, ...]:
    """Nodes whose loss *alone* would take a snapshot and its only replica. Empty by construction; shown at start."""
    return tuple(sorted({node_of[r] for r, h in enumerate(holders) if node_of[r] == node_of[h]}))
