"""Closed forms that the simulation is compared with, and that answer at once where they hold. Pure.

Sources: J. W. Young (1974), A first order approximation to the optimum checkpoint interval; J. T. Daly (2006), A higher order estimate
of the optimum checkpoint interval for restart dumps; nodes in repair as a queue with a server for everyone (M/G/infinity), failures
of groups as batches of it.
"""

from __future__ import annotations

import math

from .inputs import Inputs

_EXPONENT_MAX = 500.0


def young_interval(save_s: float, mtbf_s: float) -> float:
    """Seconds of training from one checkpoint to the next that lose least, to first order in save_s / mtbf_s."""
    return math.sqrt(2.0 * save_s * mtbf_s)


def daly_interval(save_s: float, mtbf_s: float) -> float:
    """The same, with Daly's higher-order terms (his equation 37); where a save takes two MTBFs or more, the MTBF."""
    if math.isinf(mtbf_s):
        return math.inf
    if save_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2.0 * mtbf_s)
    return young_interval(save_s, mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - save_s


def expected_wall(work_s: float, interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Expected wall time of checkpoint-restart under failures at a constant rate, also during restarts (Daly's equation 20).

    Exact but for a last interval that is not saved; nobody waits for nodes.
    """
    cycle = math.expm1((interval_s + save_s) / mtbf_s)
    return mtbf_s * math.exp(restart_s / mtbf_s) * cycle * work_s / interval_s


def _poisson_sum(batches: dict[int, float], upto: int) -> list[float]:
    """P(n) for n <= upto, where n is the sum of `size` times a Poisson variable, for each size and its mean in `batches`."""
    total = sum(batches.values())
    if total > _EXPONENT_MAX:  # else P(0) would be too small for a float: two independent halves
        half = _poisson_sum({size: mean / 2 for size, mean in batches.items()}, upto)
        return [math.fsum(half[k] * half[n - k] for k in range(n + 1)) for n in range(upto + 1)]
    pmf = [math.exp(-total)]
    for n in range(1, upto + 1):
        pmf.append(sum(size * mean * pmf[n - size] for size, mean in batches.items() if size <= n) / n)
    return pmf


def _binomial(n: int, p: float, upto: int) -> list[float]:
    """P(k of n) for k <= upto."""
    if p == 0.0:
        return [1.0] + [0.0] * upto
    return [
        math.exp(math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * math.log(p) + (n - k) * math.log1p(-p))
        if k <= n
        else 0.0
        for k in range(upto + 1)
    ]


def nodes_in_repair(inputs: Inputs, upto: int) -> list[float]:
    """P(n nodes of the allocation are in repair) for n = 0..upto, long after the begin.

    Single failures only: exact (each node is up or down by itself, whatever the law of repair times): binomial. With groups: batches
    into a queue with a server for everyone; an exponential repair leaves n of a group of k at the rate k, k-1, …, so that group is seen
    with j nodes as j times a Poisson variable of mean (load / j). An upper bound by as much as nodes that are down cannot fail.
    """
    down = inputs.repair_s / (inputs.node_mtbf_s + inputs.repair_s) if math.isfinite(inputs.node_mtbf_s) else 0.0
    n = inputs.allocated
    if inputs.group_share == 0.0:
        return _binomial(n, down, upto)
    nodes_an_event = 1.0 - inputs.group_share + inputs.group_share * inputs.group_nodes
    load = n * down / nodes_an_event  # of events in repair, at the rate that leaves n x down nodes down on average
    grouped = load * inputs.group_share
    batches = {1: load - grouped}
    sizes = [inputs.group_nodes] if inputs.repair_fixed else range(1, inputs.group_nodes + 1)
    for size in sizes:
        batches[size] = batches.get(size, 0.0) + (grouped if inputs.repair_fixed else grouped / size)
    return _poisson_sum(batches, upto)


def wait_probability(inputs: Inputs) -> float:
    """Of the failures that take a node which trains, the share that finds too few spares.

    A failure sees the nodes that were in repair before it. Single ones: exact (d in repair leave min(nodes, allocated - d) that train,
    which is the rate of failures that see d). Groups: as if all of the group trained, or were spares that it takes with it.
    """
    spares, n = inputs.spares, inputs.allocated
    if math.isinf(inputs.node_mtbf_s):
        return 0.0
    if inputs.group_share == 0.0:
        pmf = nodes_in_repair(inputs, n)
        rates = [p * min(inputs.nodes, n - d) for d, p in enumerate(pmf)]
        return math.fsum(rates[spares:]) / math.fsum(rates)
    pmf = nodes_in_repair(inputs, spares)
    single = 1.0 - math.fsum(pmf[:spares])
    group = 1.0 - math.fsum(pmf[: max(0, spares - inputs.group_nodes + 1)])
    singles = (1.0 - inputs.group_share) * inputs.nodes / n
    return max(0.0, (singles * single + inputs.group_share * group) / (singles + inputs.group_share))
