"""What to change where snapshots do not hide behind the step or do not fit into host memory. Pure.

Every proposal is the same plan made again with one thing changed, so its numbers are computed, not guessed.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import UsageError
from .job import Job, Plan, make_plan

_INTERVAL_MAX = 64
_GROWTH = (2, 4, 8, 16)  # times as many nodes, so as many data-parallel ranks
GB = 1e9


def advise(plan: Plan) -> list[str]:
    """Sentences, the most helpful first; empty where nothing is wrong."""
    advice: list[str] = []
    if plan.hides is False or plan.fits is False:
        if not plan.job.optimizer.distributed:
            advice += _shard(plan)
        advice += _more_data_parallel(plan)
    if plan.hides is False:
        advice += _rarer(plan)
        advice += _faster(plan)
    if plan.fits is False or (plan.hides is False and plan.times.h2h and plan.times.h2h > (plan.times.d2h or 0.0)):
        advice += _fewer_ranks_a_node(plan)
    advice += _switches(plan)
    return advice


def _again(job: Job) -> Plan | None:
    try:
        return make_plan(job)
    except UsageError:
        return None


def _better(plan: Plan) -> bool:
    return plan.hides is not False and plan.fits is not False


def _state(plan: Plan) -> str:
    """A plan in half a sentence."""
    parts = [f"{max(s.payload_bytes for s in plan.sizes) / GB:.3g} GB a rank", f"{max(plan.node_bytes) / GB:.3g} GB a node"]
    if plan.times.exposed is not None:
        parts.append(f"{plan.times.exposed:.3g} s exposed a step")
    return ", ".join(parts)


def _shard(plan: Plan) -> list[str]:
    shards = plan.grid.data * plan.grid.context
    other = _again(replace(plan.job, optimizer=replace(plan.job.optimizer, distributed=True)))
    if other is None or shards == 1 or plan.job.optimizer.fp32_tensors != 3:
        return []
    return [f"--use-distributed-optimizer: each rank keeps 1/{shards} of the state ({_state(other)})"]


def _more_data_parallel(plan: Plan) -> list[str]:
    """With as much work for each rank as before, so the same time a step and a larger batch."""
    if not plan.job.optimizer.distributed:
        return []
    job = plan.job
    for factor in _GROWTH:
        cluster = replace(job.cluster, nodes=job.cluster.nodes * factor)
        other = _again(replace(job, cluster=cluster, samples=job.samples * factor))
        if other is not None and _better(other):
            return [
                f"{factor} times the data-parallel ranks (DP {plan.grid.data} to {other.grid.data}, {cluster.nodes} nodes, the same work "
                f"for each rank): {_state(other)}"
            ]
    return []


def _rarer(plan: Plan) -> list[str]:
    for interval in range(plan.job.interval + 1, _INTERVAL_MAX + 1):
        other = _again(replace(plan.job, interval=interval))
        if other is not None and other.hides:
            again = 2 * interval - 1
            return [f"--hot-swap-interval {interval}: a snapshot every {interval} steps hides; a loss runs up to {again} steps again"]
    return []


def _faster(plan: Plan) -> list[str]:
    """What one speed would have to be, the others as they are."""
    times, speeds = plan.times, plan.job.speeds
    if times.chain is None or times.window is None or plan.job.interval > 1:
        return []
    advice = []
    for name, now, seconds in (("D2H of each rank", speeds.d2h, times.d2h), ("H2H of each node", speeds.h2h, times.h2h)):
        if now is None or seconds is None:
            continue
        left = times.window - (times.chain - seconds)
        if left > 0:
            advice.append(f"{name} at {now * seconds / left / GB:.3g} GB/s instead of {now / GB:.3g}: a faster interface, or more of them")
    if not advice:
        advice.append(
            f"no single link is the reason: {times.chain:.3g} s of copying stand against {times.window:.3g} s; only less data or a longer "
            "step helps"
        )
    return advice


def _fewer_ranks_a_node(plan: Plan) -> list[str]:
    cluster = plan.job.cluster
    ranks = cluster.ranks_per_node
    while ranks > 1:
        ranks //= 2
        if cluster.world_size % ranks:
            continue
        other = _again(replace(plan.job, cluster=replace(cluster, nodes=cluster.world_size // ranks, ranks_per_node=ranks)))
        if other is not None and _better(other):
            return [f"{ranks} ranks a node on {cluster.world_size // ranks} nodes: {_state(other)}"]
    return []


def _switches(plan: Plan) -> list[str]:
    losses, cluster = plan.losses, plan.job.cluster
    if losses.switches is None or losses.switches_survived == losses.switches:
        return []
    if losses.switches == 1:
        return ["all nodes are behind one switch, so its loss takes every copy: spread the nodes over two switches or more"]
    other = _again(replace(plan.job, cluster=replace(cluster, leave_switch=True)))
    if other is None or cluster.leave_switch:
        return []
    return [
        f"--hot-swap-failure-domain switch: {other.losses.switches_survived} of {losses.switches} switches could be lost whole, instead of "
        f"{losses.switches_survived}"
    ]
