"""Guarantees 2, 3 and 7 on real processes: (kill, freeze) x (each phase) x (grids), bit for bit.

Cases share a job: a lost node comes back as the next spare. Every job is compared with an undisturbed one of the same flags.
`DEADPOOL_FULL_MATRIX=1` (make test-all) runs every phase on every grid; otherwise the first grid has all of them and the others
four each, chosen so that every phase is met on at least one other grid.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import cpu_job
import psutil
import pytest
from hot_swap_job import GRIDS, PHASES, Fault, argv, events, run_job, schedule, steps, validation_losses

from megatron.hotswap.coordinator.service import Coordinator

FULL = os.environ.get("DEADPOOL_FULL_MATRIX") == "1"
ITERATIONS_MAX = 120

pytestmark = pytest.mark.timeout(1500)


def faults_of(index: int, name: str) -> list[Fault]:
    """The faults of a grid: all 22, or four of them."""
    # Without a distributed optimizer there are no sharded parameters to gather, so that moment never comes.
    phases = [p for p in PHASES if p != "param-gather" or "--use-distributed-optimizer" in GRIDS[name].flags]
    every = [Fault(action, phase) for phase in phases for action in ("kill", "freeze")]
    if FULL or name == "tp2-dp2":
        return every
    return [every[(index * 4 + i * 5) % len(every)] for i in range(4)]


@pytest.mark.parametrize("name", GRIDS)
def test_every_step_is_that_of_an_undisturbed_run(name: str, tmp_path: Path) -> None:
    case = GRIDS[name]
    faults = faults_of(list(GRIDS).index(name), name)
    planned, iterations = schedule(faults, case.world_size)
    run_job(case, tmp_path / "reference", argv(case, iterations, tmp_path / "checkpoints"))
    summary = run_job(case, tmp_path / "disturbed", argv(case, iterations, tmp_path / "others"), spares=1, faults=planned)
    assert summary["exit_code"] == 0, summary["ended"]
    assert len(summary["recoveries"]) == len(faults)
    for fault, recovery in zip(faults, summary["recoveries"], strict=True):
        assert recovery["kind"] == "swap" and len(recovery["nodes_lost"]) == 1
        assert recovery["steps_rerun"] <= 1, (fault, recovery)
    assert steps(tmp_path / "disturbed") == steps(tmp_path / "reference")
    assert len(steps(tmp_path / "disturbed")) == iterations
    evaluated = validation_losses(tmp_path / "reference")
    assert evaluated and validation_losses(tmp_path / "disturbed") == evaluated
    assert not events(tmp_path / "disturbed", "skipped")


def test_agents_and_workers_lost_alone(tmp_path: Path) -> None:
    """The loss of one process on a living node ends in the same state as the loss of the node."""
    case = GRIDS["tp2-dp2"]
    faults = [Fault(action, "forward", scope) for scope in ("agent", "worker") for action in ("kill", "freeze")]
    planned, iterations = schedule(faults, case.world_size)
    run_job(case, tmp_path / "reference", argv(case, iterations, None))
    summary = run_job(case, tmp_path / "disturbed", argv(case, iterations, None), spares=1, faults=planned)
    assert summary["exit_code"] == 0, summary["ended"]
    assert len(summary["recoveries"]) == len(faults)
    assert steps(tmp_path / "disturbed") == steps(tmp_path / "reference")


def test_continuing_from_a_checkpoint(tmp_path: Path) -> None:
    """A job that loads a checkpoint, and loses a node after that, goes on as the job that wrote it."""
    case = GRIDS["tp2-dp2"]
    checkpoints = tmp_path / "checkpoints"
    run_job(case, tmp_path / "whole", argv(case, 12, checkpoints, checkpoint_format="torch_dist"))
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("6")
    planned, _ = schedule([Fault("kill", "backward")], case.world_size)
    planned[0].at_step = 9
    summary = run_job(case, tmp_path / "continued", argv(case, 12, None, f"--load {checkpoints}"), spares=1, faults=planned)
    assert summary["exit_code"] == 0 and len(summary["recoveries"]) == 1, summary
    assert steps(tmp_path / "continued") == steps(tmp_path / "whole")[6:]


def test_a_frozen_node_that_wakes_up_is_refused(tmp_path: Path) -> None:
    """Guarantee 1: a node thought dead that comes back does no harm and ends itself."""
    case = GRIDS["tp2-dp2"]
    planned, _ = schedule([Fault("freeze", "forward")], case.world_size)
    command = argv(case, 40, None)
    run_job(case, tmp_path / "reference", command)
    run_dir = tmp_path / "disturbed"
    woken: list[int] = []
    ghosts: list[psutil.Process] = []

    def wake(coordinator: Coordinator) -> None:
        """Once the swap is complete and training goes on, let the lost node go on too."""
        step = coordinator.recorder.last_step
        if not woken and coordinator.recorder.recoveries and step is not None and step.step >= planned[0].at_step + 3:
            frozen = [p for p in psutil.Process().children(recursive=True) if p.status() == psutil.STATUS_STOPPED]
            assert frozen, "the lost node is still there, stopped"
            ghosts.extend(frozen)
            woken.append(os.getpgid(frozen[0].pid))
            os.killpg(woken[0], signal.SIGCONT)

    summary = run_job(case, run_dir, command, spares=1, faults=planned, end_lost_nodes=False, show=wake)
    assert summary["exit_code"] == 0 and woken
    assert len(summary["recoveries"]) == 1
    assert steps(run_dir) == steps(tmp_path / "reference")
    psutil.wait_procs(ghosts, timeout=30)
    assert not [p for p in ghosts if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    said = "".join(log.read_text() for log in (run_dir / "logs").glob("agent-*.log"))
    assert "was given up" in said or "the connection to the coordinator broke" in said


def test_without_the_flag_it_is_plain_megatron(tmp_path: Path) -> None:
    """With --hot-swap absent nothing of ours runs, and with it present the losses are still those of plain Megatron."""
    case = GRIDS["tp2-dp2"]
    command = argv(case, 8, None)
    plain = cpu_job.run_job(case.world_size, " ".join(command[: command.index("--hot-swap-wait-for-spare-s")]), tmp_path / "plain")
    run_job(case, tmp_path / "hot-swap", command)
    ours = [(step, loss["lm loss"], norm) for step, loss, norm, _ in steps(tmp_path / "hot-swap")]
    assert ours == [(s.iteration, s.loss, s.grad_norm) for s in plain.last_rank]
    assert plain.hot_swap_modules == {"none"}
