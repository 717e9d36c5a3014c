"""One job of two nodes and five spares, made by `deadpool sbatch`, to which everything happens in turn until no spare is left; requeued,
it trains to its end. Every loss and gradient norm is that of a job that nothing happened to."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import Lab
from slurm_job import Job, batch, command, coordinators_on, kill, steps_of, submit, tasks_on, training_on, until

pytestmark = pytest.mark.timeout(900)
ITERATIONS = 250
ACTIVE, SPARES = 2, 5
_STARTS_WITHIN_S = 240.0


class Story:
    """What happens, and how long each took."""

    def __init__(self, lab: Lab, job: Job) -> None:
        self.lab, self.job = lab, job
        self.took_s: dict[str, float] = {}

    def tell(self, what: str, happens: Callable[[], None]) -> None:
        """One scenario: it must be over, and training go on, within a minute."""
        began = time.monotonic()
        happens()
        self.job.goes_on()
        self.took_s[what] = time.monotonic() - began
        assert self.took_s[what] < 60, f"{what} took {self.took_s[what]:.1f} s"

    def _recovers(self, node: str, spare: str) -> None:
        """A node's ranks go to this spare."""
        count = len(self.job.events("recovered")) + 1
        until(f"recovery from the loss of {node}", lambda: len(self.job.events("recovered")) >= count)
        assert self.job.events("node-lost")[-1]["node"] == node
        assert self.job.events("assign")[-1]["node"] == spare

    def spare_lost(self) -> None:
        self.lab.crash("n3")
        lost = until("the loss of n3", lambda: self.job.events("node-lost"))
        assert lost[0]["node"] == "n3" and lost[0]["spare"] and not self.job.events("recovery")

    def task_killed(self) -> None:
        (task,) = tasks_on(self.lab, "n2")
        kill(task)
        self._recovers("n2", "n4")

    def coordinator_killed(self) -> None:
        """Only its process: its task starts it again, and it takes the job up, in which nothing has happened."""
        (coordinator,) = coordinators_on(self.lab, "n7")
        kill(coordinator)
        until("the coordinator's return", lambda: self.job.events("coordinator-back"))
        assert len(self.job.events("recovery")) == 1
        assert "the coordinator was killed by SIGKILL; it is started again" in self.job.output.read_text()

    def slurmd_killed(self) -> None:
        self.lab.kill_slurmd("n1")
        self.job.goes_on()
        self.lab.start_slurmd("n1")
        until("slurmd of n1", lambda: "DOWN" not in self.lab.state("n1"))
        assert not self.job.events("recovery")[1:]

    def slurmctld_killed(self) -> None:
        self.lab.kill_slurmctld()
        self.job.goes_on()
        self.lab.start_slurmctld()
        assert until("slurmctld", lambda: self.lab.run("squeue", "-h", "-o", "%T", check=False)) == "RUNNING"

    def crash(self) -> None:
        self.lab.crash("n4")
        self._recovers("n4", "n5")

    def unplug(self) -> None:
        self.lab.unplug("n5")
        self._recovers("n5", "n6")
        assert training_on(self.lab, "n5"), "what runs on a node does not end with its cable"

    def replug(self) -> None:
        self.lab.plug("n5")
        until("the end of the ghosts on n5", lambda: not training_on(self.lab, "n5"))

    def batch_host_lost(self) -> None:
        """It trains too; the job goes on without anybody who waits for its end."""
        self.lab.poweroff("n1")
        self._recovers("n1", "n7")

    def no_spare_left(self) -> None:
        """The keeper finds that the batch script is gone, and requeues the job in its place."""
        began = time.monotonic()
        self.lab.crash("n6")
        summary = until("the end of the first life", self.job.summary)
        assert summary["exit_code"] == 75, summary["ended"]
        self.took_s["no spare left: written, code 75"] = time.monotonic() - began
        self.job.begin_again()
        self.took_s["no spare left, no batch script: requeued"] = time.monotonic() - began


def test_a_job_to_which_everything_happens(lab: Lab, tmp_path: Path) -> None:
    words = command(ITERATIONS, tmp_path / "job" / "save")
    script = batch(words, ACTIVE, SPARES, 1).text()
    job = submit(lab, tmp_path / "job", script)
    story = Story(lab, job)
    try:
        began = time.monotonic()
        until("spares", lambda: len(job.events("joined")) == ACTIVE + SPARES and len(job.events("start")) == 1, _STARTS_WITHIN_S)
        job.goes_on()
        story.took_s["start"] = time.monotonic() - began
        assert job.events("start")[0]["nodes"] == ["n1", "n2"]
        assert job.events("start")[0]["spares"] == ["n3", "n4", "n5", "n6", "n7"]
        story.tell("spare lost", story.spare_lost)
        story.tell("one task killed", story.task_killed)
        story.tell("coordinator killed", story.coordinator_killed)
        story.tell("slurmd killed and restarted", story.slurmd_killed)
        story.tell("slurmctld killed and restarted", story.slurmctld_killed)
        story.tell("crash", story.crash)
        story.tell("unplug", story.unplug)
        story.tell("replug: ghosts fence themselves", story.replug)
        story.tell("batch host lost", story.batch_host_lost)
        assert job.state() == "RUNNING"
        run_dir = job.run_dir
        story.no_spare_left()
        first = steps_of(run_dir)
        began = time.monotonic()
        until("the second life's first step", job.steps, _STARTS_WITHIN_S)
        story.took_s["second life: to its first step"] = time.monotonic() - began
        until("the end", lambda: job.state() not in ("RUNNING", "COMPLETING", "PENDING"), _STARTS_WITHIN_S)
        facts = job.facts()
        assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), facts
        story.took_s["second life: to its end"] = time.monotonic() - began
        assert job.events("start")[0]["generation"] == len(first)
    except BaseException:
        print(job.told())
        raise
    finally:
        lab.run("scancel", job.number, check=False)
        print("\n".join(f"{seconds:6.1f} s  {what}" for what, seconds in story.took_s.items()))
    for node in ("n1", "n3", "n4", "n6"):
        lab.boot(node)
    assert first + job.steps() == undisturbed(lab, tmp_path / "undisturbed")


def undisturbed(lab: Lab, folder: Path) -> list[tuple[object, ...]]:
    """The same training by one srun over two nodes, without a spare: then the first node runs the coordinator too."""
    words = " ".join(command(ITERATIONS, folder / "save"))
    python = batch(words.split(), 2, 0, 0).python
    srun = f"srun --no-kill {python} {words} --hot-swap --hot-swap-ranks-per-node 1"
    job = submit(lab, folder, f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --no-kill --time=30\n{srun}\n")
    until("the end of the undisturbed job", lambda: job.state() not in ("RUNNING", "COMPLETING", "PENDING"), _STARTS_WITHIN_S)
    assert job.facts()["ExitCode"] == "0:0", job.told()
    return job.steps()
