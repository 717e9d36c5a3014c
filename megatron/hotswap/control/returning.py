"""A coordinator that takes up a job which another one has begun: itself in a former life, or one whose node was lost. Pure.

What was decided is known (decided.py); who still lives is not. So the first phase is RETURNING: agents that had joined come back and
say where they stand (Rejoin). Once every agent of the membership is here, or the time for that is over, the job goes on: with nothing
at all, if it trains; with a recovery, if one was under way, if somebody is missing, or if ranks have stopped for want of a coordinator.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping

from . import messages as m
from .config import ControlConfig
from .decided import Decided, Leaver
from .decisions import Decision, Log, Send
from .membership import Agent, refusal_of
from .phases import Phase
from .starting import Starting

#: How many leases the agents of a membership are waited for. They notice a closed connection at once and a silent one within a lease,
#: and ask for a coordinator several times in one.
_RETURN_LEASES = 2
_NOT_HEARD = f"it was not heard within {_RETURN_LEASES} leases of the coordinator's return"


class Returning(Starting, abc.ABC):
    """Control (state.py) calls it with the events."""

    @abc.abstractmethod
    def handle(self, incarnation: str, event: m.Event, now: float) -> list[Decision]:
        """Take one event of an agent."""

    def __init__(self, config: ControlConfig, decided: Decided | None = None, now: float = 0.0) -> None:
        """With `decided`, take up what it says; `now` is the time."""
        super().__init__(config)
        self._back: dict[str, m.Rejoin] = {}  # agents of the membership that are here again
        self._not_back: dict[str, str] = {}  # those that came and were lost again -> evidence
        self._said_early: list[tuple[str, m.Event]] = []  # what they say meanwhile
        self._resumes = False
        self._patient_until_s = now + max(_RETURN_LEASES * config.lease_s, config.wait_for_spare_s)
        self._says_patience = True
        self._leavers: Mapping[str, Leaver] = {}  # nodes that were leaving, by incarnation
        self._ranks: tuple[m.Membership | None, dict[str, dict[int, int]]] = (None, {})  # see _ranks_of
        if decided is not None:
            self._take_up(decided, now)

    def _take_up(self, decided: Decided, now: float) -> None:
        self.version, self.membership, self.fenced = decided.version, decided.membership, dict(decided.fenced)
        self.start, self._resumes = decided.start, decided.training
        # Steps are not recorded. Where there is a membership there may have been some, and then one error is not the program's yet.
        self.newest_step, self.stepped = decided.newest_step, decided.membership is not None
        self.durable_generation, self.durable_folder = decided.durable_generation, decided.durable_folder
        self.tried, self.attempts = decided.tried, decided.attempts
        self.quarantine.take_up(decided.quarantine)
        self.loop.take_up(decided.strikes)
        self.resets.take_up(decided.resets)
        if decided.exit_code is not None:
            self.phase, self.exit_code, self.exit_reason = Phase.ENDED, decided.exit_code, decided.exit_reason
        elif self.membership is not None:
            self.phase = Phase.RETURNING
            self.newest_step_known, self._leavers = False, decided.leaving
            self.deadline_s = now + _RETURN_LEASES * self.config.lease_s

    @property
    def decided(self) -> Decided:
        """What the next coordinator needs. `revision` (job.py) says when it has changed."""
        gathering = self.phase in (Phase.GATHERING, Phase.LOADING)
        training = self.phase is Phase.TRAINING or (self.phase is Phase.RETURNING and self._resumes)
        leavers = {i: Leaver(a.node, a.leaving, tuple(sorted(a.left_ranks)), a.left_up_to) for i, a in self.agents.items() if a.leaving}
        return Decided(
            self.config.run_id,
            self.version,
            None if gathering else self.membership,
            training,
            self.start,
            dict(self.fenced),  # it is recorded in another thread, and more may be given up meanwhile
            self.newest_step,
            self.durable_generation,
            self.durable_folder,
            self.tried,
            self.attempts,
            self.quarantine.remembered(None if training else len(self.recoveries)),
            self.loop.strikes,
            self.resets.all,
            {**self._leavers, **leavers},
            self.exit_code,
            self.exit_reason,
        )

    # ---- agents come back

    def _rejoin(self, incarnation: str, event: m.Rejoin, now: float) -> list[Decision]:
        mine, leaver = self._ranks_of(incarnation), self._leavers.get(incarnation)
        needed = bool(mine) or leaver is not None
        out = self._admit(incarnation, event.join, now, f"came back after {event.away_s:.1f} s without a coordinator", needed)
        agent = self.agents.get(incarnation)
        if agent is None:  # refused
            return out
        if leaver is not None:
            agent.leaving, agent.left_ranks, agent.left_up_to = leaver.why, frozenset(leaver.ranks), leaver.up_to
        for worker, rank in mine.items():
            agent.ranks[worker] = rank
            if event.ranks.get(worker) == rank:
                agent.ready.add(worker)
        if not needed and self.config.durable is not None and self.version > 0:
            # It may have filled its slots, or be filling them, for a membership that was never decided, or without it: as a spare it
            # would take what it has there for its rank's.
            folder = self.config.durable.begin[self.tried :][:1]
            out += [Send(incarnation, m.Load(self.version, self.config.durable.root, x.folder, {})) for x in folder]
        if self.phase is not Phase.RETURNING or not needed:
            return out
        if mine:
            self._back[incarnation] = event
            if not self._says_patience and self.deadline_s is not None:  # the way is free again: the others follow
                self.deadline_s = max(self.deadline_s, now + _RETURN_LEASES * self.config.lease_s)
            self._not_back.pop(incarnation, None)
        return out + self._go_on_returning(now)

    def _admit(self, incarnation: str, join: m.Join, now: float, how: str, needed: bool = False) -> list[Decision]:
        """Let an agent in, or say why not. Who is `needed` has ranks, or snapshots of them: it is judged by what it says of itself now."""
        refusal = refusal_of(join, self.config) or ("" if needed else self._unfit(join, now))
        if refusal:
            return [Send(incarnation, m.Refused(refusal)), Log("refused", refusal, {"node": join.node})]
        self.agents[incarnation] = Agent(join, now, ranks=[None] * join.workers)
        welcome = m.Welcome(self.config.lease_s, self.config.heartbeat_interval_s)
        return [Send(incarnation, welcome), Log("joined", f"node {join.node} {how}", {"node": join.node})]

    def _ranks_of(self, incarnation: str) -> dict[int, int]:
        """worker -> rank, in the membership that was decided. Thousands of agents come back: it is turned round once for all."""
        if self._ranks[0] is not self.membership:
            self._ranks = self.membership, {}
            for rank, member in enumerate(self.membership.members if self.membership is not None else ()):
                self._ranks[1].setdefault(member.incarnation, {})[member.worker] = rank
        return self._ranks[1].get(incarnation, {})

    def _hold(self, incarnation: str, event: m.Event, now: float) -> list[Decision]:
        """Its meaning depends on how the job goes on."""
        self._said_early.append((incarnation, event))
        return []

    def _lost_returning(self, incarnation: str, event: m.AgentLost, now: float) -> list[Decision]:
        if self.agents.pop(incarnation, None) is not None and self._back.pop(incarnation, None) is not None:
            self._not_back[incarnation] = event.evidence
        return []

    # ---- going on

    def _go_on_returning(self, now: float) -> list[Decision]:
        """Call when an agent has come back, and at every tick."""
        assert self.membership is not None and self.deadline_s is not None
        if len(self._back) < self.config.nodes and now <= self.deadline_s:
            return []
        members = dict.fromkeys(x.incarnation for x in self.membership.members)
        missing = [i for i in members if i not in self._back]
        # In a recovery the memory of nodes that leave may be needed. After it, they are only told that it is over.
        leavers = [i for i in self._leavers if i not in self.agents and not self._resumes]
        if (missing or leavers) and now <= self.deadline_s:
            return []
        here = f"{len(self._back)} of {len(members)} agents are here"
        # Who reaches less than half of a job may be cut off itself. Then the others train on, and to give them up would cost them all.
        if 2 * len(self._back) < len(members) and now <= self._patient_until_s:
            if not self._says_patience:
                return []
            self._says_patience, wait_s = False, self._patient_until_s - now
            text = f"{here}; it may be the coordinator that is cut off, so the others are waited for {wait_s:.0f} s more"
            return [Log("waiting", text, {"back": sorted(self._back)})]
        self._enter(Phase.TRAINING)
        self.deadline_s = None
        text = f"the coordinator is back, with membership {self.version} as it was decided: {here}"
        out: list[Decision] = [Log("coordinator-back", text, {"version": self.version, "back": sorted(self._back)})]
        out += self._let_go()
        unheard = self._unheard_start() if self._resumes and self.start is not None else []
        unassigned = self._unassigned(now) if not unheard else {}
        out += unheard
        lost, evidence = self._give_up(missing, out, now)
        stopped = [self.agents[i].node for i, event in self._back.items() if event.halted]
        evidence += [f"{node} had stopped its ranks, for want of a coordinator" for node in stopped]
        if not self._resumes:
            evidence.append("the coordinator was lost while a recovery was under way")
        if evidence or unassigned:
            evidence = evidence or [f"{sorted(unassigned.values())} have no process"]
            out += self._begin_recovery(lost, evidence, now, now, unassigned)
        else:
            out += self._lose({i: agent.leaving for i, agent in self.agents.items() if agent.leaving}, now)
        early, self._said_early = self._said_early, []
        for incarnation, said in early:
            if incarnation in self.agents and self.exit_code is None:
                out += self.handle(incarnation, said, now)
        return out

    def _let_go(self) -> list[Decision]:
        """Nodes that were leaving and are not here: what they have is gone with them."""
        out: list[Decision] = []
        for incarnation, leaver in self._leavers.items():
            if incarnation not in self.agents:
                why = leaver.why if self._resumes else f"{leaver.why}; {_NOT_HEARD}"
                self.fenced[incarnation] = why
                data = {"node": leaver.node, "incarnation": incarnation, "spare": False, "left": True}
                out.append(Log("node-lost", f"{leaver.node}: {why}", data))
        self._leavers = {}
        return out

    def _unheard_start(self) -> list[Decision]:
        """Agents that have not heard which ranks are theirs, in the membership that training begins with: it waits for them."""
        assert self.start is not None
        waiting = [i for i, event in self._back.items() if event.version < self.start.membership.version]
        for incarnation in waiting:
            self.agents[incarnation].ready = set(range(self.config.ranks_per_node))
        return [Send(i, self.start) for i in waiting]

    def _unassigned(self, now: float) -> dict[int, str]:
        """Ranks (with their nodes) whose process does not know its rank: a spare's that has not heard it, or one that was being started
        again. It takes its rank once it says that it is warm."""
        down = {}
        for incarnation, event in self._back.items():
            agent = self.agents[incarnation]
            for worker, rank in self._ranks_of(incarnation).items():
                if event.ranks.get(worker) != rank:
                    agent.due_s[worker] = now + self.config.respawn_timeout_s
                    down[rank] = agent.node
        return down

    def _give_up(self, missing: list[str], out: list[Decision], now: float) -> tuple[list[str], list[str]]:
        """Fence who has not come back. Returns the nodes and the evidence. Such a failure counts against its node, and not against the
        step that the job stands at: nobody knows yet which that is."""
        assert self.membership is not None
        nodes, evidence = [], []
        of = {x.incarnation: x.node for x in self.membership.members}
        for incarnation in missing:
            why = self._not_back.get(incarnation, _NOT_HEARD)
            self.agents.pop(incarnation, None)
            self.fenced[incarnation] = why
            data = {"node": of[incarnation], "incarnation": incarnation, "spare": False, "left": False}
            out.append(Log("node-lost", f"{of[incarnation]}: {why}", data))
            self.quarantine.failed(of[incarnation], incarnation, len(self.recoveries), why, now)
            nodes.append(of[incarnation])
            evidence.append(why)
        twins = {i: why for node in nodes for i, why in self._spares_in_quarantine(node, now).items()}
        out += self._lose(twins, now)
        self._back = {i: event for i, event in self._back.items() if i in self.agents}
        return nodes, evidence
