"""Spares: how often failures find too few, simulated, against the distributions of nodes in repair."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.hotswap.errors import UsageError
from megatron.hotswap.simulate.engine import Outcome, run
from megatron.hotswap.simulate.failures import Trace
from megatron.hotswap.simulate.inputs import Inputs
from megatron.hotswap.simulate.schemes import HOT_SWAP, Scheme, scheme_of
from megatron.hotswap.simulate.study import ratio, spares_needed
from megatron.hotswap.simulate.theory import nodes_in_repair, wait_probability


def outcomes(inputs: Inputs, scheme: Scheme, seeds: int) -> list[Outcome]:
    return [run(inputs, scheme, Trace(inputs, random.Random(seed))) for seed in range(seeds)]


@pytest.mark.parametrize("fixed", [False, True], ids=["exponential", "fixed"])
@pytest.mark.parametrize("spares", [1, 3])
def test_failures_wait_as_often_as_the_binomial_says(fixed: bool, spares: int) -> None:
    """The same for any law of repair times: each node is up or down by itself."""
    inputs = Inputs(
        nodes=20, spares=spares, steps=4_000_000, step_s=1.0, node_mtbf_s=1e6, repair_s=1e5, repair_fixed=fixed, swap_s=1.0, save_s=0.0
    )
    found = outcomes(inputs, scheme_of(inputs, HOT_SWAP), 40)
    waits = ratio([o.waits for o in found], [o.interruptions for o in found])
    assert waits is not None and waits.half is not None
    assert abs(waits.mean - wait_probability(inputs)) < 2 * waits.half
    assert 0.02 < wait_probability(inputs) < 0.9 and waits.half < 0.15 * waits.mean + 0.02


def test_waiting_by_hand() -> None:
    """One node and one spare, each down half of the time: of the failures of who trains, those with the other one down wait."""
    inputs = Inputs(nodes=1, spares=1, node_mtbf_s=100.0, repair_s=100.0)
    assert nodes_in_repair(inputs, 2) == pytest.approx([0.25, 0.5, 0.25])
    assert wait_probability(inputs) == pytest.approx(0.5 / 0.75)


@pytest.mark.parametrize("fixed", [False, True], ids=["exponential", "fixed"])
@pytest.mark.parametrize(("share", "size", "spares"), [(0.5, 2, 3), (0.1, 4, 2)])
def test_groups_wait_about_as_often_as_the_queue_says(fixed: bool, share: float, size: int, spares: int) -> None:
    """About: nodes that are down already are in the groups of the queue, and not in those of the simulation."""
    inputs = Inputs(nodes=40, spares=spares, steps=4_000_000, step_s=1.0, node_mtbf_s=4e6, repair_s=1e5, repair_fixed=fixed)
    inputs = replace(inputs, group_share=share, group_nodes=size, save_s=0.0, replicas=3)
    found = outcomes(inputs, scheme_of(inputs, HOT_SWAP), 40)
    waits = ratio([o.waits for o in found], [o.interruptions for o in found])
    assert waits is not None and waits.mean == pytest.approx(wait_probability(inputs), rel=0.25)


def repair_counts(inputs: Inputs, samples: int) -> list[int]:
    """Nodes in repair at moments far apart, straight from the trace; a node that is down cannot fail."""
    trace, counts, back, k = Trace(inputs, random.Random(5)), [], {}, 0
    for sample in range(1, samples + 1):
        now = sample * 8 * inputs.repair_s
        while (failure := trace[k]) is not None and failure.at_s <= now:
            for node, repair in zip(failure.nodes, failure.repair_s, strict=True):
                if back.get(node, 0.0) <= failure.at_s:
                    back[node] = failure.at_s + repair
            k += 1
        counts.append(sum(until > now for until in back.values()))
    return counts


@pytest.mark.parametrize("fixed", [False, True], ids=["exponential", "fixed"])
@pytest.mark.parametrize(("share", "size"), [(0.0, 1), (0.3, 4), (1.0, 2)])
def test_nodes_in_repair_are_distributed_as_the_queue_says(fixed: bool, share: float, size: int) -> None:
    inputs = Inputs(nodes=400, spares=0, node_mtbf_s=2e7, repair_s=1e5, repair_fixed=fixed, group_share=share, group_nodes=size)
    counts = repair_counts(inputs, 1500)
    pmf = nodes_in_repair(inputs, 400)
    assert math.fsum(pmf) == pytest.approx(1.0, abs=1e-9)
    for n in range(4):
        seen = sum(c > n for c in counts) / len(counts)
        tail = 1.0 - math.fsum(pmf[: n + 1])
        assert abs(seen - tail) < 4.5 * math.sqrt(tail * (1 - tail) / len(counts)) + 0.005, (n, seen, tail)


def test_many_nodes_are_a_poisson_variable() -> None:
    """M/G/infinity is the limit of many nodes that seldom fail."""
    inputs = Inputs(nodes=100_000, spares=0, node_mtbf_s=1e9, repair_s=5e4)
    load = 100_000 * 5e4 / 1e9
    expected = [math.exp(-load) * load**k / math.factorial(k) for k in range(20)]
    assert nodes_in_repair(inputs, 19) == pytest.approx(expected, abs=1e-4)
    groups = replace(inputs, group_share=1e-12, group_nodes=2)
    assert nodes_in_repair(groups, 19) == pytest.approx(expected, abs=1e-4)


def test_a_large_load_does_not_underflow() -> None:
    inputs = Inputs(nodes=7_000, spares=0, node_mtbf_s=1e6, repair_s=1e5, group_share=1e-9, group_nodes=2)
    pmf = nodes_in_repair(inputs, 900)
    mean = sum(n * p for n, p in enumerate(pmf))
    assert math.fsum(pmf) == pytest.approx(1.0, abs=1e-6) and mean == pytest.approx(7_000 / 11, rel=1e-4)


SHARES = st.sampled_from([0.0, 0.1, 0.7, 1.0])


@given(st.integers(1, 200), st.integers(0, 10), st.floats(1e5, 1e9), st.floats(1, 1e6), SHARES, st.integers(1, 6))
@settings(deadline=None, max_examples=60)
def test_more_spares_help_and_longer_repairs_hurt(nodes: int, spares: int, mtbf: float, repair: float, share: float, size: int) -> None:
    assume(size <= nodes and repair < mtbf)
    inputs = Inputs(nodes=nodes, spares=spares, node_mtbf_s=mtbf, repair_s=repair, group_share=share, group_nodes=size)
    now = wait_probability(inputs)
    assert 0.0 <= now <= 1.0 + 1e-9
    if share == 0.0 or spares >= size:  # below, a spare takes off single failures only, and the share of those of groups rises
        assert wait_probability(replace(inputs, spares=spares + 1)) <= now + 1e-9
    assert wait_probability(replace(inputs, repair_s=2 * repair)) >= now - 1e-9


@pytest.mark.parametrize("share", [0.0, 0.2])
@pytest.mark.parametrize("at_most", [0.2, 0.01, 1e-4])
def test_the_spares_that_are_proposed_are_the_fewest(share: float, at_most: float) -> None:
    inputs = Inputs(nodes=512, group_share=share, group_nodes=4)
    needed = spares_needed(inputs, at_most)
    assert needed is not None and needed > 0
    assert wait_probability(replace(inputs, spares=needed)) <= at_most < wait_probability(replace(inputs, spares=needed - 1))


def test_where_no_spares_would_do_it_is_said() -> None:
    assert spares_needed(Inputs(nodes=4, node_mtbf_s=10.0, repair_s=1e6), 0.01) is None
    assert spares_needed(Inputs(node_mtbf_s=math.inf), 0.01) == 0
    with pytest.raises(UsageError, match=r"between 0 and 1, got 1\.5"):
        spares_needed(Inputs(), 1.5)
