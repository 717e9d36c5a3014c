"""Faults on purpose: whom a wish goes to, or why to nobody. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from . import messages as m
from .decisions import Decision, Log, Send
from .membership import Agent


def arm(injection: m.Injection, agents: Iterable[Agent]) -> list[Decision]:
    """Have the node's agent cause the fault, at once or at its moment."""
    asked = {"node": injection.node, "worker": injection.worker, "action": injection.action}
    if injection.action in m.CABLE_FAULTS and injection.at_step is None:  # the launcher does it, whoever is there
        return [Log(injection.action, f"{injection.action} {injection.node}, now", asked)]
    agents = list(agents)
    on_node = [a for a in agents if a.node == injection.node]
    if not on_node:
        nodes = sorted(a.node for a in agents)
        return [Log("inject-refused", f"there is no node {injection.node!r}; nodes: {nodes}", asked)]
    workers = on_node[0].join.workers
    if not 0 <= injection.worker < workers:
        return [Log("inject-refused", f"there is no worker {injection.worker}; each node has workers 0 to {workers - 1}", asked)]
    if injection.action in m.WORKER_FAULTS and injection.scope != "worker":
        return [Log("inject-refused", f"{injection.action} is a fault of a worker, not of a whole {injection.scope}", asked)]
    text = f"{injection.action} {injection.scope} on {injection.node}"
    if injection.at_step is not None:
        text += f" in step {injection.at_step}, phase {injection.phase or 'forward'}"
    return [Send(on_node[0].incarnation, m.Arm(injection)), Log("inject", text, asked)]
