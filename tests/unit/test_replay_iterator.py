"""patches/adapter.py ReplayIterator: after a recovery the same samples are read again, by every rank alike (guarantee 7)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def replay():
    from megatron.hotswap.patches.adapter import ReplayIterator

    return ReplayIterator


class Trainer:
    """Reads `per_step` items in each step."""

    def __init__(self, replay, per_step, source):
        self.step, self.per_step = 0, per_step
        self.data = replay(source, lambda: self.step, lambda: self.step - 1)

    def run_step(self):
        items = [next(self.data) for _ in range(self.per_step)]
        self.step += 1
        return items

    def recover(self, generation):
        self.data.rewind(generation)
        self.step = generation


def numbers(start=0):
    while True:
        yield {"sample": start}
        start += 1


def test_rewound_by_a_step_it_reads_the_same_again(replay):
    trainer = Trainer(replay, 2, numbers())
    read = [trainer.run_step() for _ in range(4)]
    trainer.recover(3)
    assert trainer.run_step() == read[3]
    assert trainer.run_step() == [{"sample": 8}, {"sample": 9}]


def test_a_step_that_was_broken_off_in_the_middle_is_read_from_its_beginning(replay):
    trainer = Trainer(replay, 3, numbers())
    trainer.run_step()
    next(trainer.data)
    trainer.recover(1)
    assert trainer.run_step() == [{"sample": 3}, {"sample": 4}, {"sample": 5}]


def test_rewound_again_while_it_still_replays(replay):
    """A second failure during the repeated step."""
    trainer = Trainer(replay, 3, numbers())
    read = [trainer.run_step() for _ in range(3)]
    trainer.recover(1)
    trainer.run_step()
    next(trainer.data)
    trainer.recover(1)
    assert [trainer.run_step(), trainer.run_step()] == read[1:]


def test_what_the_trainer_does_to_a_batch_does_not_come_back(replay):
    trainer = Trainer(replay, 1, numbers())
    trainer.run_step()[0]["sample"] = "changed"
    trainer.recover(0)
    assert trainer.run_step() == [{"sample": 0}]


def test_only_the_last_steps_are_kept(replay):
    """No recovery goes further back, and a long run must not keep its whole corpus."""
    trainer = Trainer(replay, 5, numbers())
    for _ in range(1000):
        trainer.run_step()
    assert len(trainer.data._read) <= 3 * 5


@settings(max_examples=150, deadline=None)
@given(per_step=st.integers(1, 4), script=st.lists(st.integers(0, 3), max_size=40))
def test_any_run_with_recoveries_reads_what_an_undisturbed_one_reads(replay, per_step, script):
    """0: a step; 1: recover to the newest generation; 2: to the one before; 3: break off after one item, then recover.

    No slot holds less than the newest generation minus one, so no recovery goes further back, however many there are in a row.
    """
    trainer, steps, newest = Trainer(replay, per_step, numbers()), {}, 0
    for action in script:
        if action == 0:
            step = trainer.step
            items = trainer.run_step()
            newest = max(newest, trainer.step)
            assert steps.setdefault(step, items) == items
        else:
            if action == 3:
                next(trainer.data)
            trainer.recover(max(0, newest - 1, trainer.step - (action == 2)))
    flat = [item["sample"] for step in sorted(steps) for item in steps[step]]
    assert flat == list(range(len(flat)))
