"""Megatron's --async-save under hot-swap: a checkpoint that was being written when a node died is written again by the whole job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hot_swap_job import BY_TWO, EVERY, argv, events, run_job, steps

from megatron.hotswap.coordinator.service import Scheduled

pytestmark = pytest.mark.timeout(1200)
BACKGROUND = "--async-save --use-persistent-ckpt-worker --async-strategy mcore"


def named_memory() -> set[str]:
    """The semaphores of Python's multiprocessing, and what torch had made and not unlinked yet when it was killed."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("sem.mp-", "torch_"))}


def test_a_checkpoint_that_is_being_written_when_a_node_dies_is_written_again(tmp_path: Path, undisturbed: Path) -> None:
    """A writer needs seconds to start, so both losses find it at work: the second also at what the first has had written again."""
    reference, last = steps(undisturbed), 2 * EVERY + 3
    save = tmp_path / "checkpoints"
    command = argv(BY_TWO, last, save, BACKGROUND, checkpoint_format="torch_dist")
    faults = [Scheduled("kill", "node", 3, EVERY + 1, "forward"), Scheduled("kill", "node", 0, 2 * EVERY, "save")]
    before = named_memory()
    first = run_job(BY_TWO, tmp_path / "first", command, spares=1, faults=faults)
    for name in named_memory() - before:  # a node that is killed takes nothing away any more, nor does Python's tracker on it
        Path("/dev/shm", name).unlink()
    assert first["exit_code"] == 0, first["ended"]
    assert [r["kind"] for r in first["recoveries"]] == ["swap", "swap"]
    assert steps(tmp_path / "first") == reference[:last]
    assert f"the checkpoint of step {EVERY} was being written" in events(tmp_path / "first", "save-again")[0]["reason"]
    # The save after step EVERY + 1 was given up too, and the one that was due anyway came next.
    whole = {int(folder.name.removeprefix("iter_")) for folder in save.glob("iter_*") if (folder / "metadata.json").is_file()}
    assert whole == {2 * EVERY, last}
    assert int((save / "latest_checkpointed_iteration.txt").read_text()) == last
    (save / "latest_checkpointed_iteration.txt").write_text(str(2 * EVERY))

    command = [*argv(BY_TWO, last, None), "--load", str(save), "--ckpt-format", "torch_dist"]
    second = run_job(BY_TWO, tmp_path / "second", command)
    assert second["exit_code"] == 0, second["ended"]
    assert steps(tmp_path / "second") == reference[2 * EVERY : last]
