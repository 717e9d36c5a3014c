"""Rows of docs/verdicts.md that no other test meets on real processes: each ends on its rung, with the words that the page has."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hot_swap_job import BY_TWO, GRIDS, GridCase, argv, events, run_job, steps
from test_copies import agent_of

from megatron.hotswap.coordinator.service import Coordinator, Scheduled

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(os.environ.get("DEADPOOL_FULL_MATRIX") != "1", reason="a job for each row: make test-all"),
]


def test_who_fails_again_and_again_is_replaced(tmp_path: Path, undisturbed: Path) -> None:
    """A second worker failure of a node within the window costs the node; so do three resets that all point to it."""
    faults = [Scheduled("kill", "worker", 3, step, "forward") for step in (4, 8)]
    script = Path(__file__).with_name("pretrain_with_a_bad_link.py")
    run_dir = tmp_path / "run"
    command = [*argv(GRIDS["tp2-dp2"], 26, None), "--hot-swap-quarantine-failures", "9"]
    summary = run_job(GRIDS["tp2-dp2"], run_dir, command, spares=2, faults=faults, script=script)
    assert summary["exit_code"] == 0, summary["ended"]
    assert [r["kind"] for r in summary["recoveries"]] == ["respawn", "swap", "reset", "reset", "swap"]
    again, blamed = (event["reason"] for event in events(run_dir, "node-lost"))
    assert "a worker of this node failed" in again, again
    assert "3 resets within" in blamed and "all point to this node" in blamed, blamed
    assert steps(run_dir) == steps(undisturbed)[:26]


def test_a_step_that_kills_whoever_runs_it_ends_the_job(tmp_path: Path) -> None:
    """Two nodes are replaced for it in vain. Not a third: the job ends, with all the evidence."""
    case = GridCase("dp2", 2, 1, "--use-distributed-optimizer")
    script = Path(__file__).with_name("pretrain_that_kills.py")
    summary = run_job(case, tmp_path, argv(case, 9, None), script=script, spares=3, return_lost_nodes_after_s=None)
    assert summary["exit_code"] == 1
    assert "step 5 failed 3 times and was never completed, so it is not the nodes; replaced for it in vain:" in summary["ended"]
    assert all(f"({k})" in summary["ended"] for k in (1, 2, 3)), summary["ended"]


def test_a_rank_that_does_not_restore_in_time_is_started_again(tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can say whose fault it is, since all wait for each other: they are halted again, and who does not answer that is to blame."""
    monkeypatch.setenv("DEADPOOL_TEST_MARK", str(tmp_path / "mark"))
    case, script = GRIDS["tp2-dp2"], Path(__file__).with_name("pretrain_that_restores_slowly.py")
    command = argv(case, 12, None, "--hot-swap-resume-timeout-s 8")
    command += ["--hot-swap-halt-timeout-s", "15", "--hot-swap-collective-timeout-s", "12"]
    faults = [Scheduled("fail-collective", "worker", 0, 6, "forward")]
    summary = run_job(case, tmp_path / "run", command, faults=faults, script=script)
    assert summary["exit_code"] == 0, summary["ended"]
    (recovery,) = summary["recoveries"]
    assert recovery["kind"] == "respawn" and recovery["ranks_respawned"] == [1] and recovery["attempts"] > 1, recovery
    (late,) = [said for said in recovery["evidence"] if "did not restore generation" in said]
    assert "in 8" in late and "1" in late.partition("rank(s) [")[2].partition("]")[0], late
    assert steps(tmp_path / "run") == steps(undisturbed)[:12]


def test_announced_long_work_is_waited_for(tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node is lost while a rank keeps Python's lock for three halts' time. It has said so, and is not started again."""
    mark = tmp_path / "mark"
    monkeypatch.setenv("DEADPOOL_TEST_MARK", str(mark))
    case, script = GRIDS["tp2-dp2"], Path(__file__).with_name("pretrain_that_works_long.py")
    killed: list[str] = []

    def kill(coordinator: Coordinator) -> None:
        if mark.exists() and not killed:
            assert coordinator.control.membership is not None
            killed.append(coordinator.control.membership.members[3].node)
            os.killpg(agent_of(killed[0]).pid, signal.SIGKILL)

    command = [*argv(case, 12, None), "--hot-swap-halt-timeout-s", "8", "--hot-swap-collective-timeout-s", "7"]
    summary = run_job(case, tmp_path / "run", command, spares=1, script=script, show=kill, return_lost_nodes_after_s=None)
    assert summary["exit_code"] == 0, summary["ended"]
    (recovery,) = summary["recoveries"]
    assert (recovery["kind"], recovery["nodes_lost"], recovery["ranks_respawned"]) == ("swap", killed, []), recovery
    waited = [event["reason"] for event in events(tmp_path / "run", "waiting") if "long work" in event["reason"]]
    assert len(waited) >= 2 and all(reason.startswith("rank(s) [1] do not answer the halt") for reason in waited), waited
    assert steps(tmp_path / "run") == steps(undisturbed)[:12]


def test_a_rank_and_all_its_holders_lost_at_one_moment(tmp_path: Path) -> None:
    """Nothing has a copy any more, and nothing was written: that is said, and no state is made up."""
    killed: list[str] = []

    def kill(coordinator: Coordinator) -> None:
        last = coordinator.recorder.last_step
        if not killed and last is not None and last.step >= 6:
            killed.extend(("node0", "node1"))
            for agent in [agent_of(node) for node in killed]:
                os.killpg(agent.pid, signal.SIGKILL)

    summary = run_job(BY_TWO, tmp_path, argv(BY_TWO, 1000, None), spares=2, show=kill, return_lost_nodes_after_s=None)
    assert summary["exit_code"] == 1
    assert "nothing to go back to" in summary["ended"], summary["ended"]
