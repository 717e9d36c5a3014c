"""Guarantees 2, 3 and 7 on real processes: (kill, freeze) x (each phase) x (grids), bit for bit.

Cases share a job: a lost node comes back as the next spare. Every job is compared with an undisturbed one of the same flags.
`DEADPOOL_FULL_MATRIX=1` (make test-all) runs every phase on every grid (and test_every_rung.py); otherwise the first grid has all of
them and the others four each, chosen so that every phase is met on at least one other grid.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cpu_job
import psutil
import pytest
from hot_swap_job import BY_TWO, EVERY, GRIDS, ROOT, Fault, GridCase, argv, events, run_job, schedule, steps, validation_losses
from watcher import Watcher

from megatron.hotswap.cli.launch import VirtualNodes
from megatron.hotswap.control.messages import Injection
from megatron.hotswap.coordinator.service import Coordinator, Scheduled

FULL = os.environ.get("DEADPOOL_FULL_MATRIX") == "1"
SCALARS = ("exposed-stall-seconds", "committed-generation", "recoveries", "recovery-seconds")

pytestmark = pytest.mark.timeout(1500)


def faults_of(index: int, name: str) -> list[Fault]:
    """The faults of a grid: all 22, or four of them."""
    every = [Fault(action, phase) for phase in GRIDS[name].phases for action in ("kill", "freeze")]
    if FULL or name == "tp2-dp2":
        return every
    return [every[(index * 4 + i * 5) % len(every)] for i in range(4)]


@dataclass(frozen=True)
class Reference:
    """An undisturbed job of one grid, at least as long as that which is planned."""

    run_dir: Path
    faults: list[Fault]
    planned: list[Scheduled]
    iterations: int

    def steps(self, first: int = 0, last: int | None = None) -> list[tuple[Any, ...]]:
        """Some of its steps. A shorter job, and one with other nodes, has the same (hot_swap_job.argv)."""
        return steps(self.run_dir)[first : self.iterations if last is None else last]

    def validation_losses(self) -> dict[int, str]:
        """Of the planned steps."""
        return {step: losses for step, losses in validation_losses(self.run_dir).items() if step <= self.iterations}


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory, undisturbed: Path) -> Callable[[str], Reference]:
    """The undisturbed job of a grid, run once for all tests that compare with it."""
    made: dict[str, Reference] = {}

    def reference_of(name: str) -> Reference:
        if name not in made:
            case, faults = GRIDS[name], faults_of(list(GRIDS).index(name), name)
            planned, iterations = schedule(faults, case.world_size)
            run_dir = undisturbed
            if name != "tp2-dp2":
                folder = tmp_path_factory.mktemp("reference")
                run_dir = folder / "run"
                assert run_job(case, run_dir, argv(case, iterations, folder / "checkpoints"))["exit_code"] == 0
            made[name] = Reference(run_dir, faults, planned, iterations)
        return made[name]

    return reference_of


@pytest.mark.parametrize("name", [name for name, case in GRIDS.items() if FULL or case.world_size <= 8])
def test_every_step_is_that_of_an_undisturbed_run(
    name: str, tmp_path: Path, reference_of: Callable[[str], Reference]
) -> None:
    case, reference = GRIDS[name], reference_of(name)
    command = argv(case, reference.iterations, tmp_path / "checkpoints")
    summary = run_job(case, tmp_path / "disturbed", command, spares=1, faults=reference.planned)
    assert summary["exit_code"] == 0, summary["ended"]
    assert len(summary["recoveries"]) == len(reference.faults)
    for fault, recovery in zip(reference.faults, summary["recoveries"], strict=True):
        assert recovery["kind"] == "swap" and len(recovery["nodes_lost"]) == 1
        assert recovery["steps_rerun"] <= 1, (fault, recovery)
    assert steps(tmp_path / "disturbed") == reference.steps()
    assert len(steps(tmp_path / "disturbed")) == reference.iterations
    evaluated = reference.validation_losses()
    assert evaluated and validation_losses(tmp_path / "disturbed") == evaluated
    assert not events(tmp_path / "disturbed", "skipped")


def test_agents_and_workers_lost_alone(tmp_path: Path, reference_of: Callable[[str], Reference]) -> None:
    """The loss of one process on a living node, in whatever way, ends in the same state as the loss of the node: an agent takes its
    node along, a worker is started again on it and reads the agent's slots, a broken collective costs no process.

    The last two strike at one moment: one rank hangs, one on the other node keeps Python's lock, so no process notices anything. What is
    seen is that no rank comes any further, and both are found by not answering the halt.
    """
    case = BY_TWO
    expected = [("kill", "agent", "swap"), ("freeze", "agent", "swap"), ("kill", "worker", "respawn"), ("freeze", "worker", "respawn")]
    expected += [(fault, "worker", "respawn") for fault in ("segv", "exit", "oom")] + [("fail-collective", "worker", "reset")]
    planned = [
        Scheduled(action, scope, (3, 0, 2, 1)[i % 4], 3 + 2 * i, ("forward", "optimizer", "backward")[i % 3])
        for i, (action, scope, _) in enumerate(expected)
    ]
    last = planned[-1].at_step + 2
    planned += [Scheduled("hang", "worker", 2, last, "grad-sync"), Scheduled("spin", "worker", 1, last, "forward")]
    deadlines = "--hot-swap-hang-min-s 8 --hot-swap-collective-timeout-s 14 --hot-swap-halt-timeout-s 15 --hot-swap-respawn-window-s 0.1"
    # With processes that read data ahead, as is Megatron's default: they hold open what a dead worker held.
    command = [*argv(case, last + 2, None, "--num-workers 2"), *deadlines.split()]
    summary = run_job(case, tmp_path / "disturbed", command, spares=1, faults=planned)
    assert summary["exit_code"] == 0, summary["ended"]
    assert [r["kind"] for r in summary["recoveries"]] == [*(kind for *_, kind in expected), "respawn"]
    assert summary["recoveries"][-1]["ranks_respawned"] == [1, 2]
    assert summary["recoveries"][-1]["evidence"][0].startswith("no rank came any further for 8.")
    assert all(r["steps_rerun"] <= 1 for r in summary["recoveries"])
    # A process that was started again has fetched nothing: what it needs is on its node.
    fetched = [p["fetch"] for p, r in zip(events(tmp_path / "disturbed", "plan"), summary["recoveries"], strict=True)]
    assert [bool(ranks) for ranks in fetched] == [r["kind"] == "swap" for r in summary["recoveries"]]
    assert steps(tmp_path / "disturbed") == reference_of("tp2-dp2").steps(0, last + 2)


def test_the_same_error_in_the_same_step_on_two_nodes_is_the_programs(tmp_path: Path) -> None:
    """Hardware is not to blame, so no process and no node is given up for it any more: the job ends, and the error is shown."""
    case = GridCase("dp2", 2, 1, "--use-distributed-optimizer")
    script = Path(__file__).with_name("pretrain_that_fails.py")
    summary = run_job(case, tmp_path, argv(case, 9, None), script=script, return_lost_nodes_after_s=None)
    assert summary["exit_code"] == 1
    assert "failed in step 5: ValueError: a sample that cannot be read" in summary["ended"]
    assert "had failed there in the same way, so it is the program" in summary["ended"]
    assert not events(tmp_path, "node-lost")


def test_continuing_from_a_checkpoint(tmp_path: Path, reference_of: Callable[[str], Reference]) -> None:
    """A job that loads a checkpoint, and loses a node after that, goes on as one that was never interrupted."""
    case = BY_TWO
    checkpoints = tmp_path / "checkpoints"
    run_job(case, tmp_path / "begun", argv(case, 12, checkpoints, f"--exit-interval {EVERY}", "torch_dist"))
    planned, _ = schedule([Fault("kill", "backward")], case.world_size)
    planned[0].at_step = 9
    summary = run_job(case, tmp_path / "continued", argv(case, 12, None, f"--load {checkpoints}"), spares=1, faults=planned)
    assert summary["exit_code"] == 0 and len(summary["recoveries"]) == 1, summary
    reference = reference_of("tp2-dp2")
    assert steps(tmp_path / "begun") == reference.steps(0, EVERY)
    assert steps(tmp_path / "continued") == reference.steps(EVERY, 12)


def test_encrypted_snapshots_bring_a_lost_node_back(tmp_path: Path, reference_of: Callable[[str], Reference]) -> None:
    """With --hot-swap-encrypt replicas travel over TLS, to the holder and back to the spare, with the same bits as the result.

    The job is watched while it trains, in every way that docs/watching.md has."""
    planned, iterations = [Scheduled("kill", "node", 3, 3, "h2h")], 40
    second = Injection("kill", "node", "node0", 0, 1, "backward")  # of the rank that logs, once all has been seen
    run_dir = tmp_path / "disturbed"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    watched = ["--hot-swap-metrics-port", str(port), "--tensorboard-dir", str(tmp_path / "scalars")]
    command, script = [*argv(BY_TWO, iterations, None), "--hot-swap-encrypt", *watched], ROOT / "tests/distributed/pretrain_with_scalars.py"
    with Watcher(run_dir, scraped_from_step=7, then=second) as watcher:
        summary = run_job(BY_TWO, run_dir, command, spares=1, faults=planned, show=watcher, script=script)
        statuses = watcher.statuses()
    assert summary["exit_code"] == 0, summary["ended"]
    assert [(r["kind"], r["bytes_restored"] > 0) for r in summary["recoveries"]] == [("swap", True)] * 2
    assert steps(run_dir) == reference_of("tp2-dp2").steps(0, iterations)
    assert all("encrypted (TLS 1.3)" in log.read_text() for log in (run_dir / "logs").glob("agent-*.log"))
    assert not (run_dir / "credentials").exists()  # the job is over, and its secrets with it
    check_statuses(statuses)
    check_metrics(watcher)
    check_scalars(tmp_path / "scalars", iterations, [sum(r["phases"].values()) for r in summary["recoveries"]])


def check_metrics(watcher: Watcher) -> None:
    """After the first recovery, once training goes on."""
    found = watcher.coordinator
    assert found["deadpool_recoveries_total", "swap"] == found["deadpool_nodes_lost_total",] == 1
    assert found["deadpool_nodes", "active"] == 2 and found["deadpool_restored_bytes_total",] > 0
    assert found["deadpool_step_seconds_count",] > 2
    trained = [samples for samples in watcher.agents.values() if samples["deadpool_slot_bytes",]]
    assert len(trained) == 2
    for samples in trained:
        assert samples["deadpool_h2h_bytes_total",] > 0 and samples["deadpool_replica_bytes",] > 0
        assert samples["deadpool_d2h_seconds_count",] > 0 and samples["deadpool_workers",] == 2


def check_statuses(statuses: list[dict[str, Any]]) -> None:
    """What a program that watches has seen: at some moment the first recovery and its reason, and each rank's holder."""
    recovered = [status for status in statuses if status["recoveries"]]
    assert recovered and all(status["schema"] == 1 for status in statuses)
    (first, *_) = recovered[0]["recoveries"]
    assert first["kind"] == "swap" and first["reasons"] == ["its connection closed"] and first["phases"]["first_step_s"] > 0
    homes = {rank["rank"]: rank["node"] for rank in recovered[-1]["ranks"]}
    assert sorted(homes) == [0, 1, 2, 3] and all(rank["holders"] != [homes[rank["rank"]]] for rank in recovered[-1]["ranks"])


def check_scalars(folder: Path, iterations: int, recoveries_s: list[float]) -> None:
    """Every step has its stall; the count of recoveries outlives the rank that logs, which the first fault takes. What a recovery took
    for one rank is within what it took from fault to first step."""
    lines = [json.loads(line) for line in (folder / "scalars.jsonl").read_text().splitlines()]
    of = {name: [(step, value) for key, value, step in lines if key == f"hot-swap/{name}"] for name in SCALARS}
    assert {step for step, _ in of["exposed-stall-seconds"]} == set(range(1, iterations + 1))
    assert of["recoveries"][-1] == (iterations, 2) and [value for _, value in of["recoveries"]] == sorted(v for _, v in of["recoveries"])
    assert all(0 < value < whole for (_, value), whole in zip(of["recovery-seconds"], recoveries_s, strict=True))
    assert all(step - 2 <= value <= step for step, value in of["committed-generation"])
    assert any(key == "learning-rate" for key, *_ in lines)  # Megatron's own, by the same writer


def test_a_frozen_node_that_wakes_up_is_refused(tmp_path: Path, reference_of: Callable[[str], Reference]) -> None:
    """Guarantee 1: a node thought dead that comes back does no harm and ends itself."""
    case = BY_TWO
    planned, _ = schedule([Fault("freeze", "forward")], case.world_size)
    command = argv(case, 40, None)
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
    assert steps(run_dir) == reference_of("tp2-dp2").steps(0, 40)
    psutil.wait_procs(ghosts, timeout=30)
    assert not [p for p in ghosts if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    said = "".join(log.read_text() for log in (run_dir / "logs").glob("agent-*.log"))
    assert "was given up" in said or "the connection to the coordinator broke" in said


def test_without_the_flag_it_is_plain_megatron(tmp_path: Path, reference_of: Callable[[str], Reference]) -> None:
    """With --hot-swap absent nothing of ours runs, and with it present the losses are still those of plain Megatron."""
    case = BY_TWO
    command = argv(case, 8, None)
    plain = cpu_job.run_job(case.world_size, " ".join(command[: command.index("--hot-swap-wait-for-spare-s")]), tmp_path / "plain")
    ours = [(step, loss["lm loss"], norm) for step, loss, norm, _ in reference_of("tp2-dp2").steps(0, 8)]
    assert ours == [(s.iteration, s.loss, s.grad_norm) for s in plain.last_rank]
    assert plain.hot_swap_modules == {"none"}


def no_cables() -> bool:
    """A container's root may lack the rights."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return True
    command = ["unshare", "--net", "ip", "link", "add", "one", "type", "veth", "peer", "name", "other"]
    return subprocess.run(command, capture_output=True, check=False).returncode != 0


@pytest.mark.skipif(no_cables(), reason="network namespaces need root with its rights, and ip (Debian: iproute2)")
def test_a_cable_is_pulled_and_put_back(tmp_path: Path, reference_of: Callable[[str], Reference]) -> None:
    """Pulled for less than a lease, nothing is lost and nothing happens but a wait. Pulled for good, the node is given up, and ends its
    processes by itself (guarantee 2): nobody else can reach it. With the cable back in, it is a spare again."""
    case = BY_TWO
    pulled_s: list[float] = []
    nodes: list[VirtualNodes] = []
    ended_by_itself: list[str] = []

    def show(coordinator: Coordinator) -> None:
        networks, step = nodes[0].networks, coordinator.recorder.last_step
        assert networks is not None
        if step is not None and step.step >= 5 and not pulled_s:
            networks.unplug("node1")
            pulled_s.append(time.monotonic())
        elif len(pulled_s) == 1 and time.monotonic() - pulled_s[0] > 1.5:
            networks.plug("node1")
            pulled_s.append(time.monotonic())
        if "node1" in nodes[0].ended() and not ended_by_itself:
            ended_by_itself.append("node1")
            nodes[0].start("node1")  # its cable is put in for that

    planned = [Scheduled("unplug", "node", 2, 12, "backward"), Scheduled("kill", "node", 0, 30, "forward")]
    summary = run_job(
        case,
        tmp_path / "disturbed",
        argv(case, 34, None, "--hot-swap-coordinator-timeout-s 30"),
        spares=1,
        faults=planned,
        show=show,
        started=lambda _, virtual: nodes.append(virtual),
        separate_networks=True,
        end_lost_nodes=False,
        return_lost_nodes_after_s=None,
    )
    assert summary["exit_code"] == 0, summary["ended"]
    assert [(r["kind"], r["nodes_lost"]) for r in summary["recoveries"]] == [("swap", ["node1"]), ("swap", ["node0"])]
    assert "silent" in summary["recoveries"][0]["evidence"][0]
    said = (tmp_path / "disturbed/logs/agent-node1.log").read_text()
    assert ended_by_itself and "no step was completed: its ranks are stopped" in said and "no coordinator was found for 30 s" in said
    assert steps(tmp_path / "disturbed") == reference_of("tp2-dp2").steps(0, 34)
