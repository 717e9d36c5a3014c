"""The last rungs on real processes: nodes are lost one by one until none is left to take over, the agents write the newest generation,
the job ends with code 75, and the same command goes on from there, bit for bit. The same where no copy in memory is of use."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hot_swap_job import GRIDS, ROOT, argv, events, run_job, steps
from test_copies import agent_of, copies_in, flip_a_bit

from megatron.hotswap.cli.launch import Launch, prepare
from megatron.hotswap.control.messages import Membership
from megatron.hotswap.coordinator.service import Coordinator, Scheduled
from megatron.hotswap.errors import UsageError
from megatron.hotswap.snapshot import durable, manifest

pytestmark = pytest.mark.timeout(900)
ITERATIONS = 20
CASE = GRIDS["tp2-dp2"]


def kill_node_of(rank: int, membership: Membership) -> None:
    """With its agent and workers."""
    with contextlib.suppress(LookupError):
        os.killpg(agent_of(membership.members[rank].node).pid, signal.SIGKILL)


def kill_a_node(membership: Membership) -> bool:
    """The one of rank 0."""
    kill_node_of(0, membership)
    return True


def kill_a_node_and_damage_its_copies(membership: Membership) -> bool:
    """The one of rank 1, and a bit in all that others have of it. False: not yet, one is just being overwritten."""
    (holder,) = membership.holders_of(1)
    copies = copies_in(agent_of(holder.node), rank=1)
    if len(copies) == 2:
        kill_node_of(1, membership)  # first, so that no newer one comes
        for file, begin, length in copies.values():
            flip_a_bit(file, begin + length)
    return len(copies) == 2


class SaveThenStrike:
    """Follows a job: after a recovery a user asks for a durable generation; two steps after it is whole, this happens."""

    def __init__(self, run_dir: Path, strike: Callable[[Membership], bool]) -> None:
        self._run_dir, self._strike = run_dir, strike
        self.asked: subprocess.Popen[str] | None = None
        self.saved = -1
        self._struck = False

    def __call__(self, coordinator: Coordinator) -> None:
        control = coordinator.control
        if self.asked is None and coordinator.recorder.recoveries:
            command = [sys.executable, "-m", "megatron.hotswap.cli.main", "save", str(self._run_dir)]
            self.asked = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        last = coordinator.recorder.last_step
        if control.durable_generation >= 0 and self.saved < 0:
            self.saved = control.durable_generation
        if self.saved >= 0 and not self._struck and last is not None and last.step >= self.saved + 2:
            self._struck = self._strike(control.membership)


def test_down_to_the_last_rung_and_on_from_there(tmp_path: Path, undisturbed: Path) -> None:
    """Five nodes, of which four train: one is lost and replaced, a generation is asked for in training, another node is lost, none is
    left. The job that goes on from there loses a node too, in its second step. On another grid it would not have begun."""
    reference = steps(undisturbed)[:ITERATIONS]
    save = tmp_path / "checkpoints"
    command = [*argv(CASE, ITERATIONS, save), "--hot-swap-wait-for-spare-s", "1"]
    follow = SaveThenStrike(tmp_path / "first", kill_a_node)
    faults = [Scheduled("kill", "node", 3, 4, "backward")]
    first = run_job(CASE, tmp_path / "first", command, spares=1, faults=faults, show=follow, return_lost_nodes_after_s=None)
    assert first["exit_code"] == 75, first["ended"]
    assert follow.asked is not None
    said = follow.asked.communicate(timeout=60)[0]
    assert follow.asked.returncode == 0 and f"generation {follow.saved} is durable" in said, said
    root = save / manifest.FOLDER
    generations = [x.generation for x in durable.find(root)[0]]
    assert generations == [follow.saved, generations[-1]] and generations[-1] > follow.saved
    assert f"generation {generations[-1]} is durable in {root}" in first["ended"]
    assert steps(tmp_path / "first") == reference[: generations[-1]]

    with pytest.raises(UsageError, match=r"--tensor-model-parallel-size was 2 and is 1.*start once on the old grid"):
        prepare(Launch(4, 1, 0, str(ROOT / "pretrain_gpt.py"), [*command, "--tensor-model-parallel-size", "1"], tmp_path / "refused"))
    faults = [Scheduled("kill", "node", 1, generations[-1] + 2, "forward")]
    second = run_job(CASE, tmp_path / "second", command, spares=1, faults=faults, return_lost_nodes_after_s=None)
    assert second["exit_code"] == 0, second["ended"]
    assert steps(tmp_path / "second") == reference[generations[-1] :]
    assert events(tmp_path / "second", "loading")
    assert [r["kind"] for r in second["recoveries"]] == ["swap"]


@pytest.mark.skipif(os.environ.get("DEADPOOL_FULL_MATRIX") != "1", reason="the sooner cases of both are in make test; this: make test-all")
def test_every_copy_in_memory_is_damaged(tmp_path: Path, undisturbed: Path) -> None:
    """Guarantee 6: none is loaded, though a spare is there that could. What is durable is gone on from."""
    reference = steps(undisturbed)[:ITERATIONS]
    command = argv(CASE, ITERATIONS, tmp_path / "checkpoints")
    follow = SaveThenStrike(tmp_path / "first", kill_a_node_and_damage_its_copies)
    faults = [Scheduled("kill", "node", 3, 4, "backward")]
    first = run_job(CASE, tmp_path / "first", command, spares=2, faults=faults, show=follow, return_lost_nodes_after_s=None)
    assert first["exit_code"] == 75, first["ended"]
    assert "no memory has anything to go back to" in first["ended"] and f"generation {follow.saved} is durable" in first["ended"]
    assert {x["rank"] for x in events(tmp_path / "first", "copy-damaged")} == {1}
    assert events(tmp_path / "first", "copy-damaged")[0]["generation"] > follow.saved
    done = len(steps(tmp_path / "first"))
    assert done > follow.saved and steps(tmp_path / "first") == reference[:done]
    second = run_job(CASE, tmp_path / "second", command, spares=1)
    assert second["exit_code"] == 0, second["ended"]
    assert steps(tmp_path / "second") == reference[follow.saved :]
