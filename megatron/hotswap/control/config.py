"""The job's shape and its deadlines, as the core needs them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..errors import UsageError
from ..recovery.plan import DurableFolder
from ..topology.grid import Grid


@dataclass(frozen=True)
class Durable:
    """Where durable generations are written, and what the job begins from. Folders are names below `root`, newest generation first."""

    root: str
    shape: Mapping[str, int]  # sizes of the grid, by their flags: a snapshot is loaded only by the grid that wrote it
    keep: int = 2  # whole generations
    begin: tuple[DurableFolder, ...] = ()  # what to load at start: the first one that is undamaged
    refused: tuple[str, ...] = ()  # what is there and cannot be used, in words
    checkpoints: str = ""  # where Megatron saves, if the same command also loads from there


@dataclass(frozen=True)
class ControlConfig:
    """The job's shape and its deadlines. The relations between the deadlines are checked here, once."""

    run_id: str
    token: str
    grid: Grid
    nodes: int
    spares: int
    lease_s: float = 3.0
    heartbeat_interval_s: float = 0.5
    halt_timeout_s: float = 30.0  # from the halt order to a survivor's report; then its node is given up
    long_work_s: float = 300.0  # the same for a rank that has said that it is at long work
    resume_timeout_s: float = 120.0  # from the plan to the last rank's "restored"; then the silent nodes are given up
    wait_for_spare_s: float = 60.0
    respawn_timeout_s: float = 60.0  # from the order to start a worker again until it is warm; then its node is given up
    respawn_window_s: float = 600.0  # a node whose workers fail again within this time is given up
    quarantine_failures: int = 3  # of one node within the window, from which it gets no ranks any more
    quarantine_window_s: float = 3600.0
    hang_factor: float = 10.0  # normal steps without any rank's progress, from which a job hangs
    hang_min_s: float = 30.0  # the least time without any
    replicas: int = 1  # of each rank's snapshot, in as many other failure domains
    settle_s: float = 30.0  # at start: how long spares are waited for once enough nodes are there
    interval: int = 1  # steps between snapshots
    durable: Durable | None = None  # None: the job has nowhere to write
    on_failure: Literal["swap", "restart"] = "swap"  # restarting.py
    taken_last: tuple[str, ...] = ()  # spares that get ranks only if there is no other: on their machine is the coordinator

    def __post_init__(self) -> None:
        if self.lease_s < 3 * self.heartbeat_interval_s:
            raise UsageError(
                f"a lease must outlast three heartbeats, or one late message ends a healthy node: --hot-swap-lease-s is "
                f"{self.lease_s}, --hot-swap-heartbeat-interval-s is {self.heartbeat_interval_s}; raise the first"
            )
        if self.halt_timeout_s <= self.lease_s:
            raise UsageError(
                f"--hot-swap-halt-timeout-s ({self.halt_timeout_s}) must be longer than --hot-swap-lease-s ({self.lease_s}): a "
                "second node may fall silent during a recovery, and must be noticed first"
            )
        if self.hang_factor < 2 or self.hang_min_s < self.lease_s:
            raise UsageError(
                "a job hangs when no rank has come any further for at least two steps and one lease, or every slow step would be taken "
                f"for a hang: --hot-swap-hang-factor is {self.hang_factor}, --hot-swap-hang-min-s is {self.hang_min_s}, "
                f"--hot-swap-lease-s is {self.lease_s}; raise the first two"
            )
        if self.quarantine_failures < 1:
            raise UsageError(
                f"--hot-swap-quarantine-failures must be at least 1, got {self.quarantine_failures}: a node is put into quarantine at its "
                "first failure (1) or at a later one; a large number puts none there but for its health"
            )
        if self.nodes == 1:
            raise UsageError(
                "replicas need at least two nodes, since a rank and its holder must not fail together: --nodes is 1; start the job "
                "on two nodes or more, or train without --hot-swap"
            )
        if self.replicas < 1:
            raise UsageError(f"--hot-swap-replicas must be at least 1, got {self.replicas}; without --hot-swap there are none")
        if self.nodes < self.replicas + 1:
            raise UsageError(
                f"{self.replicas} replicas of each rank need {self.replicas + 1} nodes, since no two copies may fail together: --nodes is "
                f"{self.nodes}; start the job on more nodes or lower --hot-swap-replicas"
            )
        if self.nodes < 1 or self.grid.world_size % self.nodes:
            raise UsageError(
                f"every node holds the same number of ranks: {self.grid.world_size} ranks on {self.nodes} nodes do not divide; "
                "change --nodes or --ranks-per-node"
            )

    @property
    def ranks_per_node(self) -> int:
        """Workers of each node."""
        return self.grid.world_size // self.nodes
