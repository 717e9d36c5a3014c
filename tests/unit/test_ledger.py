"""topology/ledger.py: a group is kept only if nothing is under way in it, as its members together see it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.hotswap.topology.ledger import Counts, Ledger, under_way


def counts(version: int = 3, idle: bool = True, collectives: int = 7, sent=None, received=None) -> Counts:
    return Counts(version, idle, collectives, sent or {}, received or {})


def test_members_that_have_counted_the_same_keep_their_group() -> None:
    assert under_way({0: counts(sent={1: 4}), 1: counts(received={0: 4}), 2: counts()}) is None


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({0: counts(idle=False), 1: counts()}, r"members \[0\] have unfinished work"),
        ({0: counts(version=2), 1: counts()}, r"different memberships: \[2, 3\]"),
        ({0: counts(collectives=8), 1: counts()}, r"different numbers of collectives: \[7, 8\]"),
        ({0: counts(sent={1: 2}), 1: counts(received={0: 1})}, "of 2 messages from member 0 to member 1 1 were received"),
        ({0: counts(), 1: counts(received={0: 1})}, "of 0 messages from member 0 to member 1 1 were received"),
    ],
)
def test_what_is_under_way_is_said(members, says) -> None:
    import re

    assert re.search(says, under_way(members) or "")


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=30))
def test_a_message_that_was_not_received_is_always_noticed(messages) -> None:
    ledgers = [Ledger() for _ in range(4)]
    lost = False
    for source, to, arrives in messages:
        if source == to:
            continue
        ledgers[source].sent[to] = ledgers[source].sent.get(to, 0) + 1
        if arrives:
            ledgers[to].received[source] = ledgers[to].received.get(source, 0) + 1
        else:
            lost = True
    members = {i: ledger.counts(1, True) for i, ledger in enumerate(ledgers)}
    assert (under_way(members) is not None) == lost


def test_work_that_was_begun_and_not_seen_to_end_is_not_idle() -> None:
    ledger = Ledger()
    assert ledger.counts(1, True).idle
    ledger.unfinished += 1
    assert not ledger.counts(1, True).idle
    ledger.unfinished -= 1
    assert not ledger.counts(1, False).idle, "the device is still busy"


def test_counts_travel() -> None:
    said = counts(sent={1: 2}, received={3: 1})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=Counts) == said
