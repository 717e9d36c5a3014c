"""topology/grid.py: where a rank stands, derived from sizes alone, agrees with Megatron."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.hotswap.errors import UsageError
from megatron.hotswap.topology.grid import Grid

size = st.integers(1, 5)
grids = st.builds(lambda t, c, d, p: Grid(t * c * d * p, t, p, c), size, size, size, size)


@settings(deadline=None)
@given(grids)
def test_rank_at_is_the_inverse_of_coordinates(grid):
    assert [grid.rank_at(*grid.coordinates(r)) for r in range(grid.world_size)] == list(range(grid.world_size))


@settings(deadline=None)
@given(grids)
def test_the_ring_is_the_data_parallel_group_without_the_rank_in_order_after_it(grid):
    for rank in range(grid.world_size):
        ring = grid.data_ring(rank)
        group = [rank, *ring]
        assert len(set(group)) == grid.data
        assert {grid.coordinates(r)[:2] + grid.coordinates(r)[3:] for r in group} == {
            grid.coordinates(rank)[:2] + grid.coordinates(rank)[3:]
        }
        assert not ring or grid.coordinates(ring[0])[2] == (grid.coordinates(rank)[2] + 1) % grid.data


@settings(max_examples=25, deadline=None)
@given(grids)
def test_groups_are_those_of_megatron(grid):
    """With Megatron's default order; a difference would put replicas and samples on the wrong ranks."""
    from megatron.core.parallel_state import RankGenerator

    theirs = RankGenerator(tp=grid.tensor, ep=1, dp=grid.data, pp=grid.pipeline, cp=grid.context, order="tp-cp-ep-dp-pp")
    for axis, place in (("tp", 0), ("cp", 1), ("dp", 2), ("pp", 3)):
        ours = {}
        for rank in range(grid.world_size):
            rest = list(grid.coordinates(rank))
            del rest[place]
            ours.setdefault(tuple(rest), []).append(rank)
        assert sorted(ours.values()) == sorted(theirs.get_ranks(axis))


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((8, 3), "8 is not a multiple of 3 x 1 x 1 = 3"),
        ((4, 0), "tensor must be at least 1, got 0"),
        ((0,), "world_size must be at least 1"),
    ],
)
def test_impossible_sizes_are_refused_in_words(sizes, says):
    with pytest.raises(UsageError, match=says):
        Grid(*sizes)


def test_a_rank_outside_is_refused():
    with pytest.raises(UsageError, match=r"0\.\.3, got 4"):
        Grid(4).coordinates(4)
