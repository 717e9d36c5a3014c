"""Rung 2 or rung 3: whether a worker that failed on a living node is started again there, or costs its node. Pure.

One process can die of many things that the next one will not meet again; its state lies in the agent's slots, so starting it again
costs no spare. A node whose workers die again and again is another matter. Failures within one recovery count as one, since what
breaks one process often breaks its neighbours too (a watchdog that aborts them all, a full control group); but the same worker only
once, for then starting it again was of no use.
"""

from __future__ import annotations

from .membership import Agent


def no_respawn(agent: Agent, worker: int, recovery: int, in_recovery: bool, now: float, window_s: float) -> str:
    """Why the worker is not to be started again, in words; empty if it is, which is then remembered.

    Args:
        agent: whose worker it is.
        worker: its index.
        recovery: the number of the recovery that is in progress, or else will begin with this failure.
        in_recovery: whether it is in progress already.
        now: the time, s.
        window_s: a node whose workers failed in an earlier recovery is given up for this long.
    """
    if in_recovery and agent.failed_in == recovery:
        if worker in agent.failed:
            return "it was started again in this recovery already"
    elif agent.failed_s is not None and now - agent.failed_s < window_s:
        return f"a worker of this node failed {now - agent.failed_s:.0f} s before, and --hot-swap-respawn-window-s is {window_s:g}"
    else:
        agent.failed = set()
    agent.failed.add(worker)
    agent.failed_in, agent.failed_s = recovery, now
    return ""
