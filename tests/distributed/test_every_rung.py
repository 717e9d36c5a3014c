"""Guarantees 2, 3 and 7 on real processes: (reset, respawn, two nodes at once) x (each phase) x (grids), bit for bit.

What test_hot_swap.py does for the loss of one node. Only make test-all: an hour and more on two cores.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hot_swap_job import EVERY, GRIDS, GridCase, argv, events, run_job, steps

from megatron.hotswap.coordinator.service import Scheduled

FULL = os.environ.get("DEADPOOL_FULL_MATRIX") == "1"
pytestmark = [pytest.mark.timeout(3000), pytest.mark.skipif(not FULL, reason="a job for every grid: make test-all")]
APART_STEPS = 4


def schedule(case: GridCase) -> tuple[list[list[Scheduled]], int]:
    """For each phase a broken collective, a killed worker and two killed nodes; and how many steps the job needs."""
    planned: list[list[Scheduled]] = []
    step, last = 0, case.world_size - 1
    for i, phase in enumerate(case.phases):
        for kind in ("reset", "respawn", "swap"):
            step += APART_STEPS
            if phase in ("eval", "save"):
                step = -(-step // EVERY) * EVERY
            rank = (last, 0, last // 2)[i % 3]
            if kind == "swap":
                ranks = (0, last) if i % 2 else (0, last // 2 + 1)
                planned.append([Scheduled("kill", "node", each, step, phase) for each in ranks])
            else:
                planned.append([Scheduled("fail-collective" if kind == "reset" else "kill", "worker", rank, step, phase)])
    return planned, step + 3


def rungs(recoveries: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Kind and number of nodes lost of each. The second of two nodes may have been out of its phase by then, and be lost a step later."""
    found: list[tuple[str, int]] = []
    for recovery in recoveries:
        kind, lost = recovery["kind"], len(recovery["nodes_lost"])
        if found and kind == "swap" and found[-1] == ("swap", 1):
            found[-1] = ("swap", 1 + lost)
        else:
            found.append((kind, lost))
    return found


@pytest.mark.parametrize("name", GRIDS)
def test_every_step_is_that_of_an_undisturbed_run(name: str, tmp_path: Path) -> None:
    case = GRIDS[name]
    planned, iterations = schedule(case)
    undisturbed = run_job(case, tmp_path / "undisturbed", argv(case, iterations, tmp_path / "one"))
    assert undisturbed["exit_code"] == 0, undisturbed["ended"]
    command = [*argv(case, iterations, tmp_path / "two"), "--hot-swap-replicas", "2", "--hot-swap-respawn-window-s", "0.1"]
    command += ["--hot-swap-quarantine-window-s", "1"]
    faults = [fault for together in planned for fault in together]
    summary = run_job(case, tmp_path / "disturbed", command, spares=2, faults=faults)
    assert summary["exit_code"] == 0, summary["ended"]
    assert steps(tmp_path / "disturbed") == steps(tmp_path / "undisturbed")
    assert rungs(summary["recoveries"]) == [("reset", 0), ("respawn", 0), ("swap", 2)] * len(case.phases)
    assert all(r["steps_rerun"] <= 1 for r in summary["recoveries"])
    assert not events(tmp_path / "disturbed", "skipped")
