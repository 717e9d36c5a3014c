"""Nodes that live and are not fit to train: what they say of themselves, and what their resets say of them. Pure.

Such a node is replaced while it is alive (a planned swap, rung 3): its ranks go to a spare, its agent stays as a source of snapshots
until every rank has done a step without it, and is dismissed then. Where there is no spare it trains on for as long as it can: a report
is no failure yet, and must not end a job that makes progress. The next spare takes its ranks.
"""

from __future__ import annotations

from collections.abc import Collection

from . import messages as m
from .decisions import Decision, Log, Send
from .membership import Agent
from .phases import Phase
from .recovering import Recovering

_SAYS = {"device": "a device fails", "command": "its health command fails"}


class Health(Recovering):
    """Control (state.py) calls it with the events."""

    def _unhealthy(self, incarnation: str, event: m.Unhealthy, now: float) -> list[Decision]:
        agent = self.agents[incarnation]
        what = f"{_SAYS[event.source]}: {event.reason}"
        data = {"node": agent.node, "source": event.source, "fatal": event.fatal}
        if not event.fatal:
            return [Log("unhealthy", f"node {agent.node}, a warning: {event.reason}", data)]
        if agent.unhealthy.get(event.source) == event.reason or agent.leaving:
            return []
        agent.unhealthy[event.source] = event.reason
        if self.phase in (Phase.GATHERING, Phase.LOADING):  # nothing has begun that would be lost with it
            return [Log("unhealthy", f"node {agent.node}: {what}", data), *self._lose({incarnation: what}, now)]
        if agent.spare:
            text = f"node {agent.node}: {what}; it is a spare, and gets no ranks while that is so"
            return [Log("unhealthy", text, data)]
        orders = self._replace_unhealthy(now)
        if self.phase is Phase.RETURNING:  # known at once, so that no spare takes ranks that says so
            text = "what follows is decided when the job goes on"
        elif agent.leaving:
            text = "a spare takes its ranks"
        elif self.membership is not None and self._free_spares():
            text = "a spare takes its ranks as soon as all that it has lies elsewhere too"
        else:
            text = "there is no spare, so it trains on as long as it can, until one comes"
        return [Log("unhealthy", f"node {agent.node}: {what}; {text}", data), *orders]

    def _healthy_again(self, incarnation: str, event: m.HealthyAgain, now: float) -> list[Decision]:
        agent = self.agents[incarnation]
        if agent.unhealthy.pop(event.source, None) is None:
            return []
        log = Log("healthy", f"node {agent.node}: its {event.source} says no more that it is unhealthy", {"node": agent.node})
        return [log, *(self._assign_spares(now) if self.phase is Phase.HALTING else [])]

    def _replace_unhealthy(self, now: float) -> list[Decision]:
        """Give the ranks of unhealthy nodes to spares, as far as there are some. Call at every tick: a spare may have come."""
        sick = [a for a in self.agents.values() if a.unhealthy and not a.spare]
        return self._replace({a.incarnation: "; ".join(f"{_SAYS[s]}: {why}" for s, why in a.unhealthy.items()) for a in sick}, now)

    def _replace(self, why: dict[str, str], now: float) -> list[Decision]:
        """A planned swap of these agents, as far as there are spares, and once nothing depends on them alone: before the membership's
        first generation is committed, the only copy of a rank may be in the slots of a worker that does not answer any more."""
        idle = self.phase not in (Phase.TRAINING, Phase.HALTING, Phase.RESUMING) or self._at_the_last_rung
        if not why or idle or self.finished or self.committed < self.base or self._vacant():
            return []
        leaving = [self.agents[i] for i in list(why)[: len(self._free_spares())]]
        if not leaving:
            return []
        for agent in leaving:
            out = self.halt_reports if self.phase is Phase.HALTING else {}  # else they are of an earlier halt
            agent.leave(why[agent.incarnation], {r: out[r].own for r in agent.ranks if r is not None and r in out})
            self.quarantine.put(agent.node, why[agent.incarnation], now)
        nodes = [a.node for a in leaving]
        # Another life of such a node may be here already, as a spare.
        twins = {i: refusal for node in nodes for i, refusal in self._spares_in_quarantine(node, now).items()}
        lost = self._lose(twins, now) if twins else []
        what = "; ".join(f"{a.node} is replaced: {a.leaving}" for a in leaving)
        recovery = self._begin_recovery(nodes, [a.leaving for a in leaving], now, now, what=what)
        asked = [Send(a.incarnation, m.TakeStock(self.version)) for a in leaving if a.left_dead]
        return [*lost, *recovery, *asked, *self._quarantine_news(now)]

    def _stock_or_left(self, incarnation: str, event: m.Stock, now: float) -> list[Decision]:
        """At the last rung what everyone could write; from a node that leaves, what its dead processes have left in its slots. It may come
        when the plan is made already: the next plan needs it if a copy turns out to be damaged, and nobody asks twice."""
        agent = self.agents[incarnation]
        if not agent.leaving or self._at_the_last_rung:
            return self._stock(incarnation, event, now)
        agent.left |= {rank: generations for rank, generations in event.snapshots.items() if rank in agent.left_dead}
        agent.left |= dict.fromkeys(agent.left_dead - event.snapshots.keys(), ())
        return self._try_plan(now) if self.phase is Phase.HALTING else []

    def _reset(self, blamed: Collection[int], evidence: str, heard: float, now: float) -> list[Decision]:
        """Rung 1; or 3, if resets have pointed to one node again and again. `blamed` are the ranks that stand out, if not all do."""
        if self.finished:  # as in _lose: who is through its script does not answer a halt any more
            return self._end(0, f"training is done; {evidence} came after it")
        if self.quarantine.expecting or self.resets.on_purpose():
            return self._begin_recovery([], [evidence], heard, now)
        nodes = {a.node: a for a in self._agents_of(blamed)}
        why = self.resets.blame(set(nodes), evidence, now)
        swap = self._replace({next(iter(nodes.values())).incarnation: why}, now) if why else []
        if swap:
            return swap
        return self._stop_if(self._strike([], [evidence]), self._begin_recovery([], [evidence], heard, now), now)

    def _agents_of(self, ranks: Collection[int]) -> list[Agent]:
        assert self.membership is not None
        members = {self.membership.members[rank].incarnation for rank in ranks}
        return [self.agents[i] for i in members if i in self.agents]

    # ---- quarantine

    def _release(self, incarnation: str, event: m.Release, now: float) -> list[Decision]:
        if any(agent.node == event.node for agent in self.agents.values()):
            text = f"node {event.node} is in the job, so there is nothing to release it from; try again once it has left"
            return [Log("release-refused", text, {"node": event.node})]
        held = self.quarantine.all(now)
        if event.node not in held:
            text = f"node {event.node!r} is not in quarantine; in quarantine: {', '.join(sorted(held)) or 'none'}"
            return [Log("release-refused", text, {"node": event.node})]
        self.quarantine.release(event.node)
        self.revision += 1
        return [Log("released", f"node {event.node} may join again", {"node": event.node})]

    def _unfit(self, join: m.Join, now: float) -> str:
        """Why a node of this job must not have ranks, quarantined or unhealthy before it has begun, in words; empty if it may."""
        refusal = self.quarantine.refusal(join.node, now)
        if not refusal and join.unhealthy:
            refusal = f"node {join.node} does not join: {join.unhealthy}; mend that and start its agent again"
        return refusal
