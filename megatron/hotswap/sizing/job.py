"""A whole job: bytes of every rank, node and link, their time against the step, and which losses it survives. Pure.

What is compared with what follows the fence (docs/architecture.md). Before the next optimizer step a snapshot must have been copied to
the host. Before the optimizer step that ends in the next snapshot it must have been checksummed, sent to its holders, checksummed there
and acknowledged too, one after the other. With a snapshot every step all of it must fit into one forward and backward pass; what does
not is exposed stall.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..replication.placement import Survival, place, survival
from ..snapshot.layout import HEADER_BYTES, plan_layout
from ..topology.grid import Grid
from .model import ModelShape, Split, flops_per_step, require_divisible, total_parameters
from .shards import OptimizerKind, SnapshotSize, StageSizes

#: Slots of a rank in its own agent's memory, and for each replica in its holder's (snapshot/slots.py).
SLOTS_EACH = 2
#: A rank's metadata are random states above all (torch 5056 bytes, NumPy 2496, Python 3125, five of a GPU 16 each or, where the CPU
#: stands for it, 5056 each: torch.cuda's and Megatron's three, with torch's own), then scalars: at most so much in all, and a few
#: bytes for every parameter.
METADATA_BYTES_GPU = 14_000
METADATA_BYTES_CPU = 34_000
_METADATA_BYTES_PER_TENSOR = 8
#: Where the time of forward and backward was not given: this share of the step. An assumption, and said to be one.
FORWARD_BACKWARD_SHARE = 0.9


@dataclass(frozen=True)
class Cluster:
    """Nodes that train. `replicas`: copies of each snapshot on other nodes, behind other switches too if `leave_switch`."""

    nodes: int
    ranks_per_node: int
    replicas: int = 1
    host_memory_bytes: int | None = None  # of a node, for slots
    nodes_per_switch: int | None = None  # consecutive nodes
    leave_switch: bool = False
    on_gpu: bool = True

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Speeds:
    """Bytes a second; None: not known, so its time is not counted. `h2h` is a node's, in each direction, shared by its ranks."""

    d2h: float | None = None
    h2h: float | None = None
    checksum: float | None = None  # of one rank, on one core
    step_s: float | None = None
    forward_backward_s: float | None = None
    flops_per_gpu: float | None = None  # reached, not peak; gives the step's time where it is not known


@dataclass(frozen=True)
class Job:
    """All that a plan is made from."""

    shape: ModelShape
    split: Split
    optimizer: OptimizerKind
    sequence: int
    samples: int  # a step
    cluster: Cluster
    speeds: Speeds
    interval: int = 1  # steps from a snapshot to the next
    skip_when_late: bool = False  # a snapshot that is due while the one before is under way is skipped, not waited for


@dataclass(frozen=True)
class Times:
    """Seconds of one step, of the slowest rank or link; None where a speed is not known."""

    interval: int
    skip_when_late: bool

    step: float | None
    step_is_estimate: bool
    window: float | None  # forward and backward
    window_is_assumed: bool
    d2h: float | None
    checksum: float | None
    h2h: float | None

    @property
    def chain(self) -> float | None:
        """From the end of the optimizer step to the acknowledgement: what must fit into the window. A checksum at both ends."""
        if self.d2h is None or self.h2h is None:
            return None
        return self.d2h + 2 * (self.checksum or 0.0) + self.h2h

    @property
    def exposed(self) -> float | None:
        """What a step waits at its fence, on average over an interval: for the copy at the first one, for the holders at the last."""
        if self.chain is None or self.window is None or self.d2h is None:
            return None
        copy = max(0.0, self.d2h - self.window)
        if self.interval == 1:
            return copy if self.skip_when_late else max(0.0, self.chain - self.window)
        if self.step is None:
            return None
        since = copy + self.window + (self.interval - 1) * self.step
        holders = 0.0 if self.skip_when_late else max(0.0, self.chain - since)
        return (copy + holders) / self.interval

    @property
    def taken_every(self) -> int | None:
        """Steps from one snapshot to the next that is really taken; None where a time is not known."""
        if not self.skip_when_late:
            return self.interval
        if self.chain is None or self.window is None or self.step is None:
            return None
        steps = 1 + max(0, math.ceil((self.chain - self.window) / self.step))
        return self.interval * math.ceil(steps / self.interval)


@dataclass(frozen=True)
class Losses:
    """Which losses leave a copy of every snapshot."""

    nodes: Survival
    switches: int | None
    switches_survived: int | None  # of all nodes behind one


@dataclass(frozen=True)
class Plan:
    """The answer. Lists go by rank, or by node."""

    job: Job
    grid: Grid
    parameters: int  # of the model
    sizes: tuple[SnapshotSize, ...]
    slot_bytes: tuple[int, ...]
    node_bytes: tuple[int, ...]
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    times: Times
    losses: Losses

    @property
    def worst_rank(self) -> int:
        """The rank with the largest payload."""
        return max(range(len(self.sizes)), key=lambda r: self.sizes[r].payload_bytes)

    @property
    def fits(self) -> bool | None:
        """Whether the slots fit into host memory; None where that is not known."""
        limit = self.job.cluster.host_memory_bytes
        return None if limit is None else max(self.node_bytes) <= limit

    @property
    def hides(self) -> bool | None:
        """Whether no step waits; None where a time is not known."""
        return None if self.times.exposed is None else self.times.exposed == 0.0


def make_plan(job: Job) -> Plan:
    """Compute everything.

    Raises:
        UsageError: the sizes do not fit each other, or there is no node for a replica.
    """
    cluster, split = job.cluster, job.split
    _check(cluster, job.speeds)
    require_divisible(job.shape, split)
    grid = Grid(cluster.world_size, split.tensor, split.pipeline, split.context)
    sizes = _sizes(job, grid)
    slots = tuple(_slot_bytes(size, cluster.on_gpu) for size in sizes)
    nodes = [r // cluster.ranks_per_node for r in range(grid.world_size)]
    domains = [f"switch{n // cluster.nodes_per_switch}" for n in nodes] if cluster.leave_switch and cluster.nodes_per_switch else None
    names = [f"node{n}" for n in nodes]
    holders = place(grid, names, cluster.replicas, domains)
    memory, sent, received = ([0] * cluster.nodes for _ in range(3))
    for rank, node in enumerate(nodes):
        memory[node] += SLOTS_EACH * slots[rank]
        frame = HEADER_BYTES + _metadata_bytes(sizes[rank], cluster.on_gpu) + sizes[rank].payload_bytes
        for holder in (nodes[h] for h in holders[rank]):
            memory[holder] += SLOTS_EACH * slots[rank]
            sent[node] += frame
            received[holder] += frame
    return Plan(
        job=job,
        grid=grid,
        parameters=total_parameters(job.shape),
        sizes=sizes,
        slot_bytes=slots,
        node_bytes=tuple(memory),
        sent_bytes=tuple(sent),
        received_bytes=tuple(received),
        times=_times(job, sizes, max(*sent, *received)),
        losses=_losses(cluster, nodes, holders, survival(holders, names, domains or names)),
    )


def _check(cluster: Cluster, speeds: Speeds) -> None:
    for name, count in (("nodes", cluster.nodes), ("ranks per node", cluster.ranks_per_node)):
        if count < 1:
            raise UsageError(f"the number of {name} must be at least 1, got {count}")
    if cluster.leave_switch and cluster.nodes_per_switch is None:
        raise UsageError("replicas are to leave the switch, but how many nodes one has is not said; give --nodes-per-switch")
    if cluster.nodes_per_switch is not None and cluster.nodes_per_switch < 1:
        raise UsageError(f"the number of nodes per switch must be at least 1, got {cluster.nodes_per_switch}")
    for name in ("d2h", "h2h", "checksum", "step_s", "forward_backward_s", "flops_per_gpu"):
        value = getattr(speeds, name)
        if value is not None and not value > 0:
            raise UsageError(f"{name} must be greater than 0, got {value}")
    if speeds.step_s is not None and (speeds.forward_backward_s or 0.0) > speeds.step_s:
        raise UsageError(
            f"forward and backward ({speeds.forward_backward_s} s) are a part of the step ({speeds.step_s} s); correct one of them"
        )


def _sizes(job: Job, grid: Grid) -> tuple[SnapshotSize, ...]:
    split = job.split
    per_stage = grid.world_size // grid.pipeline
    apart = split.expert * split.expert_tensor
    if per_stage % apart:
        raise UsageError(
            f"the ranks of a pipeline stage must be a multiple of expert x expert-tensor parallel size: {per_stage} is not a multiple of "
            f"{split.expert} x {split.expert_tensor}; change a size or the number of nodes"
        )
    shards, expert_shards = grid.data * grid.context, per_stage // apart
    stages = [StageSizes(job.shape, split, job.optimizer, s, shards, expert_shards) for s in range(grid.pipeline)]
    known: dict[tuple[int, int, int], SnapshotSize] = {}
    sizes = []
    for rank in range(grid.world_size):
        _, context, data, stage = grid.coordinates(rank)
        key = (stage, context + grid.context * data, rank % per_stage // apart)
        if key not in known:
            known[key] = stages[stage].of(key[1], key[2])
        sizes.append(known[key])
    return tuple(sizes)


def _metadata_bytes(size: SnapshotSize, on_gpu: bool) -> int:
    return (METADATA_BYTES_GPU if on_gpu else METADATA_BYTES_CPU) + _METADATA_BYTES_PER_TENSOR * size.tensors


def _slot_bytes(size: SnapshotSize, on_gpu: bool) -> int:
    room = plan_layout((), _metadata_bytes(size, on_gpu)).metadata_room_bytes
    return HEADER_BYTES + room + size.payload_bytes


def _times(job: Job, sizes: Sequence[SnapshotSize], link_bytes: int) -> Times:
    speeds = job.speeds
    step, estimate = speeds.step_s, False
    if step is None and speeds.flops_per_gpu is not None:
        flops = flops_per_step(job.shape, job.sequence, job.samples)
        step, estimate = flops / job.cluster.world_size / speeds.flops_per_gpu, True
    window = speeds.forward_backward_s
    assumed = window is None and step is not None
    if window is None and step is not None:
        window = FORWARD_BACKWARD_SHARE * step
    copied = max(s.copied_bytes for s in sizes)
    checked = max(s.payload_bytes for s in sizes)
    return Times(
        interval=job.interval,
        skip_when_late=job.skip_when_late,
        step=step,
        step_is_estimate=estimate,
        window=window,
        window_is_assumed=assumed,
        d2h=None if speeds.d2h is None else copied / speeds.d2h,
        checksum=None if speeds.checksum is None else checked / speeds.checksum,
        h2h=None if speeds.h2h is None else link_bytes / speeds.h2h,
    )


def _losses(cluster: Cluster, nodes: Sequence[int], holders: Sequence[Sequence[int]], found: Survival) -> Losses:
    if cluster.nodes_per_switch is None:
        return Losses(found, None, None)
    switches = -(-cluster.nodes // cluster.nodes_per_switch)
    behind = [{nodes[r] // cluster.nodes_per_switch for r in (rank, *held)} for rank, held in enumerate(holders)]
    return Losses(found, switches, switches - len({b.pop() for b in behind if len(b) == 1}))
