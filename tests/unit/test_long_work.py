"""long_work.py and the worker's part of it: what is announced, and for how long."""

import contextlib

import pytest

from megatron.hotswap import long_work
from megatron.hotswap.control import messages as m
from megatron.hotswap.snapshot.slots import ControlBlock, Word
from megatron.hotswap.worker.session import Session


@pytest.fixture
def session():
    """A session without an agent."""
    found = Session.__new__(Session)
    found.control, found._armed = ControlBlock.create(), []
    yield found
    long_work.announce_through(contextlib.nullcontext)


def progress_of(session):
    return m.Progress(*(session.control.get(word) for word in (Word.STEP, Word.PHASE, Word.PROGRESS)))


def test_without_hot_swap_it_is_nothing():
    with long_work.long_work():
        pass


def test_it_is_said_while_it_lasts_and_the_phase_before_comes_back(session):
    long_work.announce_through(session.long_work)
    session.enter("forward", 8)
    before = progress_of(session)
    with long_work.long_work():
        said = progress_of(session)
        assert (said.step, said.phase_name, said.is_long) == (8, "long-work", True)
        with long_work.long_work():
            assert progress_of(session).is_long
        assert progress_of(session).is_long
    after = progress_of(session)
    assert (after.step, after.phase_name, after.is_long) == (8, "forward", False)
    assert before.count < said.count < after.count


def test_it_ends_with_an_exception_too(session):
    long_work.announce_through(session.long_work)
    session.enter("save", 8)
    with pytest.raises(ValueError, match="of the script"), long_work.long_work():
        raise ValueError("of the script")
    assert progress_of(session).phase_name == "save" and progress_of(session).is_long
    session.in_no_phase()
    assert progress_of(session).phase_name == "" and not progress_of(session).is_long
