"""What a simulation is made from: the job, its failures, what each way to recover costs. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ..errors import UsageError

HOUR_S = 3600.0
#: Of a restart, where it is not given: the part that reads a checkpoint. Assumed.
LOAD_SHARE = 0.2

#: 419 unexpected interruptions in 54 days on 16,384 GPUs, 8 a node: The Llama 3 Herd of Models (2024), section on reliability.
_LLAMA = "published: The Llama 3 Herd of Models (2024), 419 failures in 54 days on 2048 nodes"
_PAPER = "published: DeadPool, arXiv:2607.01646"


@dataclass(frozen=True)
class Inputs:
    """Seconds unless the name says otherwise. None: derived from the others (see `derived`)."""

    # The job.
    nodes: int = 128
    spares: int = 4
    steps: int = 100_000
    step_s: float = 10.0
    # Failures. A node's rate is 1 / node_mtbf_s whatever share of it comes from groups.
    node_mtbf_s: float = 2048 * 54 * 24 / 419 * HOUR_S
    repair_s: float = 24 * HOUR_S  # mean
    repair_fixed: bool = False  # every repair takes the mean; else exponential
    group_share: float = 0.0  # of failure events: those that take a whole group of nodes at once
    group_nodes: int = 4  # consecutive nodes that fail as one: behind a switch, on one power feed
    # Durable checkpoints. save_s is what training waits for one, load_s the part of restart_s that reads one.
    save_s: float = 30.0
    load_s: float | None = None
    interval_s: float = 1800.0  # of training from one to the next, for checkpoint-restart
    safety_interval_s: float = 4 * HOUR_S  # the same for schemes whose state is in memory: their last resort
    # From the fault to the end of the first new step, less a normal step; nothing for work that is run again.
    restart_s: float = 150.0
    in_memory_s: float | None = None
    in_process_s: float | None = None
    exclude_s: float | None = None
    swap_s: float = 31.2
    # Copies in memory.
    memory_interval_steps: int = 1
    stall_s: float = 0.0  # exposed, each step
    commit_s: float = 0.0  # from a step's end until its generation is committed
    replicas: int = 1
    leave_group: bool = False  # holders are outside the group (--hot-swap-failure-domain switch)
    # Exclude-and-run.
    replica_nodes: int = 1  # nodes of one data-parallel replica of the model: one of them lost idles the others

    def __post_init__(self) -> None:
        for name in ("nodes", "steps", "group_nodes", "memory_interval_steps", "replicas", "replica_nodes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("step_s", "node_mtbf_s", "interval_s", "safety_interval_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be greater than 0, got {getattr(self, name)}")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and math.isnan(value):
                raise UsageError(f"{field.name} must be a number, got {value}")
            endless = ("node_mtbf_s", "interval_s", "safety_interval_s")  # no failures, no checkpoints
            if isinstance(value, float) and math.isinf(value) and field.name not in endless:
                raise UsageError(f"{field.name} must be finite, got {value}")
            if value is not None and value < 0:
                raise UsageError(f"{field.name} must not be negative, got {value}")
        if not self.group_share <= 1:
            raise UsageError(f"group_share is a share of the failures and must be at most 1, got {self.group_share}")
        if self.group_share and self.group_nodes > self.nodes:
            raise UsageError(f"a group of {self.group_nodes} nodes does not fit into a job of {self.nodes}; lower group_nodes")
        if self.nodes % self.replica_nodes:
            raise UsageError(
                f"{self.nodes} nodes are not a multiple of the {self.replica_nodes} nodes of a data-parallel replica; change one of them"
            )
        if self.load_s is not None and self.load_s > self.restart_s:
            raise UsageError(f"load_s ({self.load_s}) is a part of restart_s ({self.restart_s}); correct one of them")

    @property
    def allocated(self) -> int:
        """Nodes that the job holds: those that train and the spares."""
        return self.nodes + self.spares

    @property
    def ideal_s(self) -> float:
        """Wall time without failures, saves and stalls."""
        return self.steps * self.step_s

    @property
    def event_rate(self) -> float:
        """Failure events a second while all allocated nodes are up, such that each node fails once in node_mtbf_s."""
        nodes_an_event = 1.0 - self.group_share + self.group_share * self.group_nodes
        return self.allocated / self.node_mtbf_s / nodes_an_event

    @property
    def job_mtbf_s(self) -> float:
        """Mean time between events that take a node which trains; of single failures the share that spares take is left out."""
        share = (1.0 - self.group_share) * self.nodes / self.allocated + self.group_share
        rate = self.event_rate * share
        return math.inf if rate == 0.0 else 1.0 / rate

    def derived(self, name: str) -> float:
        """The cost of that name, given or derived."""
        given = getattr(self, name)
        if given is not None:
            return float(given)
        if name == "load_s":
            return LOAD_SHARE * self.restart_s
        if name == "in_memory_s":  # all of a restart, but nothing is read from storage
            return self.restart_s - self.derived("load_s")
        if name == "in_process_s":  # processes stay as in a swap, but a checkpoint is read
            return self.swap_s + self.derived("load_s")
        assert name == "exclude_s", name  # groups are rebuilt as in a swap
        return self.swap_s

    def steps_of(self, seconds: float) -> int:
        """An interval of training as a number of steps, at least 1 and at most the job's."""
        if seconds >= self.ideal_s:
            return self.steps
        return max(1, round(seconds / self.step_s))


#: Where a default comes from. What is not published is assumed, and the command says so.
ORIGINS: dict[str, str] = {
    "steps": f"{_PAPER}: 100,000 steps",
    "node_mtbf_s": _LLAMA,
    "restart_s": f"{_PAPER}: about 150 s",
    "swap_s": f"{_PAPER}: 29.8 to 32.6 s, the middle of them",
    "stall_s": f"{_PAPER}: no visible overhead from 32 to 256 GPUs",
    "load_s": f"assumed: {LOAD_SHARE:.0%} of restart_s",
    "in_memory_s": "derived: restart_s - load_s",
    "in_process_s": "derived: swap_s + load_s",
    "exclude_s": "derived: swap_s",
}
ASSUMED = "assumed"
