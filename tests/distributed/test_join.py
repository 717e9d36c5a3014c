"""`deadpool join`: a machine that no launcher knows becomes a node of a running job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hot_swap_job import BY_TWO, argv, events, run_job, steps

from megatron.hotswap.coordinator.service import Coordinator, Scheduled

pytestmark = pytest.mark.timeout(900)


def test_who_joins_takes_the_place_of_a_node_that_was_lost_for_good(tmp_path: Path, undisturbed: Path) -> None:
    """There is no spare, so the ranks wait; one comes, from another folder. A second machine of the same name is refused."""
    run_dir = tmp_path / "run"
    joining: dict[str, subprocess.Popen[str]] = {}

    def join(node: str) -> None:
        command = [sys.executable, "-m", "megatron.hotswap.cli.main", "join", "--run-dir", str(run_dir), "--node", node]
        with open(tmp_path / f"{node}.log", "w") as log:
            joining[node] = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True)

    def bring_another(coordinator: Coordinator) -> None:
        if not joining and any(notice.kind == "no-spare" for notice in coordinator.notices):
            join("node0")
            join("another")

    try:
        faults = [Scheduled("kill", "node", 3, 6, "backward")]
        summary = run_job(BY_TWO, run_dir, argv(BY_TWO, 12, None), faults=faults, show=bring_another, return_lost_nodes_after_s=None)
        codes = {node: process.wait(timeout=120) for node, process in joining.items()}
    finally:
        for process in joining.values():
            process.kill()
            process.wait()
    assert summary["exit_code"] == 0, summary["ended"]
    said = {node: (tmp_path / f"{node}.log").read_text() for node in codes}
    assert codes == {"node0": 2, "another": 0}, said
    assert "a node named node0 is in this job already" in said["node0"] and "--node NAME" in said["node0"]
    assert f"another joins the job in {run_dir}" in said["another"]
    assert [(r["kind"], r["nodes_lost"]) for r in summary["recoveries"]] == [("swap", ["node1"])]
    assert any("spare another takes ranks [2, 3]" in event["reason"] for event in events(run_dir, "assign"))
    assert steps(run_dir) == steps(undisturbed)[:12]
