"""Guarantees 3, 5, 6 and 7 on real processes: several replicas, a snapshot every few steps, and copies whose bytes have changed."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from hot_swap_job import Fault, GridCase, argv, events, run_job, schedule, steps

from megatron.hotswap.coordinator.service import Coordinator, Scheduled
from megatron.hotswap.errors import SnapshotMismatch
from megatron.hotswap.snapshot.layout import HEADER_BYTES, Header

pytestmark = pytest.mark.timeout(1500)


def agent_of(node: str) -> psutil.Process:
    """The agent of a virtual node of the job that runs in this process."""
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("DEADPOOL_NODE") == node:
                return process
    raise LookupError(f"{node} has no agent")


def copies_in(agent: psutil.Process, rank: int) -> dict[int, tuple[Path, int, int]]:
    """Generation -> (file, begin of the slot, its bytes) of the complete copies of a rank that an agent has, read from its memory."""
    found = {}
    for fd in Path(f"/proc/{agent.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "deadpool-slots" not in os.readlink(fd):
                continue
            slot_bytes = fd.stat().st_size // 2
            with open(fd, "rb") as memory:
                for slot in range(2):
                    memory.seek(slot * slot_bytes)
                    with contextlib.suppress(SnapshotMismatch):
                        header = Header.unpack(memory.read(HEADER_BYTES))
                        if header.rank == rank:
                            found[header.generation] = fd, slot * slot_bytes, slot_bytes
    return found


def flip_a_bit(file: Path, slot_end: int) -> None:
    """In the last byte of a slot's payload that is not padding."""
    with open(file, "r+b") as memory, mmap.mmap(memory.fileno(), 0) as view:
        at = slot_end - 1
        while view[at] == 0:
            at -= 1
        view[at] ^= 0x10


def test_two_nodes_at_once_with_two_replicas_and_a_snapshot_every_second_step(tmp_path: Path) -> None:
    """--hot-swap-replicas 2: a rank and one of its holders are lost together. --hot-swap-interval 2: at most 3 completed steps again.

    Parameters are gathered behind the forward pass: of several steps that run again, only the first runs as a job's first one does.
    """
    case = GridCase("dp4-overlap", 4, 1, "--use-distributed-optimizer --bf16 --overlap-grad-reduce --overlap-param-gather")
    command = argv(case, 24, None, "--hot-swap-replicas 2 --hot-swap-interval 2")
    lost: list[str] = []

    def two_at_once(coordinator: Coordinator) -> None:
        step = coordinator.recorder.last_step
        if not lost and step is not None and step.step >= 5:
            membership = coordinator.control.membership
            assert membership is not None and len(membership.holders[1]) == 2
            nodes = [membership.members[rank].node for rank in (1, membership.holders[1][0])]
            for agent in [agent_of(node) for node in nodes]:
                os.killpg(agent.pid, signal.SIGKILL)
            lost.extend(nodes)

    later = [Scheduled("kill", "node", 0, 13, "optimizer"), Scheduled("freeze", "node", 3, 17, "backward")]
    run_job(case, tmp_path / "reference", command)
    summary = run_job(case, tmp_path / "disturbed", command, spares=2, faults=later, show=two_at_once)
    assert summary["exit_code"] == 0, summary["ended"]
    assert len(summary["recoveries"]) == 3 and sorted(summary["recoveries"][0]["nodes_lost"]) == sorted(lost)
    assert all(r["steps_rerun"] <= 3 for r in summary["recoveries"])
    assert any(r["generation"] % 2 == 0 for r in summary["recoveries"])
    assert steps(tmp_path / "disturbed") == steps(tmp_path / "reference")
    assert "any 2 nodes may be lost at one moment" in events(tmp_path / "disturbed", "start")[0]["reason"]


def test_a_damaged_replica_is_not_loaded(tmp_path: Path) -> None:
    """Guarantee 6: bits have flipped in all that the first holder of a lost rank has of it. The other holder's is taken.

    With data-parallel size 1: holders are ranks of other stages, and parameters come from the main parameters alone.
    """
    case = GridCase("pp4", 4, 1, "--pipeline-model-parallel-size 4 --use-distributed-optimizer")
    command = argv(case, 16, None, "--hot-swap-replicas 2 --hot-swap-when-late skip")
    damaged: list[str] = []

    def damage_and_kill(coordinator: Coordinator) -> None:
        step, membership = coordinator.recorder.last_step, coordinator.control.membership
        if damaged or step is None or step.step < 6 or membership is None:
            return
        holder = min(membership.holders_of(1), key=lambda member: member.incarnation)  # who is asked first
        if len(copies_in(agent_of(holder.node), rank=1)) < 2:
            return  # one is just being overwritten
        os.killpg(agent_of(membership.members[1].node).pid, signal.SIGKILL)  # first, so that no newer one comes
        for file, begin, length in copies_in(agent_of(holder.node), rank=1).values():
            flip_a_bit(file, begin + length)
        damaged.append(holder.incarnation)

    run_job(case, tmp_path / "reference", command)
    summary = run_job(case, tmp_path / "disturbed", command, spares=1, show=damage_and_kill)
    assert summary["exit_code"] == 0 and len(summary["recoveries"]) == 1, summary["ended"]
    said = events(tmp_path / "disturbed", "copy-damaged")
    assert [(x["rank"], x["incarnation"]) for x in said] == [(1, damaged[0])]
    assert steps(tmp_path / "disturbed") == steps(tmp_path / "reference")


def test_without_a_distributed_optimizer_only_metadata_travel(tmp_path: Path) -> None:
    """State that data-parallel peers have too is taken from a peer; a loss is recovered from all the same. SGD with momentum."""
    case = GridCase("sgd", 4, 1, "--tensor-model-parallel-size 2 --optimizer sgd")
    planned, iterations = schedule([Fault("kill", "backward"), Fault("freeze", "fence")], case.world_size)
    command = argv(case, iterations, None)
    sent: list[int] = []

    def look(coordinator: Coordinator) -> None:
        step, membership = coordinator.recorder.last_step, coordinator.control.membership
        if not sent and step is not None and membership is not None:
            with contextlib.suppress(LookupError):  # it may just be lost
                holder = agent_of(membership.holders_of(1)[0].node)
                sent.extend(length for _, _, length in copies_in(holder, rank=1).values())

    run_job(case, tmp_path / "reference", command)
    summary = run_job(case, tmp_path / "disturbed", command, spares=1, faults=planned, show=look)
    assert summary["exit_code"] == 0 and len(summary["recoveries"]) == 2, summary["ended"]
    assert steps(tmp_path / "disturbed") == steps(tmp_path / "reference")
    assert "only metadata travel between nodes" in events(tmp_path / "disturbed", "replication")[0]["reason"]
    assert sent and max(sent) < 200_000  # the payload has 1.6 MB


def test_a_slow_holder_costs_generations_but_no_time_where_the_user_would_rather_skip(tmp_path: Path) -> None:
    """--hot-swap-when-late skip: an agent stands still for some steps, less than its lease. Training goes on; then a node is lost."""
    case = GridCase("dp2", 2, 1, "--use-distributed-optimizer")
    command = argv(case, 40, None, "--hot-swap-when-late skip")
    stopped: list[tuple[psutil.Process, float, int]] = []
    steps_meanwhile: list[int] = []

    def slow_down(coordinator: Coordinator) -> None:
        step, membership = coordinator.recorder.last_step, coordinator.control.membership
        if step is None or membership is None or steps_meanwhile:
            return
        if not stopped and step.step >= 5:
            agent = agent_of(membership.members[0].node)  # rank 1, on the other node, says how far training is
            agent.suspend()
            stopped.append((agent, time.monotonic(), step.step))
        elif stopped and (step.step - stopped[0][2] > 8 or time.monotonic() - stopped[0][1] > 3.0):  # whichever is first
            steps_meanwhile.append(step.step - stopped[0][2])
            stopped[0][0].resume()

    later = [Scheduled("kill", "node", 0, 35, "backward")]
    run_job(case, tmp_path / "reference", command)
    summary = run_job(case, tmp_path / "disturbed", command, spares=1, faults=later, show=slow_down)
    assert summary["exit_code"] == 0 and len(summary["recoveries"]) == 1, summary["ended"]
    assert steps_meanwhile[0] > 2, "training waited for the holder"
    assert summary["generations_skipped"] > 0
    assert steps(tmp_path / "disturbed") == steps(tmp_path / "reference")
