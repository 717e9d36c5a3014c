"""Guarantees 2, 3 and 7 on real processes: (reset, respawn, two nodes at once, one and then another) x (each phase) x (grids), bit for
bit.

What test_hot_swap.py does for the loss of one node. Only make test-all: an hour and more on two cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hot_swap_job import GRIDS, GridCase, argv, events, run_job, step_for, steps
from striker import EVERY as SECONDS
from striker import watched

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
            step = step_for(phase, step + APART_STEPS)
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


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run directory of a grid's undisturbed job, run once for both tests: the shorter one has the same steps (hot_swap_job.argv)."""
    made: dict[str, Path] = {}

    def reference_of(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("reference")
            made[name] = folder / "run"
            summary = run_job(GRIDS[name], made[name], argv(GRIDS[name], schedule(GRIDS[name])[1], folder / "saved"))
            assert summary["exit_code"] == 0, summary["ended"]
        return made[name]

    return reference_of


@pytest.mark.parametrize("name", GRIDS)
def test_every_step_is_that_of_an_undisturbed_run(name: str, tmp_path: Path, reference_of: Callable[[str], Path]) -> None:
    case = GRIDS[name]
    planned, iterations = schedule(case)
    command = [*argv(case, iterations, tmp_path / "saved"), "--hot-swap-replicas", "2", "--hot-swap-respawn-window-s", "0.1"]
    command += ["--hot-swap-quarantine-window-s", "1"]
    faults = [fault for together in planned for fault in together]
    summary = run_job(case, tmp_path / "disturbed", command, spares=2, faults=faults)
    assert summary["exit_code"] == 0, summary["ended"]
    assert steps(tmp_path / "disturbed") == steps(reference_of(name))
    assert rungs(summary["recoveries"]) == [("reset", 0), ("respawn", 0), ("swap", 2)] * len(case.phases)
    assert all(r["steps_rerun"] <= 1 for r in summary["recoveries"])
    assert not events(tmp_path / "disturbed", "skipped")


@pytest.mark.parametrize("name", GRIDS)
def test_another_node_is_lost_in_the_recovery(
    name: str, tmp_path: Path, reference_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node in every phase of a step, and each time a second loss in another phase of the recovery from the first."""
    case = GRIDS[name]
    faults, step = [], 0
    for i, phase in enumerate(case.phases):
        step = step_for(phase, step + APART_STEPS)
        faults.append(Scheduled("kill", "node", (case.world_size - 1, 0, case.world_size // 2)[i % 3], step, phase))
    striker = watched([SECONDS[(i + list(GRIDS).index(name)) % len(SECONDS)] for i in range(len(faults))], monkeypatch)
    command = [*argv(case, step + 3, tmp_path / "saved"), "--hot-swap-replicas", "2", "--hot-swap-quarantine-failures", "99"]
    summary = run_job(case, tmp_path / "disturbed", command, spares=2, faults=faults)
    assert summary["exit_code"] == 0, summary["ended"]
    striker.check(summary["recoveries"])
    assert not [event for event in events(tmp_path / "disturbed", "recovery") if "did not restore" in event["reason"]]
    assert steps(tmp_path / "disturbed") == steps(reference_of(name))[: step + 3]
