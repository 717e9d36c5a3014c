"""control/commits.py: what is committed, what never will be, and what is of no use."""

from hypothesis import given
from hypothesis import strategies as st

from megatron.hotswap.control.commits import Commits
from megatron.hotswap.control.messages import Acknowledged


def said(rank, generation, payload_crc=None, peers=()):
    return Acknowledged(rank, generation, 1, payload_crc=payload_crc, peers=peers)


@given(st.lists(st.tuples(st.sampled_from(["ack", "skip"]), st.integers(0, 2), st.integers(0, 6)), max_size=60))
def test_a_generation_is_committed_or_void_but_never_both(events):
    """Guarantee 4 where generations are skipped: committed only with every rank's acknowledgement and nobody's skip."""
    commits, acknowledged, skipped = Commits(3), {}, set()
    for kind, rank, generation in events:
        before = commits.committed
        if kind == "skip":
            news = commits.skip(generation)
            assert not news or generation > commits.committed
            if news:
                skipped.add(generation)
            continue
        acknowledged.setdefault(generation, set()).add(rank)
        if commits.acknowledge(said(rank, generation)):
            assert generation == commits.committed > before
            assert acknowledged[generation] == {0, 1, 2} and generation not in skipped
        else:
            assert commits.committed == before


def test_a_damaged_copy_stays_known_as_long_as_its_generation_counts():
    commits = Commits(2)
    commits.damage("a", 0, 5)
    assert commits.usable("a", 0, [4, 5]) == {4}
    assert commits.usable("b", 0, [5]) == commits.usable("a", 1, [5]) == {5}
    commits.begin_again(5)
    assert commits.usable("a", 0, [5]) == set()
    commits.begin_again(4)  # generation 5 will be taken again
    assert commits.usable("a", 0, [5]) == {5}


def test_a_new_membership_commits_again_what_it_begins_from():
    commits = Commits(2)
    assert [commits.acknowledge(said(rank, 3)) for rank in (0, 1)] == [False, True]
    commits.begin_again(3)
    assert commits.committed == 2
    assert [commits.acknowledge(said(rank, 3)) for rank in (0, 1)] == [False, True]


def test_payloads_that_should_be_equal_and_are_not_are_named():
    commits = Commits(4)
    for rank, crc in enumerate((7, 8, 7, 9)):
        commits.acknowledge(said(rank, 3, crc, ((rank + 2) % 4,)))
    assert "ranks 1 and 3 should have the same state after step 3, and do not (CRC32C 00000008, 00000009)" in commits.difference(3)
    for rank, crc in enumerate((7, 8, 7, 8)):
        commits.acknowledge(said(rank, 4, crc, ((rank + 2) % 4,)))
    assert commits.difference(4) == "" and commits.difference(3) == ""
