"""The environment, read here and nowhere else, once, at start.

Whoever starts an agent tells it its place in these variables: `deadpool run` in its own, Slurm in those that srun sets for a task
(slurm/ makes a place out of them). An agent tells its workers theirs.
"""

from __future__ import annotations

import getpass
import os
import socket
import tempfile
from dataclasses import dataclass

from .errors import UsageError


@dataclass(frozen=True)
class AgentEnvironment:
    """An agent's place in the job."""

    coordinator: str  # host:port
    run_id: str
    node: str
    workers: int
    host: str = ""  # the machine, where several agents are on it, each a node by a name of its own
    launcher_pid: int | None = None  # whose death is this agent's end, where it was started on the same machine

    def export(self) -> dict[str, str]:
        """The variables that say this."""
        return {
            "DEADPOOL_COORDINATOR": self.coordinator,
            "DEADPOOL_RUN_ID": self.run_id,
            "DEADPOOL_NODE": self.node,
            "DEADPOOL_WORKERS": str(self.workers),
            **({"DEADPOOL_HOST": self.host} if self.host else {}),
            **({"DEADPOOL_LAUNCHER_PID": str(self.launcher_pid)} if self.launcher_pid is not None else {}),
        }


@dataclass(frozen=True)
class WorkerEnvironment:
    """What an agent gives a worker: inherited descriptors, and where it stands on its node."""

    link_fd: int
    control_fd: int
    run_id: str
    incarnation: str  # of the agent
    node: str
    worker: int
    workers: int
    address: str  # of this node, where peers reach what the worker serves
    agent_pid: int
    tmp: str  # where temporary files belong (agent/scratch.py)

    def export(self) -> dict[str, str]:
        """The variables that say this."""
        return {
            "DEADPOOL_LINK_FD": str(self.link_fd),
            "DEADPOOL_CONTROL_FD": str(self.control_fd),
            "DEADPOOL_RUN_ID": self.run_id,
            "DEADPOOL_INCARNATION": self.incarnation,
            "DEADPOOL_NODE": self.node,
            "DEADPOOL_WORKER": str(self.worker),
            "DEADPOOL_WORKERS": str(self.workers),
            "DEADPOOL_ADDRESS": self.address,
            "DEADPOOL_AGENT_PID": str(self.agent_pid),
            "TMPDIR": self.tmp,
            "TORCHINDUCTOR_CACHE_DIR": _compile_cache(),
        }


@dataclass(frozen=True)
class SlurmTask:
    """What srun tells a task. Lists of hosts are as Slurm writes them, "n[1-3,7]"."""

    job: int
    restarts: int  # how often the job has been requeued
    job_nodes: str
    step_nodes: str
    step_tasks_per_node: str  # "2(x3),1"
    node_index: int  # in the step
    local_index: int  # of the task on its node
    node: str
    gpus_on_node: int
    visible_gpus: tuple[str, ...]  # that this task sees, where somebody has said so
    srun_address: str  # of the host that srun runs on


def _compile_cache() -> str:
    """Where torch's compiler keeps its results. By default that is below TMPDIR, but they are to outlive a worker: the next job, and a
    spare, are to find them."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = f"uid_{os.getuid()}"
    usual = os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR", usual)


def agent() -> AgentEnvironment:
    """Read an agent's place.

    Raises:
        UsageError: nobody told: hot-swap was not started by a launcher.
    """
    missing = [n for n in ("COORDINATOR", "RUN_ID", "NODE", "WORKERS") if f"DEADPOOL_{n}" not in os.environ]
    if missing:
        raise UsageError(
            "--hot-swap needs to know its coordinator and its node, and no launcher said so (missing: "
            + ", ".join(f"DEADPOOL_{n}" for n in missing)
            + "); start the job by srun under Slurm, or on this machine with: deadpool run --nodes N --ranks-per-node R --spares S -- "
            "SCRIPT …"
        )
    env = os.environ
    return AgentEnvironment(
        env["DEADPOOL_COORDINATOR"],
        env["DEADPOOL_RUN_ID"],
        env["DEADPOOL_NODE"],
        int(env["DEADPOOL_WORKERS"]),
        env.get("DEADPOOL_HOST", ""),
        int(env["DEADPOOL_LAUNCHER_PID"]) if "DEADPOOL_LAUNCHER_PID" in env else None,
    )


def launched() -> bool:
    """Whether a launcher of ours has told this process its place."""
    return "DEADPOOL_COORDINATOR" in os.environ


def slurm_task() -> SlurmTask | None:
    """What srun has told this process; None: it is no task of a job step. (A batch script has SLURM_JOB_ID, but is no task.)"""
    env = os.environ
    if not {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID"} <= env.keys():
        return None
    return SlurmTask(
        int(env["SLURM_JOB_ID"]),
        int(env.get("SLURM_RESTART_COUNT") or 0),
        env.get("SLURM_JOB_NODELIST") or env["SLURM_STEP_NODELIST"],
        env["SLURM_STEP_NODELIST"],
        env["SLURM_STEP_TASKS_PER_NODE"],
        int(env.get("SLURM_NODEID") or 0),
        int(env["SLURM_LOCALID"]),
        env.get("SLURMD_NODENAME") or socket.gethostname(),
        int(env.get("SLURM_GPUS_ON_NODE") or 0),
        tuple(visible_gpus() or ()),
        env.get("SLURM_LAUNCH_NODE_IPADDR", ""),
    )


def slurm_topology() -> tuple[str, str] | None:
    """The node's place in the network as Slurm tells its tasks: (names from the top down to the node, what each is), with dots
    between; None where it does not."""
    env = os.environ
    if "SLURM_TOPOLOGY_ADDR" not in env:
        return None
    return env["SLURM_TOPOLOGY_ADDR"], env.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")


def visible_gpus() -> list[str] | None:
    """The GPUs that this process may use, by index or UUID, as CUDA reads them; None: all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if visible is None else [x.strip() for x in visible.split(",") if x.strip()]


def in_training() -> bool:
    """Whether this process was started by an agent to train a rank (or by such a process)."""
    return "DEADPOOL_WORKER" in os.environ


def worker() -> WorkerEnvironment:
    """Read a worker's place, and take the descriptors out of the environment, so that no child mistakes itself for it."""
    env = os.environ
    place = WorkerEnvironment(
        int(env.pop("DEADPOOL_LINK_FD")),
        int(env.pop("DEADPOOL_CONTROL_FD")),
        env["DEADPOOL_RUN_ID"],
        env["DEADPOOL_INCARNATION"],
        env["DEADPOOL_NODE"],
        int(env["DEADPOOL_WORKER"]),
        int(env["DEADPOOL_WORKERS"]),
        env["DEADPOOL_ADDRESS"],
        int(env["DEADPOOL_AGENT_PID"]),
        env["TMPDIR"],
    )
    for fd in (place.link_fd, place.control_fd):
        os.set_inheritable(fd, False)
    return place


def say_rank(rank: int, world_size: int, local_rank: int, local_world_size: int) -> None:
    """Tell Megatron's parser and torch the rank, in the variables that they read."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(local_world_size)
    )
