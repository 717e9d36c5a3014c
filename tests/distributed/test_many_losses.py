"""Most nodes of a job are lost: six of eight one by one, down to the durable generation; three at one moment, as one recovery."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from hot_swap_job import GRIDS, argv, events, run_job, steps
from test_copies import agent_of

from megatron.hotswap.coordinator.service import Coordinator, Scheduled
from megatron.hotswap.snapshot import durable, manifest

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(os.environ.get("DEADPOOL_FULL_MATRIX") != "1", reason="sixteen nodes to start: make test-all"),
]
ITERATIONS = 24
CASE = GRIDS["tp2-dp2"]


class OneMore:
    """One more node is lost while the job waits for a spare that does not come."""

    def __init__(self) -> None:
        self.lost = ""

    def __call__(self, coordinator: Coordinator) -> None:
        control = coordinator.control
        if not self.lost and [n for n in coordinator.notices if n.kind == "no-spare"] and len(coordinator.recorder.recoveries) == 4:
            self.lost = next(x.node for x in control.membership.members if x.incarnation in control.agents)
            with contextlib.suppress(LookupError):
                os.killpg(agent_of(self.lost).pid, signal.SIGKILL)


def test_six_of_eight_nodes_are_lost_and_then_three_at_once(tmp_path: Path, undisturbed: Path) -> None:
    """Four nodes train and four stand by; every snapshot has three replicas, so whichever node is left has them all."""
    reference = steps(undisturbed)[:ITERATIONS]
    save = tmp_path / "checkpoints"
    command = [*argv(CASE, ITERATIONS, save), "--hot-swap-replicas", "3", "--hot-swap-wait-for-spare-s", "20"]
    faults = [Scheduled("kill", "node", i % 4, 3 + 2 * i, ("forward", "backward", "optimizer")[i % 3]) for i in range(5)]
    follow = OneMore()
    first = run_job(CASE, tmp_path / "first", command, spares=4, faults=faults, show=follow, return_lost_nodes_after_s=None)
    assert first["exit_code"] == 75, first["ended"]
    assert [r["kind"] for r in first["recoveries"]] == ["swap"] * 4 and all(len(r["nodes_lost"]) == 1 for r in first["recoveries"])
    lost = {e["node"] for e in events(tmp_path / "first", "node-lost")}
    assert len(lost) == 6 and follow.lost in lost
    (written,) = (x.generation for x in durable.find(save / manifest.FOLDER)[0])
    assert written >= faults[-1].at_step - 2
    assert steps(tmp_path / "first") == reference[:written]

    at = written + 4
    faults = [Scheduled("kill", "node", rank, at, "backward") for rank in (0, 2, 3)]
    second = run_job(CASE, tmp_path / "second", command, spares=3, faults=faults, return_lost_nodes_after_s=None)
    assert second["exit_code"] == 0, second["ended"]
    assert [(r["kind"], len(r["nodes_lost"])) for r in second["recoveries"]] == [("swap", 3)]
    assert steps(tmp_path / "second") == reference[written:]
