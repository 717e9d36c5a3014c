"""One task of a job step: it finds the job in the run directory and becomes an agent of it. Chosen ones keep the coordinator as well."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..agent.main import run_agent
from ..config import HotSwapConfig, parse
from ..coordinator.job_file import Job, read_job
from ..coordinator.stores import JOURNAL
from ..environment import SlurmTask
from ..errors import UsageError
from .layout import Layout, gpu_variables, place_of, work_out
from .run_files import is_of_life, read_layout, refusal, refuse, split_run_dir, with_run_dir

#: A large job's tasks do not start at once, and the coordinator's imports take their time on a busy file system.
_WAIT_FOR_JOB_S = 600.0
_SAID_EVERY_S = 30.0
_POLL_S = 0.2
_ANSWERS_WITHIN_S = 3.0
#: Exit code of what is to be tried again, by Slurm's requeue.
REQUEUE = 75


@dataclass(frozen=True)
class Started:
    """What a task knows once it has read its own command line."""

    task: SlurmTask
    layout: Layout
    config: HotSwapConfig
    script: str
    argv: list[str]  # without --hot-swap-run-dir

    @property
    def run_dir(self) -> Path:
        """Where the job's files are."""
        return self.config.run_dir

    @property
    def command(self) -> list[str]:
        """What its workers run."""
        return [self.script, *with_run_dir(self.argv, self.run_dir)]


def run_task(script: str, argv: Sequence[str], task: SlurmTask) -> int:
    """Be this task of the job; returns its exit code, which is the job's.

    Raises:
        UsageError: the job cannot be laid out, or does not begin.
    """
    run_dir, rest = split_run_dir(argv, task)
    config = parse(with_run_dir(rest, run_dir))
    make_run_dir(run_dir)
    try:
        layout = read_layout(run_dir, task) or work_out(task, config.spares, config.ranks_per_node, config.replicas)
    except UsageError as wrong:
        refuse(run_dir, task, str(wrong))
        raise
    started = Started(task, layout, config, script, rest)
    if task.local_index == 0 and task.node in started.layout.keepers(movable=config.store != JOURNAL):
        from .keeper import keep

        return keep(started)
    job = wait_for_job(run_dir, task)
    return REQUEUE if job is None else be_agent(started, job)


def make_run_dir(run_dir: Path) -> None:
    """With its folder for logs.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise UsageError(
            f"the run directory {run_dir} cannot be made: {failure}; give another one, on a file system that all nodes share, with "
            "--hot-swap-run-dir DIR"
        ) from failure


def be_agent(started: Started, job: Job) -> int:
    """Until the job is over; returns the exit code."""
    task, layout = started.task, started.layout
    place = place_of(task, layout, job.coordinator, job.run_id)
    return run_agent(started.config, started.command, gpu_variables(task, layout), place)


def wait_for_job(run_dir: Path, task: SlurmTask, limit_s: float = _WAIT_FOR_JOB_S) -> Job | None:
    """The job of this life, once its coordinator answers. None: it did not come in time; said, with what to look at.

    Raises:
        UsageError: whoever was to start it has refused.
    """
    began = said = time.monotonic()
    while True:
        if reason := refusal(run_dir, task):
            raise UsageError(reason)
        job = read_job(run_dir)
        if job is not None and of_this_life(job, task) and answers(job):
            return job
        now = time.monotonic()
        where = "nobody says where it is" if job is None else f"{job.coordinator} does not answer"
        waited = f"{task.node}: no coordinator of job {task.job} in {run_dir} after {now - began:.0f} s ({where})"
        if now - began > limit_s:
            print(
                f"deadpool: {waited}: the node that is to run it may be down, or {run_dir} not be on a file system that all nodes share",
                file=sys.stderr,
                flush=True,
            )
            return None
        if now - said > _SAID_EVERY_S:
            said = now
            print(f"deadpool: {waited}; still waiting", file=sys.stderr, flush=True)
        time.sleep(_POLL_S)


def of_this_life(job: Job, task: SlurmTask) -> bool:
    """Whether a job file was written since Slurm last started this job."""
    return is_of_life(job.run_id, task)


def answers(job: Job) -> bool:
    """Whether somebody listens where the coordinator is said to be. (Who it is, the agent will find out by its certificate.)"""
    host, port = job.coordinator.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWERS_WITHIN_S).close()
    except OSError:
        return False
    return True
