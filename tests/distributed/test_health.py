"""A node whose health command begins to fail, or one of whose GPUs, is replaced while it lives, and stays away until it is released
(docs/verdicts.md)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hot_swap_job import ROOT, GridCase, argv, events, run_job, steps

from megatron.hotswap.coordinator.service import Coordinator

pytestmark = pytest.mark.timeout(600)

ITERATIONS = 200
CASE = GridCase("dp2", 2, 1, "--use-distributed-optimizer")


class Operator:
    """Breaks node1 once the job trains; once it has been refused, mends it and releases it."""

    def __init__(self, folder: Path, run_dir: Path, says: str) -> None:
        self.sick = folder / "sick-node1"
        self._says = says
        self._run_dir = run_dir
        self.release: subprocess.Popen[str] | None = None

    def __call__(self, coordinator: Coordinator) -> None:
        """Called ten times a second."""
        refused = any(log.kind == "refused" for log in coordinator.notices)
        if refused and self.release is None:
            self.sick.unlink()
            command = [sys.executable, "-m", "megatron.hotswap.cli.main", "release", "node1", "--run-dir", str(self._run_dir)]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            self.release = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        elif coordinator.control.newest_step > 5 and self.release is None:
            self.sick.write_text(self._says)


FULL = os.environ.get("DEADPOOL_FULL_MATRIX") == "1"
#: What watches, what a file of the node says to it, and what that is in words.
COMMAND = ("command", "a fan has stopped\n", "its health command fails: a fan has stopped (exit code 1)")
DEVICE = pytest.param(
    *("device", "79", "a device fails: GPU 1: Xid 79, the GPU has fallen off the bus"),
    marks=pytest.mark.skipif(not FULL, reason="one job more: make test-all"),
)


@pytest.mark.parametrize(("by", "says", "why"), [COMMAND, DEVICE], ids=["command", "device"])
def test_a_node_that_is_not_fit_is_replaced_quarantined_and_released(
    by: str, says: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is one of a stand-in for NVML, of which only make test-all has a job."""
    run_dir = tmp_path / "disturbed"
    operator = Operator(tmp_path, run_dir, says)
    command, path = argv(CASE, ITERATIONS, None), []
    if by == "command":
        health = f"! cat {tmp_path}/sick-$DEADPOOL_NODE 2>/dev/null"
        command += ["--hot-swap-health-command", health, "--hot-swap-health-interval-s", "0.2"]
    else:
        monkeypatch.setenv("XIDS", str(tmp_path))
        path = [Path(__file__).parent / "nvml_stand_in"]
    summary = run_job(CASE, run_dir, command, spares=1, return_lost_nodes_after_s=0.0, show=operator, path=path)
    assert summary["exit_code"] == 0, summary["ended"]
    (recovery,) = summary["recoveries"]
    assert (recovery["kind"], recovery["nodes_lost"], recovery["evidence"]) == ("swap", ["node1"], [why])
    assert recovery["steps_rerun"] <= 1

    assert [e["reason"] for e in events(run_dir, "unhealthy")] == [f"node node1: {why}; a spare takes its ranks"]
    assert [(e["reason"], e["left"]) for e in events(run_dir, "node-lost")] == [(f"node1: {why}", True)]
    refusal = f"node node1 is in quarantine: {why}; it may join again after: deadpool release node1"
    assert [e["reason"] for e in events(run_dir, "quarantined") + events(run_dir, "refused")] == [refusal, refusal]
    assert refusal in (run_dir / "logs/agent-node1.log").read_text()

    assert operator.release is not None
    said, _ = operator.release.communicate(timeout=60)
    assert said == "deadpool: node node1 may join again\n"
    assert [e["node"] for e in events(run_dir, "joined")].count("node1") == 2  # as the job began, and when it was released

    run_job(CASE, tmp_path / "reference", argv(CASE, ITERATIONS, None))
    assert steps(run_dir) == steps(tmp_path / "reference")
