"""Guarantee 10: the coordinator is lost, or its node, or it freezes; training goes on, and another coordinator takes the job up."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_server import EtcdServer
from hot_swap_job import BY_TWO, GRIDS, REFERENCE_STEPS, ROOT, GridCase, argv, events, steps
from test_copies import agent_of

from megatron.hotswap.cli.launch import Launch, VirtualNodes, prepare
from megatron.hotswap.coordinator.job_file import Setup, read_job, write_setup

_PATIENCE_S = 240.0
pytestmark = pytest.mark.timeout(900)


def until(happened: Callable[[], Any]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Job:
    """A job whose coordinators are processes of their own."""

    def __init__(self, run_dir: Path, store: str, spares: int, case: GridCase = BY_TWO) -> None:
        self.run_dir = run_dir
        command = argv(case, REFERENCE_STEPS, None, f"--hot-swap-store {store}")
        self._launch = Launch(case.nodes, case.ranks_per_node, spares, str(ROOT / "pretrain_gpt.py"), command, run_dir)
        self._control = prepare(self._launch)
        write_setup(run_dir, Setup(self._control, store))
        self.coordinators: list[subprocess.Popen[bytes]] = []
        self.nodes: VirtualNodes

    def coordinator(self) -> subprocess.Popen[bytes]:
        """One more."""
        command = [sys.executable, "-m", "megatron.hotswap.coordinator", "--run-dir", str(self.run_dir)]
        with open(self.run_dir / "logs" / f"coordinator{len(self.coordinators)}.log", "wb") as log:
            self.coordinators.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log))
        return self.coordinators[-1]

    def start_nodes(self) -> None:
        """All of them, once a coordinator is there."""
        until(lambda: read_job(self.run_dir) is not None)
        job = read_job(self.run_dir)
        assert job is not None
        self.nodes = VirtualNodes(self._launch, job.coordinator, self._control.run_id)
        for index in range(self._launch.nodes + self._launch.spares):
            self.nodes.start(f"node{index}")

    def leader(self) -> subprocess.Popen[bytes]:
        """The one that job.json names."""
        job = read_job(self.run_dir)
        assert job is not None
        (leads,) = (c for c in self.coordinators if c.pid == job.pid)
        return leads

    def written(self) -> int:
        """How many steps have their lines."""
        path = self.run_dir / "steps.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def more_steps(self, count: int = 2) -> None:
        """Wait for them."""
        before = self.written()
        until(lambda: self.written() >= before + count)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """As hot_swap_job.events, of what there is so far."""
        path = self.run_dir / "events.jsonl"
        return events(self.run_dir, kind) if path.exists() else []

    def end(self) -> None:
        """Whatever still runs."""
        for coordinator in self.coordinators:
            coordinator.kill()
            coordinator.wait()
        if hasattr(self, "nodes"):
            self.nodes.end()


@contextlib.contextmanager
def job(run_dir: Path, store: str, spares: int, monkeypatch: pytest.MonkeyPatch, case: GridCase = BY_TWO) -> Iterator[Job]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    running = Job(run_dir, store, spares, case)
    try:
        yield running
    finally:
        running.end()


def recoveries(run_dir: Path) -> list[tuple[str, list[str]]]:
    """Kind and nodes lost of each; none has cost more than a step."""
    found = json.loads((run_dir / "summary.json").read_text())["recoveries"]
    assert all(r["steps_rerun"] <= 1 for r in found)
    return [(r["kind"], r["nodes_lost"]) for r in found]


def test_a_coordinator_that_is_started_again_takes_up_its_journal(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job(tmp_path / "run", "journal", 2, monkeypatch) as running:
        serving = running.coordinator()
        running.start_nodes()
        until(lambda: running.written() >= 5)
        serving.kill()
        serving.wait()
        before = running.written()
        time.sleep(3.0)  # steps are completed meanwhile, which nobody writes down
        serving = running.coordinator()
        until(lambda: running.written() > before + 1)
        running.nodes.kill("node1")
        until(lambda: running.events("recovered"))
        running.more_steps()
        serving.kill()
        serving.wait()
        running.nodes.kill("node0")  # while nobody is there to see it
        time.sleep(1.0)
        serving = running.coordinator()
        assert serving.wait(timeout=_PATIENCE_S) == 0
        assert steps(tmp_path / "run") == steps(undisturbed)
        assert len(running.events("coordinator-back")) == 2
        assert recoveries(tmp_path / "run") == [("swap", ["node1"]), ("swap", ["node0"])]


@pytest.mark.skipif(os.environ.get("DEADPOOL_FULL_MATRIX") != "1", reason="takes a minute: make test-all")
def test_a_coordinator_to_which_few_agents_come_back_gives_nobody_up(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four agents stand still for longer than their lease when a coordinator takes the job up: it may be cut off itself."""
    with job(tmp_path / "run", "journal", 0, monkeypatch, GRIDS["tp2-dp2"]) as running:
        serving = running.coordinator()
        running.start_nodes()
        until(lambda: running.written() >= 5)
        serving.kill()
        serving.wait()
        away = [agent_of(f"node{index}") for index in (1, 2, 3)]
        for agent in away:
            agent.suspend()
        serving = running.coordinator()
        cut_off = "1 of 4 agents are here; it may be the coordinator that is cut off"
        until(lambda: any(cut_off in event["reason"] for event in running.events("waiting")))
        for agent in away:
            agent.resume()
        assert serving.wait(timeout=_PATIENCE_S) == 0
        assert steps(tmp_path / "run") == steps(undisturbed)
        assert not running.events("node-lost")
        assert all(kind == "reset" for kind, _ in recoveries(tmp_path / "run"))


def test_under_etcd_the_node_of_the_coordinator_may_be_lost_and_a_frozen_one_comes_too_late(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etcd").mkdir()
    with EtcdServer(tmp_path / "etcd") as etcd, job(tmp_path / "run", etcd.name, 1, monkeypatch) as running:
        first = running.coordinator()
        running.start_nodes()
        second = running.coordinator()  # it stands by
        until(lambda: running.written() >= 5)
        first.kill()  # and its node with it
        running.nodes.kill("node0")
        first.wait()
        until(lambda: running.events("recovered"))
        assert running.leader() is second
        running.more_steps()

        third = running.coordinator()
        time.sleep(2.0)
        os.kill(second.pid, signal.SIGSTOP)
        until(lambda: running.leader() is third)
        running.more_steps()  # the agents have found it
        os.kill(second.pid, signal.SIGCONT)  # it believes that it leads, for a moment
        assert third.wait(timeout=_PATIENCE_S) == 0
        assert second.wait(timeout=_PATIENCE_S) == 0  # it stood by, and heard that the job is over
        assert "leaves the job to another one" in (tmp_path / "run" / "logs" / "coordinator1.log").read_text()
        assert steps(tmp_path / "run") == steps(undisturbed)
        assert len(running.events("coordinator-back")) == 2
        assert recoveries(tmp_path / "run") == [("swap", ["node0"])]
