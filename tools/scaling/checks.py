"""What `deadpool plan` says of a point before it runs: by the same functions, from the same command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.hotswap.cli.plan import job_of
from megatron.hotswap.cli.plan_paper import enough_h2h
from megatron.hotswap.errors import UsageError
from megatron.hotswap.sizing.job import Cluster, Plan, Speeds, make_plan

from .commands import training_command
from .points import Point
from .sites import Site

#: Of a GPU's memory, what weights, gradients and optimizer state may take; the rest is for activations, which are not computed.
DEVICE_SHARE = 0.7
_WEIGHT_BYTES, _GRADIENT_BYTES = 2, 4  # bf16, and fp32 as Megatron accumulates them under --bf16


@dataclass(frozen=True)
class Checked:
    """A point's plan. Bytes are of the worst rank or node."""

    point: Point
    plan: Plan
    device_bytes: int | None  # weights, gradients and optimizer state of a GPU; None on CPUs

    @property
    def nodes(self) -> int:
        """That train."""
        return self.plan.job.cluster.nodes

    @property
    def host_bytes(self) -> int:
        """Slots of the node that has most."""
        return max(self.plan.node_bytes)

    @property
    def checkpoint_bytes(self) -> int:
        """About what a Megatron checkpoint of it takes on the file system: fp32 main parameters, both states, the weights."""
        return 14 * self.plan.parameters

    @property
    def exposed_share(self) -> float | None:
        """Of a step, by data sheets; None: not known."""
        times = self.plan.times
        return None if times.exposed is None or times.step is None else times.exposed / times.step

    @property
    def h2h_that_would_do(self) -> float | None:
        """Bytes a second of a node at which nothing would be exposed; None: not known, or no speed would do."""
        if self.plan.times.exposed is None:
            return None
        found = enough_h2h(self.plan)
        return found if found > 0 else None


def nodes_of(point: Point, site: Site) -> int:
    """Nodes that train.

    Raises:
        UsageError: the ranks do not fill them, or it is one alone.
    """
    nodes, over = divmod(point.gpus, site.ranks_per_node)
    if over or nodes < 2:
        raise UsageError(
            f"{point.name}: {point.gpus} ranks on nodes of {site.ranks_per_node} are {point.gpus / site.ranks_per_node:g} nodes; hot-swap "
            "takes two whole nodes or more"
        )
    return nodes


def check(point: Point, site: Site, speeds: Speeds | None = None) -> Checked:
    """Plan a point, and refuse one that cannot run.

    Args:
        point: the job.
        site: the machine.
        speeds: bytes and operations a second where they were measured; default: the site's, of data sheets.

    Raises:
        UsageError: the grid does not divide, the batch does not, or memory does not suffice.
    """
    point.check()
    cluster = Cluster(
        nodes_of(point, site), site.ranks_per_node, host_memory_bytes=site.host_memory_bytes, on_gpu=site.machine is not None
    )
    job = job_of(training_command(point, site, 1), None, cluster, speeds or site.speeds())
    plan = make_plan(job)
    device = None
    if site.machine is not None:
        device = max((_WEIGHT_BYTES + _GRADIENT_BYTES) * size.parameters + size.copied_bytes for size in plan.sizes)
        if device > DEVICE_SHARE * site.machine.device_memory_bytes:
            raise UsageError(
                f"{point.name}: weights, gradients and optimizer state take {device / 1e9:.1f} GB of a GPU, more than {DEVICE_SHARE:.0%} "
                f"of its {site.machine.device_memory_bytes / 1e9:.0f} GB; more TP, PP or DP makes it less"
            )
    found = Checked(point, plan, device)
    if plan.fits is False:
        raise UsageError(
            f"{point.name}: the snapshots take {found.host_bytes / 1e9:.1f} GB of a node's host memory, which has "
            f"{(site.host_memory_bytes or 0) / 1e9:.0f}; more DP makes it less (deadpool plan says what would do)"
        )
    return found


def check_all(points: Sequence[Point], site: Site, speeds: Speeds | None = None) -> list[Checked]:
    """All of them.

    Raises:
        UsageError: one cannot run.
    """
    return [check(point, site, speeds) for point in points]
