"""Which ranks' agents hold whose replicas. Pure.

Rules, in this order:

1. A holder is in another failure domain than the rank it protects (guarantee 5), and a rank's holders are on different nodes. A
   domain is a node, or something larger that fails as one, such as all nodes behind one switch.
2. Every rank's agent holds as many replicas as every other: with R replicas, R of them. So host memory is the same everywhere.
3. A rank's holder is taken from its data-parallel ring, next ones first: they train the same shard of the model, so that one
   layout fits both.

Rings are rotated: where a turn by s places brings every member of a ring into another domain, member i is held by member i + s.
What is left (rings that do not leave a domain, data-parallel size 1) is put in one circle, domain by domain and node by node, and
turned by the size m of the largest domain. No domain has more than m members, so all of them leave theirs; in turning on by the
size of the largest node, the next replica comes to another node. This needs 2m + (R - 1)k places (k ranks on the largest node),
which with nodes as domains is no more than R + 1 nodes. Only where a domain is larger than that, no even placement may exist;
then each rank takes the nodes that hold least.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..topology.grid import Grid

Holders = tuple[tuple[int, ...], ...]


def place(grid: Grid, node_of: Sequence[str], replicas: int = 1, domain_of: Sequence[str] | None = None) -> Holders:
    """For each rank the ranks whose agents hold its replicas, `replicas` of them.

    Args:
        grid: the sizes; `node_of` and `domain_of` have one name for each of its ranks.
        replicas: R, at least 1.
        domain_of: the failure domain of each rank's node; None: the node itself.

    Raises:
        UsageError: there are too few nodes or domains.
    """
    domains = list(domain_of or node_of)
    _require_enough(grid, node_of, replicas, domains)
    holders: dict[int, tuple[int, ...]] = {}
    rest: list[int] = []
    for ring in _rings(grid):
        turned = _rotate(ring, node_of, replicas, domains)
        if turned is None:
            rest += ring
        else:
            holders.update(turned)
    if rest:
        circle = _turn(rest, node_of, replicas, domains)
        if circle is None:  # alone they are too many in one domain; together with all others they may not be
            holders, circle = {}, _turn(list(range(grid.world_size)), node_of, replicas, domains)
        if circle is None:
            circle = _least_loaded(node_of, replicas, domains)
        holders.update(circle)
    return tuple(holders[rank] for rank in range(grid.world_size))


def _require_enough(grid: Grid, node_of: Sequence[str], replicas: int, domains: Sequence[str]) -> None:
    if replicas < 1:
        raise UsageError(f"--hot-swap-replicas must be at least 1, got {replicas}; train without --hot-swap if no replica is wanted")
    if len(node_of) != grid.world_size or len(domains) != grid.world_size:
        raise UsageError(f"placement needs a node for each of {grid.world_size} ranks, got {min(len(node_of), len(domains))}")
    nodes = len(set(node_of))
    if nodes < 2:
        raise UsageError(
            f"replicas need at least two nodes, since a rank and its holder must not fail together: all {grid.world_size} ranks "
            f"are on node {node_of[0]!r}; start the job on two nodes or more, or train without --hot-swap"
        )
    if nodes < replicas + 1:
        raise UsageError(
            f"{replicas} replicas of each rank need {replicas + 1} nodes, since no two copies may fail together: there are {nodes}; "
            "start the job on more nodes or lower --hot-swap-replicas"
        )
    domains_of: dict[str, set[str]] = {}
    for node, domain in zip(node_of, domains, strict=True):
        domains_of.setdefault(node, set()).add(domain)
    only = Counter(domain for (domain, *others) in domains_of.values() if not others)  # nodes that are in this one alone
    for domain in sorted(set(domains)):
        if (count := nodes - only[domain]) < replicas:
            raise UsageError(
                f"{replicas} replicas of the ranks in failure domain {domain!r} need {replicas} nodes outside it: there are {count}; "
                "spread the nodes over more domains, lower --hot-swap-replicas, or take nodes as domains "
                "(--hot-swap-failure-domain node)"
            )


def _rings(grid: Grid) -> list[list[int]]:
    """The data-parallel rings: every rank is in one."""
    seen: set[int] = set()
    rings = []
    for rank in range(grid.world_size):
        if rank not in seen:
            rings.append([rank, *grid.data_ring(rank)])
            seen.update(rings[-1])
    return rings


def _rotate(ring: Sequence[int], node_of: Sequence[str], replicas: int, domains: Sequence[str]) -> dict[int, tuple[int, ...]] | None:
    """Each member held by those s1, s2, … places after it, for the first turns that keep rule 1 for every member."""
    size, turns = len(ring), list[int]()
    for s in range(1, size):
        leaves = all(domains[ring[i]] != domains[ring[(i + s) % size]] for i in range(size))
        if leaves and all(node_of[ring[(i + s) % size]] != node_of[ring[(i + t) % size]] for t in turns for i in range(size)):
            turns.append(s)
            if len(turns) == replicas:
                return {rank: tuple(ring[(i + t) % size] for t in turns) for i, rank in enumerate(ring)}
    return None


def _turn(ranks: Sequence[int], node_of: Sequence[str], replicas: int, domains: Sequence[str]) -> dict[int, tuple[int, ...]] | None:
    """The circle of the module docstring; None where a domain is too large for it."""
    first: dict[str, int] = {}
    for i, rank in enumerate(ranks):
        first.setdefault(domains[rank], i)
        first.setdefault(node_of[rank], i)
    circle = sorted(ranks, key=lambda r: (first[domains[r]], first[node_of[r]]))  # stable: within a node in order
    largest_domain = max(Counter(domains[r] for r in ranks).values())
    largest_node = max(Counter(node_of[r] for r in ranks).values())
    size = len(circle)
    if 2 * largest_domain + (replicas - 1) * largest_node > size:
        return None
    turns = [largest_domain + j * largest_node for j in range(replicas)]
    return {rank: tuple(circle[(i + t) % size] for t in turns) for i, rank in enumerate(circle)}


def _least_loaded(node_of: Sequence[str], replicas: int, domains: Sequence[str]) -> dict[int, tuple[int, ...]]:
    """Each rank on the nodes outside its domain that hold least; on a node, on the agents of its ranks in turn."""
    members: dict[str, list[int]] = {}
    for rank, node in enumerate(node_of):
        members.setdefault(node, []).append(rank)
    domain_of_node = {node: domains[ranks[0]] for node, ranks in members.items()}
    load = dict.fromkeys(members, 0)
    outside = Counter(domains)
    result = {}
    # Those with the smallest choice first: the ranks of the largest domain.
    for rank in sorted(range(len(node_of)), key=lambda r: -outside[domains[r]]):
        choices = sorted((n for n in members if domain_of_node[n] != domains[rank]), key=lambda n: load[n] / len(members[n]))[:replicas]
        result[rank] = tuple(members[n][load[n] % len(members[n])] for n in choices)
        for node in choices:
            load[node] += 1
    return result


def keeps_rules(holders: Holders, node_of: Sequence[str], domain_of: Sequence[str]) -> bool:
    """Whether a placement is still right after ranks have moved to other nodes. Then replicas need not move."""
    for rank, held_by in enumerate(holders):
        if domain_of[rank] in {domain_of[h] for h in held_by} or len({node_of[h] for h in held_by}) < len(held_by):
            return False
    return True


@dataclass(frozen=True)
class Survival:
    """What losses at one moment leave a copy of everything."""

    nodes: int  # any so many nodes at once
    fatal_sets: int  # of nodes + 1 nodes: how many sets would take the last copy of something
    sets: int  # of how many such sets there are
    domains: int  # any so many failure domains at once

    def in_words(self) -> str:
        """For the start-up summary."""
        spared = "any node may be lost" if self.nodes == 1 else f"any {self.nodes} nodes may be lost at one moment"
        sets = "pairs of nodes" if self.nodes == 1 else f"sets of {self.nodes + 1} nodes"
        return f"{spared}; {self.fatal_sets} of {self.sets} {sets} lost at one moment would be fatal"


def survival(holders: Holders, node_of: Sequence[str], domain_of: Sequence[str]) -> Survival:
    """Compute it. A set of nodes is fatal exactly if it has a rank's own node and all its holders' nodes."""
    copies = {frozenset({node_of[r], *(node_of[h] for h in held_by)}) for r, held_by in enumerate(holders)}
    spread = {frozenset({domain_of[r], *(domain_of[h] for h in held_by)}) for r, held_by in enumerate(holders)}
    smallest = min(map(len, copies))
    fatal = sum(len(c) == smallest for c in copies)
    return Survival(smallest - 1, fatal, math.comb(len(set(node_of)), smallest), min(map(len, spread)) - 1)
