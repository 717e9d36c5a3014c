"""replication/placement.py: guarantee 5, and replicas spread as evenly as it allows."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.hotswap.errors import UsageError
from megatron.hotswap.replication.placement import fatal_nodes, place
from megatron.hotswap.topology.grid import Grid


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def jobs(draw, nodes_max=10):
    """(grid, node of each rank): ranks on nodes in order, as a launcher lays them."""
    nodes, per_node = draw(st.integers(2, nodes_max)), draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    world = nodes * per_node
    tensor = draw(st.sampled_from(divisors(world)))
    context = draw(st.sampled_from([d for d in divisors(world // tensor) if d <= 3]))
    pipeline = draw(st.sampled_from(divisors(world // tensor // context)))
    return Grid(world, tensor, pipeline, context), [f"node{rank // per_node}" for rank in range(world)]


def ring_elsewhere(grid, rank, node_of):
    return [r for r in grid.data_ring(rank) if node_of[r] != node_of[rank]]


@settings(max_examples=1000, deadline=None)
@given(jobs())
def test_owner_and_holder_never_share_a_node_and_no_node_holds_more_than_twice_its_share(job):
    """Guarantee 5: every rank has a holder, on another node, of its own data-parallel ring where that leaves the node."""
    grid, node_of = job
    holders = place(grid, node_of)
    assert len(holders) == grid.world_size
    for rank, holder in enumerate(holders):
        assert node_of[rank] != node_of[holder]
        ring = ring_elsewhere(grid, rank, node_of)
        assert holder in ring or not ring
    assert fatal_nodes(holders, node_of) == ()
    # The bound that placement.py derives: 2k replicas where every node has k ranks.
    assert max(Counter(node_of[h] for h in holders).values()) <= 2 * (grid.world_size // len(set(node_of)))


@settings(max_examples=200, deadline=None)
@given(jobs())
def test_load_is_within_one_of_even_where_any_node_may_hold(job):
    """Where the ring does not restrict the choice (data-parallel size 1, or a ring that reaches every node)."""
    grid, node_of = job
    nodes = set(node_of)
    if not all(
        {node_of[r] for r in ring_elsewhere(grid, rank, node_of)} in (set(), nodes - {node_of[rank]}) for rank in range(grid.world_size)
    ):
        return
    load = Counter(dict.fromkeys(nodes, 0))
    load.update(node_of[h] for h in place(grid, node_of))
    even = grid.world_size // len(nodes)
    assert even - 1 <= min(load.values()) and max(load.values()) <= even + 1


@settings(max_examples=100, deadline=None)
@given(jobs(nodes_max=6))
def test_the_fullest_node_holds_as_little_as_the_rings_allow(job):
    """Against a maximum matching of ranks to `fullest - 1` places on each node: it must not exist."""
    grid, node_of = job
    nodes = sorted(set(node_of))
    fullest = max(Counter(node_of[h] for h in place(grid, node_of)).values())
    choices = []
    for rank in range(grid.world_size):
        ring = {node_of[r] for r in ring_elsewhere(grid, rank, node_of)}
        choices.append([n for n in nodes if n in (ring or set(nodes) - {node_of[rank]})])
    assert not matches(choices, fullest - 1)


def matches(choices, room):
    """Whether every rank finds a place among its nodes, with `room` places on each (Kuhn's algorithm)."""
    held = {}

    def seat(rank, seen):
        for node in choices[rank]:
            if node in seen:
                continue
            seen.add(node)
            there = held.setdefault(node, [])
            if len(there) < room:
                there.append(rank)
                return True
            for i, other in enumerate(there):
                if seat(other, seen):
                    there[i] = rank
                    return True
        return False

    return all(seat(rank, set()) for rank in range(len(choices)))


@settings(max_examples=50, deadline=None)
@given(jobs(), st.randoms())
def test_holders_stay_when_a_spare_takes_a_nodes_ranks(job, random):
    """A swap must not move other ranks' replicas: the names of nodes do not matter, only which ranks share one."""
    grid, node_of = job
    lost = random.choice(node_of)
    assert place(grid, node_of) == place(grid, ["a-spare" if n == lost else n for n in node_of])


def test_one_node_is_refused_in_words():
    with pytest.raises(UsageError, match=r"at least two nodes.*all 4 ranks are on node 'node0'.*start the job on two nodes"):
        place(Grid(4), ["node0"] * 4)


def test_a_node_for_each_rank_is_needed():
    with pytest.raises(UsageError, match="a node for each of 4 ranks, got 3"):
        place(Grid(4), ["a", "b", "a"])


def test_fatal_nodes_names_what_would_be_fatal():
    assert fatal_nodes((1, 0, 0), ["a", "a", "b"]) == ("a",)
