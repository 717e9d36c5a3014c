"""replication/placement.py: guarantee 5, and replicas spread evenly."""

import itertools
from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.hotswap.errors import UsageError
from megatron.hotswap.replication.placement import keeps_rules, place, survival
from megatron.hotswap.topology.grid import Grid


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def jobs(draw, nodes_max=10):
    """(grid, node of each rank, replicas): ranks on nodes in order, as a launcher lays them."""
    nodes, per_node = draw(st.integers(2, nodes_max)), draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    world = nodes * per_node
    tensor = draw(st.sampled_from(divisors(world)))
    context = draw(st.sampled_from([d for d in divisors(world // tensor) if d <= 3]))
    pipeline = draw(st.sampled_from(divisors(world // tensor // context)))
    replicas = draw(st.integers(1, min(3, nodes - 1)))
    return Grid(world, tensor, pipeline, context), [f"node{rank // per_node}" for rank in range(world)], replicas


def check_rules(holders, node_of, domain_of, replicas):
    """Guarantee 5, by its words."""
    for rank, held_by in enumerate(holders):
        assert len(held_by) == replicas
        assert domain_of[rank] not in {domain_of[h] for h in held_by}
        assert len({node_of[rank], *(node_of[h] for h in held_by)}) == replicas + 1


@settings(max_examples=2000, deadline=None)
@given(jobs())
def test_no_two_copies_share_a_node_and_every_rank_holds_equally_many(job):
    """Guarantee 5, and rule 2: exactly R replicas with each agent's rank, whatever the grid."""
    grid, node_of, replicas = job
    holders = place(grid, node_of, replicas)
    assert len(holders) == grid.world_size
    check_rules(holders, node_of, node_of, replicas)
    assert Counter(h for held_by in holders for h in held_by) == Counter(dict.fromkeys(range(grid.world_size), replicas))
    assert keeps_rules(holders, node_of, node_of)
    assert survival(holders, node_of, node_of).nodes == replicas


@settings(max_examples=2000, deadline=None)
@given(jobs(), st.data())
def test_no_copy_shares_a_failure_domain_with_its_rank(job, data):
    """Guarantee 5 with switches as domains, of any sizes; even wherever no domain has more than its share."""
    grid, node_of, replicas = job
    nodes = list(dict.fromkeys(node_of))
    switch = {n: f"switch{data.draw(st.integers(0, 4))}" for n in nodes}
    domain_of = [switch[n] for n in node_of]
    outside = [sum(switch[n] != s for n in nodes) for s in set(switch.values())]
    assume(min(outside) >= replicas)
    holders = place(grid, node_of, replicas, domain_of)
    check_rules(holders, node_of, domain_of, replicas)
    assert survival(holders, node_of, domain_of).domains >= 1
    per_node = len(node_of) // len(nodes)
    if 2 * max(Counter(domain_of).values()) + (replicas - 1) * per_node <= grid.world_size:
        assert set(Counter(h for held_by in holders for h in held_by).values()) == {replicas}


@settings(max_examples=300, deadline=None)
@given(jobs())
def test_holders_are_in_the_data_parallel_ring_where_it_reaches_all_nodes_alike(job):
    """Rule 3."""
    grid, node_of, replicas = job
    holders = place(grid, node_of, replicas)
    for rank in range(grid.world_size):
        ring = [rank, *grid.data_ring(rank)]
        on = Counter(node_of[r] for r in ring)
        in_order = [node for node, _ in itertools.groupby(node_of[r] for r in sorted(ring))]
        if len(on) > replicas and len(set(on.values())) == 1 and len(in_order) == len(on):
            assert set(holders[rank]) <= set(ring)


@settings(max_examples=50, deadline=None)
@given(jobs(), st.randoms())
def test_holders_stay_when_a_spare_takes_a_nodes_ranks(job, random):
    """A swap must not move other ranks' replicas: the names of nodes do not matter, only which ranks share one."""
    grid, node_of, replicas = job
    lost = random.choice(node_of)
    after = ["a-spare" if n == lost else n for n in node_of]
    assert place(grid, node_of, replicas) == place(grid, after, replicas)
    assert keeps_rules(place(grid, node_of, replicas), after, after)


@settings(max_examples=200, deadline=None)
@given(jobs(nodes_max=5))
def test_survival_is_what_losing_every_set_of_nodes_shows(job):
    grid, node_of, replicas = job
    holders = place(grid, node_of, replicas)
    nodes = sorted(set(node_of))
    found = survival(holders, node_of, node_of)

    def fatal(lost):
        return any(node_of[r] in lost and all(node_of[h] in lost for h in held_by) for r, held_by in enumerate(holders))

    for count in range(1, found.nodes + 1):
        assert not any(fatal(lost) for lost in itertools.combinations(nodes, count))
    sets = list(itertools.combinations(nodes, found.nodes + 1))
    assert (found.fatal_sets, found.sets) == (sum(map(fatal, sets)), len(sets))


def test_a_grid_of_16_384_ranks_is_placed_in_seconds():
    """It is done at start, and never in a recovery unless a spare is in another domain."""
    grid = Grid(16384, tensor=8, pipeline=16)
    node_of = [f"n{r // 4}" for r in range(16384)]
    check_rules(place(grid, node_of, 2), node_of, node_of, 2)


def test_a_broken_rule_is_seen():
    assert not keeps_rules(((1,), (0,), (0,)), ["a", "a", "b"], ["a", "a", "b"])
    assert not keeps_rules(((1, 2), (0, 2), (0, 1)), ["a", "b", "b"], ["a", "b", "b"])
    assert survival(((1,), (0,), (0,)), ["a", "a", "b"], ["a", "a", "b"]).nodes == 0


def test_one_node_is_refused_in_words():
    with pytest.raises(UsageError, match=r"at least two nodes.*all 4 ranks are on node 'node0'.*start the job on two nodes"):
        place(Grid(4), ["node0"] * 4)


def test_too_few_nodes_for_the_replicas_are_refused_in_words():
    with pytest.raises(UsageError, match=r"2 replicas of each rank need 3 nodes.*there are 2.*--hot-swap-replicas"):
        place(Grid(4), ["a", "a", "b", "b"], replicas=2)


def test_too_few_domains_are_refused_in_words():
    with pytest.raises(UsageError, match=r"failure domain 's0' need 1 nodes outside it: there are 0"):
        place(Grid(4), ["a", "a", "b", "b"], 1, ["s0"] * 4)


def test_a_node_for_each_rank_is_needed():
    with pytest.raises(UsageError, match="a node for each of 4 ranks, got 3"):
        place(Grid(4), ["a", "b", "a"])
