"""`--on-failure restart` on real processes: three losses, each answered by a restart of the whole job from Megatron's own checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from hot_swap_job import EVERY, GridCase, argv, events, run_job, steps, validation_losses

from megatron.hotswap.cli.launch import VirtualNodes
from megatron.hotswap.coordinator.service import Coordinator, Scheduled

DP2 = GridCase("dp2", 2, 1, "--use-distributed-optimizer")
ITERATIONS = 3 * EVERY + 3
#: A node that trains, a process on a node that lives, and a collective alone; each in another interval between two checkpoints.
FAULTS = [
    Scheduled("kill", "node", 1, EVERY + 3, "backward"),
    Scheduled("segv", "worker", 0, 2 * EVERY + 3, "optimizer"),
    Scheduled("fail-collective", "worker", 1, 3 * EVERY + 2, "forward"),
]


@pytest.mark.timeout(600)
def test_a_job_restarts_from_megatrons_checkpoint_and_every_step_is_the_same(tmp_path: Path) -> None:
    """All workers are ended and started anew, a spare takes the lost node's place, and what ran again came out bit for bit as before. No
    host memory is taken for snapshots: it is plain Megatron that trains."""
    nodes: list[VirtualNodes] = []
    held: list[int] = []

    def show(coordinator: Coordinator) -> None:
        held.append(max(nodes[0].host_memory_bytes().values(), default=0) if nodes else 0)

    run_dir = tmp_path / "run"
    summary = run_job(
        DP2,
        run_dir,
        argv(DP2, ITERATIONS, tmp_path / "checkpoints"),
        spares=1,
        faults=FAULTS,
        on_failure="restart",
        show=show,
        started=lambda _, virtual_nodes: nodes.append(virtual_nodes),
    )
    assert summary["exit_code"] == 0, summary["ended"]
    recoveries = summary["recoveries"]
    assert [r["kind"] for r in recoveries] == ["restart"] * 3
    assert [r["generation"] for r in recoveries] == [EVERY, 2 * EVERY, 3 * EVERY]
    assert [r["steps_rerun"] for r in recoveries] == [2, 2, 1]
    assert [r["nodes_lost"] for r in recoveries] == [["node1"], [], []]
    assert all(r["phases"]["halt_s"] > 0 and r["phases"]["restore_s"] > 0 for r in recoveries)
    assert [r["counted_from"] for r in recoveries] == ["fault", "fault", "last sign of life"]  # as for hot swap's reset
    assert [step for step, *_ in steps(run_dir)] == list(range(1, ITERATIONS + 1))
    lines = [json.loads(line) for line in (run_dir / "steps.jsonl").read_text().splitlines()]
    again = {x["step"]: (x["again"], x["same_bits"]) for x in lines if x["again"]}
    assert again == dict.fromkeys([EVERY + 1, EVERY + 2, 2 * EVERY + 1, 2 * EVERY + 2, 3 * EVERY + 1], (1, True))
    assert set(validation_losses(run_dir)) == {EVERY, 2 * EVERY, 3 * EVERY}
    assert len((run_dir / "injections.jsonl").read_text().splitlines()) == len(FAULTS)
    assert [x["generation"] for x in events(run_dir, "resumed")] == [EVERY, 2 * EVERY, 3 * EVERY]
    assert held and max(held) == 0
    assert not psutil.Process().children(recursive=True)
