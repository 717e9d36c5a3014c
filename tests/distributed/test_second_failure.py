"""A second failure in every phase of a recovery (guarantees 2, 3 and 7): whoever it takes, it is one recovery, and no bit differs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hot_swap_job import GRIDS, argv, events, run_job, steps
from striker import EVERY, watched

from megatron.hotswap.coordinator.service import Scheduled

CASE = GRIDS["tp2-dp2"]
STEPS_A_CASE = 4
CASES = EVERY if os.environ.get("DEADPOOL_FULL_MATRIX") == "1" else EVERY[:2]
pytestmark = pytest.mark.timeout(1500)


def test_a_second_failure_in_every_phase_of_a_recovery(tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas, so that any two losses leave a copy of everything."""
    striker = watched(CASES, monkeypatch)
    iterations = STEPS_A_CASE * (len(CASES) + 1)
    command = [*argv(CASE, iterations, None), "--hot-swap-replicas", "2", "--hot-swap-quarantine-failures", "99"]
    faults = [Scheduled("kill", "node", 3 - i % 4, 3 + STEPS_A_CASE * i, "backward") for i in range(len(CASES))]
    summary = run_job(CASE, tmp_path / "disturbed", command, spares=2, faults=faults)
    assert summary["exit_code"] == 0, summary["ended"]
    striker.check(summary["recoveries"])
    # None was ended by a deadline: that it is, in the end, would hide an attempt that all of them waited in.
    assert not [event for event in events(tmp_path / "disturbed", "recovery") if "did not restore" in event["reason"]]
    assert steps(tmp_path / "disturbed") == steps(undisturbed)[:iterations]
