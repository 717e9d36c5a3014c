"""The scaling study under a real Slurm: laid out, submitted, followed and reported by one command, as on a login node."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from lab import Lab

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).resolve().parents[2]
_SWEEP_WITHIN_S = 400.0


def test_a_sweep_of_one_point(lab: Lab, tmp_path: Path) -> None:
    """Both runs of a pair in one allocation of three nodes: a node is killed and replaced; the plain job is killed and started again. Then
    nothing is left to do, and nothing is submitted."""
    folder = tmp_path / "sweep"
    sizes = ["--only", "tiny-0002", "--pairs", "1", "--warm-up", "3", "--steps", "10", "--after", "3"]
    limits = ["--run-limit-s", "150", "--time", "20"]
    here = ["--python", sys.executable, "--interface", "eth0", "--setup", "export GLOO_SOCKET_IFNAME=eth0"]
    scaling = [sys.executable, str(ROOT / "tools/scaling")]
    command = [*scaling, "sweep", str(folder), "--machine", "cpu", *sizes, *limits, *here]
    told = lab.run(*command, check=False, timeout_s=_SWEEP_WITHIN_S)
    logs = "\n".join(path.read_text(errors="replace")[-3000:] for path in folder.glob("tiny-0002/**/*.log"))
    outputs = "\n".join(path.read_text(errors="replace") for path in folder.glob("tiny-0002/slurm-*.out"))
    assert "done, 2/2 runs" in told, f"{told}\n{outputs}\n{logs}"
    figures = json.loads((folder / "figures.json").read_text())["points"][0]
    (swap,), (plain,) = figures["hot_swap"].values(), figures["plain"].values()
    assert figures["missing"] == []
    assert len(swap["recovery"]["nodes_lost"]) == 1 and swap["recovery"]["kind"] == "swap"
    assert 0 < swap["recovery"]["total_s"] < plain["restart"]["total_s"]
    # What one node holds is what the plan says, but for metadata, of which the plan has an upper bound.
    assert 0.9 * figures["planned_host_bytes"] < swap["host_bytes"] <= figures["planned_host_bytes"]
    again = lab.run(*scaling, "submit", str(folder), timeout_s=60.0)
    assert "job" not in again
    assert lab.run("squeue", "--noheader") == ""
