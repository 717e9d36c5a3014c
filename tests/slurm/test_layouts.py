"""What else a user may do: one task for each rank; a job whose coordinator's node is lost."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_server import EtcdServer
from lab import Lab
from slurm_job import Job, batch, command, coordinators_on, kill, steps_of, submit, tasks_on, until

pytestmark = pytest.mark.timeout(600)
_STARTS_WITHIN_S = 240.0


@contextlib.contextmanager
def attended(lab: Lab, job: Job, node: str) -> Iterator[None]:
    """A job of which everything is told if the test fails, and that ends with it; the node that it broke comes up again."""
    try:
        yield
    except BaseException:
        print(job.told())
        raise
    finally:
        lab.run("scancel", job.number, check=False)
        lab.boot(node)


JOIN = (sys.executable, "-m", "megatron.hotswap.cli.main", "join", "--run-dir")


def test_one_task_for_each_rank(lab: Lab, tmp_path: Path) -> None:
    """Two tasks on each node are two agents of one failure domain: both are lost with their node, and two take over: of a node that another
    job of Slurm's has brought, since on the spare is the coordinator. The lost node is drained at the end."""
    words = command(150, tmp_path / "job" / "save", "--tensor-model-parallel-size 2")
    script = batch(words, 2, 1, 1, ranks_per_node=2, tasks_per_node=2, drain=True).text()
    job = submit(lab, tmp_path / "job", script, "--nodelist=n1,n2,n3")
    with attended(lab, job, "n2"):
        start = until("training", lambda: job.events("start"), _STARTS_WITHIN_S)[0]
        assert start["nodes"] == ["n1.0", "n1.1", "n2.0", "n2.1"] and start["spares"] == ["n3.0", "n3.1"]
        hosts = [name.split(".")[0] for name in start["nodes"]]
        assert all(hosts[h] != hosts[rank] for rank, held_by in enumerate(start["holders"]) for h in held_by)
        joins = "#!/bin/sh\nsrun " + shlex.join([*JOIN, str(job.run_dir)])
        other = submit(lab, tmp_path / "other", joins, "--nodelist=n4", "--ntasks-per-node=2")
        try:
            until("two more spares", lambda: {"n4.0", "n4.1"} <= {e["node"] for e in job.events("spare")}, _STARTS_WITHIN_S)
            lab.crash("n2")
            until("a recovery", lambda: job.events("recovered"))
            assert sorted(e["node"] for e in job.events("assign")) == ["n4.0", "n4.1"]
            until("the end", lambda: job.state() not in ("RUNNING", "COMPLETING"), _STARTS_WITHIN_S)
            assert job.state() == "COMPLETED" and len(job.steps()) == 150
            assert "DRAIN" in lab.state("n2") and "DRAIN" not in lab.state("n1")
            assert f"Reason=deadpool: lost by job {job.number}" in lab.run("scontrol", "-o", "show", "node", "n2")
            until("its end too", lambda: other.state() not in ("RUNNING", "COMPLETING"))
            assert (other.state(), other.facts()["ExitCode"]) == ("COMPLETED", "0:0")
        finally:
            print(other.told())
            lab.run("scancel", other.number, check=False)
            lab.run("scontrol", "update", "NodeName=n2", "State=RESUME", check=False)


@contextlib.contextmanager
def started_again(lab: Lab, job: Job, node: str) -> Iterator[None]:
    """A node's task is killed, the spare takes its rank, and another task that a user starts on it is the next spare."""
    (task,) = tasks_on(lab, node)
    kill(task)
    until("a recovery", lambda: job.events("recovered"))
    known = len(job.events("spare"))
    srun = ["srun", f"--jobid={job.number}", "--overlap", "--no-kill", "-N1", "-n1", "-w", node, *JOIN, str(job.run_dir)]
    with subprocess.Popen(lab.login(*srun), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as again:
        try:
            until("another spare", lambda: len(job.events("spare")) > known)
            assert job.events("spare")[-1]["node"] == node
            yield
        finally:
            again.terminate()


@pytest.mark.skipif(os.environ.get("DEADPOOL_FULL_MATRIX") != "1", reason="takes a minute and a half: make test-all runs it")
def test_the_coordinators_node_is_lost(lab: Lab, tmp_path: Path) -> None:
    """The one node whose loss ends a life of the job, as the job has said. Its other tasks end, and it is requeued; what a user had
    saved meanwhile, from the login node, is gone on from."""
    save = tmp_path / "job" / "save"
    words = command(100_000, save, "--hot-swap-coordinator-timeout-s 5")
    job = submit(lab, tmp_path / "job", batch(words, 2, 1, 0).text(), "--exclude=n1,n2,n3")
    with attended(lab, job, "n6"):
        until("training", lambda: job.events("start"), _STARTS_WITHIN_S)
        assert "the loss of n6 ends this life of the job" in job.output.read_text()
        job.goes_on()
        deadpool = [sys.executable, "-m", "megatron.hotswap.cli.main"]
        assert "is durable" in lab.run(*deadpool, "save", str(job.run_dir))
        assert "spares: n6" in lab.run(*deadpool, "status", "--run-dir", str(job.run_dir))
        saved = job.events("durable")[0]["generation"]
        with started_again(lab, job, "n4"):
            job.goes_on()
            lab.poweroff("n6")
            until("the end of the first life", lambda: job.facts()["Restarts"] == "1")
        run_dir = job.run_dir
        job.begin_again()
        first = {step[0]: step for step in steps_of(run_dir)}
        job_start = until("the second life", lambda: job.events("start"), _STARTS_WITHIN_S)[0]
        assert (job_start["nodes"], job_start["generation"]) == (["n4", "n5"], saved)
        job.goes_on()
        again = [step for step in job.steps() if step[0] in first]
        assert again == [first[step[0]] for step in again]


@pytest.mark.skipif(os.environ.get("DEADPOOL_FULL_MATRIX") != "1", reason="takes a minute: make test-all runs it")
def test_under_etcd_the_coordinators_node_is_a_node_like_any_other(lab: Lab, tmp_path: Path) -> None:
    """The first node's task keeps a coordinator too, which stands by. The last spare's node is cut off, with the coordinator that leads,
    and then a node that trains is lost: the first node's coordinator sees to both. What was cut off comes back, and leads nobody."""
    (tmp_path / "etcd").mkdir()
    with EtcdServer(tmp_path / "etcd", "10.77.0.1", lab.login()) as etcd:
        words = command(100_000, tmp_path / "job" / "save", f"--hot-swap-store {etcd.name}")
        job = submit(lab, tmp_path / "job", batch(words, 2, 2, 2).text(), "--nodelist=n1,n2,n3,n4")
        with attended(lab, job, "n2"):
            until("training", lambda: job.events("start"), _STARTS_WITHIN_S)
            assert "no single node is needed" in job.output.read_text()
            job.goes_on()
            lab.unplug("n4")
            try:
                until("another coordinator", lambda: job.events("coordinator-back"), _STARTS_WITHIN_S)
                job.goes_on()
                assert coordinators_on(lab, "n4"), "it lives on behind its cable, and leads nobody"
                lab.crash("n2")
                recovery = until("a recovery", lambda: job.events("recovered"), _STARTS_WITHIN_S)[0]["recovery"]
                assert (recovery["kind"], recovery["nodes_lost"]) == ("swap", ["n2"])
                job.goes_on()
            finally:
                lab.plug("n4")
            job.goes_on(20)
            assert len(job.events("coordinator-back")) == 1 and len(job.events("recovered")) == 1
            assert [step for step, *_ in job.steps()] == list(range(1, len(job.steps()) + 1))
            assert (job.state(), job.facts()["Restarts"]) == ("RUNNING", "0")


def test_a_mistake_ends_the_job_in_words_and_is_not_requeued(lab: Lab, tmp_path: Path) -> None:
    """Whoever finds it, all tasks end with it: what only the keeper looks at, and what every task sees."""
    uneven = submit(lab, tmp_path / "uneven", batch([*command(9, tmp_path / "uneven" / "save"), "--num-layers", "0"], 2, 0, 0).text())
    until("its end", lambda: uneven.state() not in ("PENDING", "RUNNING", "COMPLETING"), _STARTS_WITHIN_S)
    assert (uneven.state(), uneven.facts()["ExitCode"], uneven.facts()["Restarts"]) == ("FAILED", "2:0", "0")
    assert "--num-layers must be at least 1, got 0" in uneven.output.read_text()
    script = batch(command(9, tmp_path / "replicas" / "save"), 2, 0, 0, ranks_per_node=3, tasks_per_node=3).text()
    replicas = submit(lab, tmp_path / "replicas", script.replace("--hot-swap-ranks-per-node 3", "--hot-swap-ranks-per-node 4"))
    until("its end", lambda: replicas.state() not in ("PENDING", "RUNNING", "COMPLETING"), _STARTS_WITHIN_S)
    assert (replicas.state(), replicas.facts()["ExitCode"]) == ("FAILED", "2:0")
    assert "4 ranks do not divide by 3 tasks" in replicas.output.read_text()
