"""recovery/plan.py: the generation to go back to (guarantees 2 and 3)."""

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.hotswap.recovery.plan import (
    Beginning,
    Choice,
    DurableFolder,
    Holdings,
    Writing,
    choose,
    choose_beginning,
    choose_to_write,
)

ranks_max, newest = 5, 12


@st.composite
def situations(draw):
    """Any holdings at all: 0 to 5 ranks, with what lies in their slots and in their holders' slots."""
    generations = st.frozensets(st.integers(0, newest), max_size=2)
    holdings, replicas = [], {}
    for rank in range(draw(st.integers(1, ranks_max))):
        lost = draw(st.booleans())
        done = None if lost else draw(st.integers(0, newest))
        holdings.append(Holdings(done, draw(st.booleans()) and not lost, frozenset() if lost else draw(generations)))
        replicas[rank] = {g: draw(st.lists(st.sampled_from("abcd"), min_size=1, unique=True)) for g in draw(generations)}
    return holdings, replicas


@st.composite
def protocol_states(draw):
    """What the slots rule permits: all ranks have g - 1 or g + ... around one committed generation; some nodes are lost."""
    committed = draw(st.integers(1, newest))
    ranks = draw(st.integers(2, ranks_max))
    lost = draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - 1))
    holdings, replicas = [], {}
    for rank in range(ranks):
        done = draw(st.sampled_from([committed, committed + 1]))
        own = frozenset({committed, draw(st.sampled_from([committed - 1, committed + 1])) if done > committed else committed - 1})
        held = {committed: ["holder"]}
        if draw(st.booleans()):
            held[done if done > committed else committed - 1] = ["holder"]
        replicas[rank] = held
        holdings.append(Holdings() if rank in lost else Holdings(done, draw(st.booleans()), own))
    return committed, holdings, replicas


def available(rank, holdings, replicas):
    return set(holdings[rank].own) | set(replicas.get(rank, {}))


@settings(max_examples=200, deadline=None)
@given(situations())
def test_the_chosen_generation_is_held_for_every_rank_or_there_is_none(situation):
    """Guarantee 2: one generation for all; words if there is no such generation, and only then."""
    holdings, replicas = situation
    common = set.intersection(*(available(r, holdings, replicas) for r in range(len(holdings))))
    choice = choose(holdings, replicas)
    if isinstance(choice, str):
        assert not common
        assert "no living node has any snapshot of rank" in choice or "no generation is held for every rank" in choice
    else:
        assert choice.generation in common
        assert choice.generation in sorted(common)[-2:]


@settings(max_examples=200, deadline=None)
@given(situations())
def test_fetch_names_exactly_the_ranks_that_need_it_and_agents_that_hold_it(situation):
    holdings, replicas = situation
    choice = choose(holdings, replicas)
    if isinstance(choice, Choice):
        assert choice.fetch.keys() == {r for r, h in enumerate(holdings) if choice.generation not in h.own}
        for rank, agents in choice.fetch.items():
            assert agents == tuple(sorted(replicas[rank][choice.generation]))


@settings(max_examples=200, deadline=None)
@given(protocol_states())
def test_at_most_one_completed_step_is_run_again(state):
    """Guarantee 3: from any state that fence and slots rule permit, never below the newest completed step minus one."""
    _, holdings, replicas = state
    choice = choose(holdings, replicas)
    assert isinstance(choice, Choice)
    done = [h.done for h in holdings if h.done is not None]
    assert choice.generation >= max(done) - 1


@settings(max_examples=200, deadline=None)
@given(protocol_states())
def test_interrupted_work_between_steps_is_done_again_or_said_to_be_skipped(state):
    _, holdings, replicas = state
    choice = choose(holdings, replicas)
    assert isinstance(choice, Choice)
    left_out = [r for r, h in enumerate(holdings) if h.between_steps and h.done == choice.generation]
    assert choice.redo_sections == (not left_out)
    if left_out:
        assert "skipped" in choice.reason


def held(*generations):
    return {g: ["holder"] for g in generations}


def test_all_survivors_at_the_same_step_go_back_to_it():
    choice = choose([Holdings(7, False, frozenset({6, 7})), Holdings()], {1: held(6, 7)})
    assert (choice.generation, dict(choice.fetch), choice.redo_sections) == (7, {1: ("holder",)}, True)


def test_interrupted_while_logging_goes_one_further_back_if_all_can():
    """The step runs again for all, the replaced rank included, and so does the work after it."""
    choice = choose([Holdings(7, True, frozenset({6, 7})), Holdings()], {1: held(6, 7)})
    assert (choice.generation, choice.redo_sections) == (6, True)
    assert "rank(s) [0] were interrupted in the work after step 7" in choice.reason


def test_with_a_snapshot_every_third_step_the_one_before_is_gone_back_to():
    choice = choose([Holdings(6, True, frozenset({3, 6})), Holdings()], {1: held(3, 6)})
    assert (choice.generation, choice.redo_sections) == (3, True)
    choice = choose([Holdings(7, True, frozenset({3, 6})), Holdings()], {1: held(3, 6)})  # the work after step 7 comes again anyway
    assert (choice.generation, choice.redo_sections) == (6, True)


def test_interrupted_while_logging_stays_where_not_all_can_go_back():
    choice = choose([Holdings(7, True, frozenset({6, 7})), Holdings()], {1: held(7)})
    assert (choice.generation, choice.redo_sections) == (7, False)
    assert "skipped" in choice.reason


def test_interrupted_while_logging_does_not_cost_a_second_completed_step():
    """Guarantee 3 comes before the logging: somebody has completed step 8 already."""
    choice = choose([Holdings(7, True, frozenset({6, 7})), Holdings(8, False, frozenset({7, 6})), Holdings()], {2: held(6, 7)})
    assert (choice.generation, choice.redo_sections) == (7, False)


def test_work_after_a_later_step_is_done_again_with_that_step():
    choice = choose([Holdings(8, True, frozenset({7, 8})), Holdings()], {1: held(7)})
    assert (choice.generation, choice.redo_sections) == (7, True)


def test_a_rank_that_nobody_has_is_named():
    assert choose([Holdings(7, False, frozenset({7})), Holdings()], {}) == "no living node has any snapshot of rank(s) [1]"


def test_generations_that_do_not_meet_are_named():
    said = choose([Holdings(7, False, frozenset({6, 7})), Holdings()], {1: held(4, 5)})
    assert said == "no generation is held for every rank; newest by rank: {0: 7, 1: 5}"


# ---- durable generations


@given(
    st.integers(1, 4),
    st.dictionaries(
        st.sampled_from("abcd"), st.dictionaries(st.integers(0, 5), st.frozensets(st.integers(0, 6), max_size=3), max_size=5), max_size=4
    ),
    st.frozensets(st.sampled_from("abcd")),
)
@settings(max_examples=500, deadline=None)
def test_what_is_written_is_the_newest_that_every_rank_has_and_by_who_has_it(ranks, stock, failed):
    own = dict(enumerate("abcd"[:ranks]))
    has = [set().union(*(held.get(rank, ()) for held in stock.values())) for rank in range(ranks)]
    common = set.intersection(*has)
    chosen = choose_to_write(ranks, stock, own, failed)
    if not common:
        assert isinstance(chosen, str) and ("no living node" in chosen or "no generation" in chosen)
        return
    assert isinstance(chosen, Writing) and chosen.generation == max(common) and sorted(chosen.by) == list(range(ranks))
    for rank, who in chosen.by.items():
        holders = {i for i, held in stock.items() if chosen.generation in held.get(rank, ())}
        assert who in holders
        if holders - failed:
            assert who not in failed
            assert who == own[rank] or own[rank] not in holders - failed


def test_replicas_are_written_by_those_who_have_least_to_write():
    stock = {"a": {0: [5], 2: [5], 3: [5]}, "b": {1: [5], 2: [5], 3: [5]}}
    chosen = choose_to_write(4, stock, {0: "a", 1: "b", 2: "c", 3: "d"}, ())
    assert chosen.by == {0: "a", 1: "b", 2: "a", 3: "b"}
    assert "rank(s) [2, 3] are written from replicas" in chosen.reason


SHAPE = {"world-size": 4, "tensor-model-parallel-size": 2}


def folder(generation, run="r", **shape):
    sizes = {**SHAPE, **{name.replace("_", "-"): size for name, size in shape.items()}}
    return DurableFolder(f"folder{generation}{run}", generation, run, tuple(sorted(sizes.items())))


def test_a_job_begins_from_the_newest_generation_that_megatron_has_no_newer_checkpoint_for():
    old, new = folder(30), folder(40)
    assert choose_beginning([old, new], 0, 0, SHAPE) == Beginning(
        (new, old), (), "generation 40 of run r is newer than Megatron's checkpoint"
    )
    assert choose_beginning([old, new], 35, 35, SHAPE).load == (new,)
    assert choose_beginning([old, new], 40, 40, SHAPE) == Beginning((), (), "")
    assert choose_beginning([], 10, 10, SHAPE) == Beginning((), (), "")
    # Megatron would load nothing, and begin anew: what is as new as its checkpoint is as good.
    assert choose_beginning([new], 40, 0, SHAPE).load == (new,)


def test_generations_of_another_course_of_training_are_set_aside():
    """--save is used again for a job that begins anew: once it has a checkpoint of its own, an old generation would look newer."""
    found = [folder(30), folder(80)]
    assert choose_beginning(found, 100, 0, SHAPE).aside == (folder(80), folder(30))
    assert choose_beginning(found, 100, 50, SHAPE).aside == (folder(80),)
    assert choose_beginning(found, 100, 100, SHAPE).aside == ()


def test_another_grid_is_refused_with_the_way_to_it():
    refusal = choose_beginning([folder(40, tensor_model_parallel_size=4)], 30, 30, SHAPE)
    assert "--tensor-model-parallel-size was 4 and is 2" in refusal
    assert "start once on the old grid and let Megatron save a checkpoint" in refusal
    # Megatron's checkpoint is as new: it can be loaded on any grid.
    assert choose_beginning([folder(40, tensor_model_parallel_size=4)], 40, 40, SHAPE) == Beginning((), (), "")
