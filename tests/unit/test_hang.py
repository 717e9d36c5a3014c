"""control/hang.py: a job hangs when no rank moves for many of its own steps; nothing else is a hang."""

from hypothesis import given
from hypothesis import strategies as st

from megatron.hotswap.control.hang import HangDetector
from megatron.hotswap.control.progress import LONG_WORK, Progress

FACTOR, LEAST_S, TICK_S = 10.0, 30.0, 0.25


def at(step, phase, count):
    return Progress(step, Progress.number(phase), count)


def trained(ranks=2, step_s=1.0):
    """A detector that has seen ten steps, and all ranks in the eleventh."""
    found = HangDetector(FACTOR, LEAST_S)
    for _ in range(10):
        found.step_done(step_s)
    found.heard({rank: at(11, "forward", 1) for rank in range(ranks)})
    return found


def still_until(found, ranks, now=0.0, at_most_s=10_000.0):
    """How long nothing moves until there is a verdict, and its words."""
    began = now
    while now - began < at_most_s:
        if evidence := found.look(ranks, now):
            return now - began, evidence
        now += TICK_S
    return None, ""


def test_nobody_moves():
    after, evidence = still_until(trained(), 2)
    assert LEAST_S < after <= LEAST_S + 2 * TICK_S
    assert evidence.startswith("no rank came any further for 30.") and evidence.endswith("a step takes 1.00 s: all are in step 11, forward")


def test_long_steps_have_more_time():
    after, _ = still_until(trained(step_s=20.0), 2)
    assert 200.0 < after <= 200.0 + 2 * TICK_S


def test_who_is_furthest_behind_is_named():
    found = trained(ranks=4)
    found.heard({0: at(11, "grad-sync", 5), 1: at(11, "backward", 4), 2: at(11, "grad-sync", 5), 3: at(11, "optimizer", 7)})
    assert "rank(s) [1] are furthest behind, in step 11, backward" in still_until(found, 4)[1]


def test_an_evaluation_a_checkpoint_and_what_was_announced_are_not_judged():
    for phase in ("eval", "save", LONG_WORK):
        found = trained()
        found.heard({1: at(11, phase, 2)})
        assert still_until(found, 2, at_most_s=2_000.0)[0] is None


def test_without_a_known_step_or_a_rank_that_has_not_spoken_there_is_no_verdict():
    found = HangDetector(FACTOR, LEAST_S)
    found.heard({0: at(1, "forward", 1), 1: at(1, "forward", 1)})
    assert still_until(found, 2, at_most_s=2_000.0)[0] is None
    assert still_until(trained(ranks=1), 2, at_most_s=2_000.0)[0] is None


def test_a_second_hang_is_given_twice_the_time_until_steps_go_on():
    found = trained()
    first, _ = still_until(found, 2)
    second, _ = still_until(found, 2, now=100.0)
    assert abs(second - 2 * LEAST_S) <= 1.0 + TICK_S  # of the pause in between, a second counts
    for _ in range(6):
        found.step_done(1.0)
    found.heard({0: at(18, "forward", 9)})
    third, _ = still_until(found, 2, now=1000.0)
    assert abs(third - first) <= 1.0 + TICK_S


@given(st.lists(st.tuples(st.floats(0.0, LEAST_S - 1.0), st.integers(0, 1)), max_size=40))
def test_whoever_moves_within_the_time_is_never_halted(moves):
    """One rank at a time moves, with pauses in between that are shorter than the limit."""
    found, now = trained(), 0.0
    for count, (pause, rank) in enumerate(moves):
        until = now + pause
        while now < until:
            assert not found.look(2, now)
            now += TICK_S
        found.heard({rank: at(11, "forward", count + 2)})


@given(st.lists(st.floats(1.0, 500.0), max_size=20))
def test_the_coordinators_own_pauses_are_no_stillness(pauses):
    """It stood still, and so did what it hears."""
    found, now = trained(), 0.0
    for count, pause in enumerate(pauses):
        assert not found.look(2, now)
        now += pause
        assert not found.look(2, now)
        found.heard({0: at(11, "forward", count + 2)})
