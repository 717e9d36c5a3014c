"""control/lease.py: silence counts only while the listener listened, and still comes to an end."""

from hypothesis import example, given
from hypothesis import strategies as st

from megatron.hotswap.control.lease import Listener

LEASE_S, INTERVAL_S = 3.0, 0.5
TURN_S = INTERVAL_S / 2
TICK_S = 0.05

#: Pauses of the listener, of any length, with as many punctual looks between them as the second number says.
pauses = st.lists(st.tuples(st.floats(0.3, 20.0), st.integers(1, 12)), max_size=20)


def listener() -> Listener:
    """As the coordinator's."""
    return Listener(LEASE_S, INTERVAL_S, TURN_S)


@given(pauses, st.floats(0.0, 0.4))
@example([(1.0, 1)] * 6 + [(0.375, 6)], 0.25)  # pauses that leave no time to read in between
def test_who_speaks_is_never_given_up_however_the_listener_stands_still(found, reading_s):
    """A heartbeat comes every interval. What came during a pause is read once the listener has run for `reading_s`, and the clock is
    looked at before that."""
    here, now, heard, ran, readable = listener(), 0.0, 0.0, 0.0, 0.0
    for pause, looks in found:
        now += pause
        if ran >= readable:
            readable = ran + reading_s
        for _ in range(looks):
            assert not here.look({"a": heard}, now)
            if ran >= readable:
                heard = now - now % INTERVAL_S
            now += TICK_S
            ran += TICK_S


@given(pauses)
def test_who_is_silent_is_given_up_a_lease_after_the_last_pause_at_the_latest(found):
    here, now = listener(), 0.0
    for pause, looks in found:
        now += pause
        for _ in range(looks):
            here.look({"a": 0.0}, now)
            now += TICK_S
    since = now
    while not here.look({"a": 0.0}, now):
        now += TICK_S
        assert now - since <= LEASE_S + 2 * TICK_S


def test_a_listener_that_is_always_a_little_late_gives_up_later_but_does():
    """Looks 0.4 s apart: not counted in full, yet counted."""
    here, now = listener(), 0.0
    while not here.look({"a": 0.0}, now):
        now += 0.4
        assert now < 2 * LEASE_S
    assert now > LEASE_S


def test_the_silence_of_one_is_not_that_of_another():
    here = listener()
    for tick in range(62):
        now = tick * TICK_S
        assert here.look({"silent": 0.0, "speaking": now, "new": max(now - 0.1, 0.0)}, now) == (["silent"] if now > LEASE_S else [])
    assert here.look({"speaking": now}, now + TICK_S) == []
