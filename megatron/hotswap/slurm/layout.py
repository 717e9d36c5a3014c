"""Which of a Slurm job's nodes train, which are spares, and how many ranks each task has. Pure: what Slurm says comes as an argument.

Every task works this out by itself, from the same words, so that nobody has to be asked. One srun over all nodes and one srun per node
must both do: a step of one node is taken for a part of the whole job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..environment import AgentEnvironment, SlurmTask
from ..errors import UsageError
from ..host_list import expand_counts, expand_hosts


@dataclass(frozen=True)
class Layout:
    """The job's shape. A node's tasks have names of their own where there are several of them."""

    active: tuple[str, ...]
    spares: tuple[str, ...]
    tasks_per_node: int
    ranks_per_task: int

    @property
    def ranks_per_node(self) -> int:
        """GPUs in use on each node."""
        return self.tasks_per_node * self.ranks_per_task

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return len(self.active) * self.ranks_per_node

    def keepers(self, movable: bool) -> list[str]:
        """Nodes that run a coordinator: the last spare, which is the last to be used, or the first node where there is none. If decisions
        are recorded outside the nodes (`movable`), another one on the first node stands by."""
        last = self.spares[-1] if self.spares else self.active[0]
        return [last, *(n for n in self.active[:1] if movable and n != last)]

    def agents(self, node: str) -> list[str]:
        """The names of a node's agents, one for each of its tasks."""
        return [node] if self.tasks_per_node == 1 else [f"{node}.{index}" for index in range(self.tasks_per_node)]

    def agent(self, task: SlurmTask) -> str:
        """The name of a task's agent."""
        return self.agents(task.node)[task.local_index]


def place_of(task: SlurmTask, layout: Layout, coordinator: str, run_id: str) -> AgentEnvironment:
    """The place in the job of the agent that a task becomes."""
    host = task.node if layout.tasks_per_node > 1 else ""
    return AgentEnvironment(coordinator, run_id, layout.agent(task), layout.ranks_per_task, host=host)


def work_out(task: SlurmTask, spares: int, ranks_per_node: int | None, replicas: int) -> Layout:
    """The layout of the task's job.

    Args:
        task: what Slurm says.
        spares: how many nodes are spares (--hot-swap-spares).
        ranks_per_node: what the user says; None: a rank for each GPU that Slurm has given the job on a node.
        replicas: of each snapshot.

    Raises:
        UsageError: it does not come out even, in words.
    """
    in_step = expand_hosts(task.step_nodes)
    nodes = in_step if len(in_step) > 1 else expand_hosts(task.job_nodes)
    tasks = tasks_per_node(task)
    if tasks > 1 and replicas > 1:
        raise UsageError(
            f"{replicas} replicas of a snapshot are to be on as many nodes, and with {tasks} tasks on each node two of them might be on "
            "one: start the job with --ntasks-per-node=1 (one agent for all ranks of a node), or leave --hot-swap-replicas at 1"
        )
    if spares < 0 or len(nodes) - spares < 2:
        raise UsageError(
            f"hot-swap trains on two nodes at least, since a rank and its replica must not be lost together: the job has {len(nodes)} "
            f"({task.job_nodes if nodes is not in_step else task.step_nodes}), and --hot-swap-spares is {spares}; ask Slurm for more nodes "
            "or keep fewer as spares"
        )
    ranks = _ranks_per_node(task, tasks, ranks_per_node)
    return Layout(tuple(nodes[: len(nodes) - spares]), tuple(nodes[len(nodes) - spares :]), tasks, ranks // tasks)


def tasks_per_node(task: SlurmTask) -> int:
    """Of the task's step.

    Raises:
        UsageError: nodes differ in it.
    """
    counts = expand_counts(task.step_tasks_per_node)
    if len(set(counts)) != 1:
        raise UsageError(
            f"every node of a job has the same number of tasks; Slurm started {task.step_tasks_per_node} on {task.step_nodes}: give "
            "--ntasks-per-node=1 (one agent for all ranks of a node), or as many tasks as a node has GPUs"
        )
    return counts[0]


def _ranks_per_node(task: SlurmTask, tasks: int, wanted: int | None) -> int:
    ranks = wanted or task.gpus_on_node or (tasks if tasks > 1 else None)
    if ranks is None:
        raise UsageError(
            f"how many ranks does node {task.node} have? Slurm has given this job no GPUs there (SLURM_GPUS_ON_NODE is not set): ask for "
            "them (--gpus-per-node=N), or say the number with --hot-swap-ranks-per-node N"
        )
    if ranks < 1 or ranks % tasks:
        raise UsageError(
            f"the ranks of a node are dealt evenly to its tasks: {ranks} ranks do not divide by {tasks} tasks; give --ntasks-per-node=1, "
            f"--ntasks-per-node={max(ranks, 1)}, or another --hot-swap-ranks-per-node"
        )
    return ranks


def gpu_variables(task: SlurmTask, layout: Layout) -> dict[str, str]:
    """What a task's workers are told of GPUs, where several tasks see the same ones."""
    gpus = gpus_of(task, layout)
    return {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def gpus_of(task: SlurmTask, layout: Layout) -> Sequence[str] | None:
    """The GPUs that this task's ranks may use, as CUDA_VISIBLE_DEVICES names them; None: all that it sees are its own.

    Slurm may have bound each task to its own (--gpus-per-task, --gpu-bind), or show all of the node's to every task: then each takes its
    share.
    """
    if layout.tasks_per_node == 1 or len(task.visible_gpus) != layout.ranks_per_node:
        return None
    first = task.local_index * layout.ranks_per_task
    return task.visible_gpus[first : first + layout.ranks_per_task]
