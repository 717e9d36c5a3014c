"""`deadpool join`: this machine becomes a spare of a job that runs already: another one in place of a node that was lost for good."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from ..coordinator.job_file import read_command, read_job
from ..environment import AgentEnvironment, slurm_task
from ..errors import UsageError
from ..slurm.layout import Layout, gpu_variables, place_of, tasks_per_node
from .client import call


def join(run_dir: Path, node: str | None) -> NoReturn:
    """Become an agent of the job; the exit code is the job's. In a Slurm step each task becomes one.

    Args:
        run_dir: the job's, on a file system that its nodes share.
        node: a name that no other node of the job has; None: this machine's.

    Raises:
        UsageError: no job runs there, or a node of this name is in it.
    """
    status = call(run_dir, detail=True)
    command, job = read_command(run_dir), read_job(run_dir)
    if job is None:
        raise UsageError(f"the job in {run_dir} has just ended")
    place, variables = _place(job.coordinator, job.run_id, command.workers, node)
    if place.node in {agent.node for agent in status.agents}:
        raise UsageError(f"a node named {place.node} is in this job already; if that is another machine, give this one a name: --node NAME")
    ranks = f"{place.workers} rank{'s' if place.workers > 1 else ''}"
    print(f"deadpool: {place.node} joins the job in {run_dir} (run {job.run_id}) as a spare for {ranks}", flush=True)
    arguments = [sys.executable, "-m", "megatron.hotswap", command.script, *command.argv]
    os.chdir(command.folder)
    os.execve(sys.executable, arguments, {**os.environ, "PYTHONUNBUFFERED": "1", **place.export(), **variables})


def _place(coordinator: str, run_id: str, workers: int, node: str | None) -> tuple[AgentEnvironment, dict[str, str]]:
    """The agent's place in the job, and what its workers are told of GPUs."""
    task = slurm_task()
    if task is None:
        return AgentEnvironment(coordinator, run_id, node or socket.gethostname(), workers), {}
    layout = Layout((task.node,), (), tasks_per_node(task), workers)
    place = place_of(task, layout, coordinator, run_id)
    return replace(place, node=node or place.node), gpu_variables(task, layout)
