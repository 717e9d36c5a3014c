"""What follows a loss: halt, plan, resume, and what it takes until every rank has done a step again. Pure.

recovery/plan.py picks the generation; here it is asked, with what every rank and every holder has reported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from ..recovery import plan
from . import messages as m
from .attempt import Ending
from .decisions import Decision, Log, Send
from .ladder import no_respawn
from .membership import Agent, one_per_node, place_again
from .phases import Phase
from .saving import Saves
from .timeline import Recovery

_Worker = tuple[str, int]  # its agent's incarnation, its index there

#: Recoveries of one failure that may end by the deadline of resuming before the job does: a fault that comes again is no accident.
RESUME_TIMEOUTS_MAX = 2


class Recovering(Saves):
    """The ladder of a recovery. Control (state.py) calls it with the events."""

    # ---- losing nodes and workers

    def _lose(
        self, nodes: Mapping[str, str], now: float, workers: Mapping[_Worker, str] | None = None, may_return: Collection[str] = ()
    ) -> list[Decision]:
        """Nodes are gone: fence them, but those that may come back as what they were. Workers failed on nodes that live: have them started
        again, or give their nodes up too (ladder.py). If that leaves ranks without a process, begin (or begin again) one recovery. The
        values are the evidence."""
        again, lost = self._by_rung(nodes, workers or {}, now)
        lost |= self._quarantined_with({i: why for i, why in lost.items() if i not in may_return}, now)
        out: list[Decision] = []
        gone, evidence, heard = [], [], now
        for incarnation, why in lost.items():
            agent = self.agents.pop(incarnation)
            self.replica_reports.pop(incarnation, None)
            if incarnation not in may_return:
                self.fenced[incarnation] = why
                out.append(Send(incarnation, m.Refused(f"node {agent.node} was given up: {why}")))
            data = {"node": agent.node, "incarnation": incarnation, "spare": agent.spare and not agent.leaving, "left": bool(agent.leaving)}
            out.append(Log("node-lost", f"{agent.node}: {why}", data))
            evidence.append(why)
            if self._holds_rank(incarnation):
                gone.append(agent.node)
                heard = min(heard, agent.last_heard_s)
        down: dict[int, str] = {}
        orders: list[Decision] = []
        for (incarnation, worker), why in again.items():
            agent = self.agents[incarnation]
            rank = agent.start_again(worker, now + self.config.respawn_timeout_s)
            who = f"worker {worker} of {agent.node}" + ("" if rank is None else f", rank {rank}")
            out.append(Log("worker-lost", f"{who}: {why}", {"node": agent.node, "worker": worker, "rank": rank}))
            orders.append(Send(incarnation, m.Respawn(worker, why)))
            if rank is not None:
                evidence.append(f"rank {rank}: {why}")
                down[rank] = agent.node
        out += self._quarantine_news(now)
        self.revision += 1
        if not gone and not down:
            return out + orders
        if self.finished:  # some rank is through its whole script, so all have trained to the end
            return out + self._end(0, f"training is done; {gone or sorted(set(down.values()))} were lost after it")
        broken = self._struck(gone, down, evidence)
        return out + self._stop_if(broken, self._begin_recovery(gone, evidence, heard, now, down) + orders, now)

    def _quarantined_with(self, lost: Mapping[str, str], now: float) -> dict[str, str]:
        """Count these losses. Where one is once too often for its node, another life of the node that is here already, as a spare, is
        given up with it."""
        found: dict[str, str] = {}
        for incarnation, why in lost.items():
            agent = self.agents[incarnation]
            if not agent.leaving:  # else it was judged when its ranks were taken from it
                self.quarantine.failed(agent.node, incarnation, len(self.recoveries), why, now)
            found |= self._spares_in_quarantine(agent.node, now)
        return {incarnation: refusal for incarnation, refusal in found.items() if incarnation not in lost}

    def _spares_in_quarantine(self, node: str, now: float) -> dict[str, str]:
        """Lives of the node that hold no ranks, each with why it must not have any, if that is so."""
        refusal = self.quarantine.refusal(node, now)
        return {a.incarnation: refusal for a in self.agents.values() if a.node == node and a.spare and not a.leaving} if refusal else {}

    def _quarantine_news(self, now: float) -> list[Decision]:
        return [Log("quarantined", self.quarantine.refusal(node, now), {"node": node}) for node in self.quarantine.news()]

    def _struck(self, gone: list[str], down: Mapping[int, str], evidence: list[str]) -> str:
        """Whether the job stands at a step that fails again and again, in words. What fails before the step is tried again, while all are
        halted or restored, says nothing about it; nor does a fault on purpose."""
        failed = {*down, *self._vacant()}
        tried = self.recovery is not None and failed & self.recovery.restored.keys()
        counts = self.phase is Phase.TRAINING or (self.phase is Phase.RESUMING and tried)
        on_purpose = any(self.quarantine.on_purpose(node, len(self.recoveries)) for node in (*gone, *down.values()))
        if not counts or on_purpose or self._at_the_last_rung:
            return ""
        return self._strike(gone, [f"{', '.join(gone)}: {', '.join(evidence)}"] if gone else evidence)

    def _strike(self, swapped: list[str], evidence: list[str]) -> str:
        """The step fails that the job stands at: why it must stop, in words, or empty."""
        return self.loop.strike(self.newest_step, swapped, evidence) if self.newest_step_known else ""

    def _stop_if(self, broken: str, recovery: list[Decision], now: float) -> list[Decision]:
        """The recovery, or the last rung after its halt if the job is not to go on."""
        return [*recovery, *self._last_rung(Ending(1, broken), now)] if broken else recovery

    def _by_rung(
        self, nodes: Mapping[str, str], workers: Mapping[_Worker, str], now: float
    ) -> tuple[dict[_Worker, str], dict[str, str]]:
        """Which workers are started again, and which nodes are given up, each with its evidence."""
        again, lost = {}, dict(nodes)
        for (incarnation, worker), why in workers.items():
            agent, number = self.agents[incarnation], len(self.recoveries)
            refusal = no_respawn(agent, worker, number, self.recovery is not None, now, self.config.respawn_window_s)
            if self.phase in (Phase.GATHERING, Phase.LOADING):
                refusal = "nothing has begun that it could go on with"
            refusal = refusal or self.quarantine.failed(agent.node, incarnation, number, why, now)
            if refusal:
                lost[incarnation] = f"worker {worker}: {why}; {refusal}"
            else:
                again[incarnation, worker] = why
        return {key: why for key, why in again.items() if key[0] not in lost}, lost

    def _begin_recovery(
        self,
        lost: list[str],
        evidence: list[str],
        heard: float,
        now: float,
        down: Mapping[int, str] | None = None,
        what: str = "",
    ) -> list[Decision]:
        """Halt everyone. `lost` nodes are gone; `down` are ranks (with their nodes) whose process is started again. `what` has happened,
        if it is none of this."""
        assert self.membership is not None
        over = self.version
        recovery, happened = self._membership_over(Recovery(now, heard, [], [], now, over), lost, evidence, down or {}, what)
        recovery.fresh = {rank: since for rank, since in recovery.fresh.items() if rank not in (down or {})}
        reason = f"{happened}: membership {over} is over"
        self.deadline_s = now + self.config.halt_timeout_s
        self.halt_reports.clear()
        self.replica_reports.clear()
        vacant, without = self._vacant(), self._down()
        halt = m.Halt(over, reason, tuple(sorted([*vacant, *without])))
        self.unreported = set(self.agents)
        rung = "swap" if vacant else "respawn" if without else "reset"
        log = Log("recovery", reason, {"rung": rung, "evidence": evidence, "version": over, "lost": lost})
        return [*(Send(i, halt) for i in self.agents), log, *self._assign_spares(now), *self._saving_halted(now)]

    def _membership_over(
        self, begins: Recovery, lost: list[str], evidence: list[str], down: Mapping[int, str], what: str
    ) -> tuple[Recovery, str]:
        """Nobody trains in this membership any more, whatever follows. Returns the recovery, which is `begins` unless one is under way, and
        what has happened, in words."""
        self.version += 1
        self._enter(Phase.HALTING)
        self.start = None
        self.errors.clear()
        self.finished.clear()
        self.recovery = (self.recovery or begins).once_more(lost, evidence, down)
        losses = [f"lost {lost}"] if lost else []
        losses += [f"lost the process of rank {rank} on {node}" for rank, node in down.items()]
        return self.recovery, what or ", ".join(losses) or f"every node lives, but {evidence[0]}"

    def _fail(self, ending: Ending, now: float) -> list[Decision]:
        """The program has failed for good. What was trained so far is written first, where there is somewhere to write."""
        if self.config.durable is None or not self.stepped or self.finished:
            return self._end(ending.code, ending.reason, ending.failed)
        halt = [] if self.phase is Phase.HALTING else self._begin_recovery([], [ending.reason], now, now)
        return [*halt, *self._last_rung(ending, now)]

    def _assign_again(self, agent: Agent, worker: int, now: float) -> list[Decision]:
        """A worker that was started again is warm: it takes its rank again, as a spare would."""
        rank = agent.ranks[worker]
        if rank is None or self.recovery is None or self.membership is None:
            return []
        self.recovery.fresh[rank] = self.version
        self.deadline_s = max(self.deadline_s or now, now + self.config.halt_timeout_s)
        assign = m.Assign(self.version, {worker: rank}, len(self.membership.members))
        text = f"worker {worker} of {agent.node} is up again and takes rank {rank}"
        return [Send(agent.incarnation, assign), Log("respawned", text, {"node": agent.node, "rank": rank})]

    def _assign_spares(self, now: float) -> list[Decision]:
        """Give each vacant node's ranks to a warm spare, as soon as there is one."""
        assert self.membership is not None and self.recovery is not None
        out: list[Decision] = []
        vacant = self._vacant()
        per_node = self.config.ranks_per_node
        members = list(self.membership.members)
        spares = self._free_spares()
        for ranks in (vacant[i : i + per_node] for i in range(0, len(vacant), per_node)):
            if not spares:
                self.spare_deadline_s = self.spare_deadline_s or now + self.config.wait_for_spare_s
                out.append(Log("no-spare", f"ranks {ranks} wait for a spare, at most {self.config.wait_for_spare_s} s", {"ranks": ranks}))
                break
            spare = spares.pop(0)
            for worker, rank in enumerate(ranks):
                spare.ranks[worker] = rank
                members[rank] = spare.member(worker)
            self.revision += 1
            self.deadline_s = max(self.deadline_s or now, now + self.config.halt_timeout_s)  # it may have joined long after the halt
            self.recovery.fresh |= dict.fromkeys(ranks, self.version)
            out.append(Send(spare.incarnation, m.Assign(self.version, dict(enumerate(ranks)), len(members))))
            out.append(Log("assign", f"spare {spare.node} takes ranks {ranks}", {"node": spare.node, "ranks": ranks}))
        self.membership = m.Membership(self.version, tuple(members), self.membership.holders)
        if not self._vacant():
            self.spare_deadline_s = None
        return out

    def _free_spares(self) -> list[Agent]:
        """A node that came back before its former life was given up must not hold its own replicas: it waits for that verdict."""
        assert self.membership is not None
        taken = {x.node for x in self.membership.members if x.incarnation in self.agents}
        free = one_per_node(a for a in self.agents.values() if a.free and a.node not in taken)
        return sorted(free, key=lambda agent: agent.node in self.config.taken_last)

    # ---- planning and resuming

    def _halt_report(self, incarnation: str, event: m.HaltReport, now: float) -> list[Decision]:
        agent = self.agents[incarnation]
        if event.version == self.version - 1 and agent.leaving:
            agent.left[event.rank] = event.own
        if event.version != self.version - 1 or event.rank not in agent.ranks or self.recovery is None:
            return []
        # What a process had that is gone, or is being ended, says nothing about the one that is started in its place. That one has no
        # state in the first halt that it sees; in the next it may, though nobody has heard yet that it restored one.
        former = event.done is not None and self.recovery.fresh.get(event.rank) == self.version
        if agent.ranks.index(event.rank) in agent.due_s or former:
            return []
        self.halt_reports[event.rank] = event
        self.recovery.out_s = max(self.recovery.out_s, event.out_s)
        return self._try_plan(now)

    def _replica_report(self, incarnation: str, event: m.ReplicaReport, now: float) -> list[Decision]:
        if event.version != self.version - 1:
            return []
        self.replica_reports[incarnation] = event
        self.unreported.discard(incarnation)
        return self._try_plan(now)

    def _give_up_silent_ranks(self, now: float) -> list[Decision]:
        """A halt that does not get through within its time. Ranks that are silent are stuck, so their processes are ended and started
        again; of agents that are silent, the nodes are given up. Who is being started again has a deadline of its own."""
        assert self.membership is not None and self.recovery is not None
        nodes = dict.fromkeys(sorted(self._unreported()), "its agent did not report its replicas in time")
        silent = {
            rank: member
            for rank, member in enumerate(self.membership.members)
            if rank not in self.halt_reports
            and member.incarnation in self.agents
            and member.worker not in self.agents[member.incarnation].due_s
        }
        working = self._at_long_work(silent, now)
        stuck = {(x.incarnation, x.worker): "it did not report its halt in time" for rank, x in silent.items() if rank not in working}
        if nodes or stuck:
            return self._lose(nodes, now, stuck)
        if not working:
            return []
        self.deadline_s = now + self.config.halt_timeout_s
        left_s = self.recovery.halt_sent_s + self.config.long_work_s - now
        text = f"rank(s) {working} do not answer the halt, and have announced long work: they are waited for, {left_s:.0f} s more at most"
        return [Log("waiting", text, {"ranks": working})]

    def _at_long_work(self, ranks: Iterable[int], now: float) -> list[int]:
        """Of these ranks, those that may keep Python's lock for good reasons: by their last words, and not for too long after the halt."""
        assert self.recovery is not None
        if now - self.recovery.halt_sent_s > self.config.long_work_s:
            return []
        return [rank for rank in ranks if (said := self.hang.progress.get(rank)) is not None and said.is_long]

    def _late_respawns(self, now: float) -> dict[str, str]:
        """Agents with a worker that was started again and is not up in time: incarnation -> evidence."""
        limit = self.config.respawn_timeout_s
        return {
            a.incarnation: f"worker {worker}, started again, was not up within {limit:g} s"
            for a in self.agents.values()
            for worker, due_s in a.due_s.items()
            if now > due_s
        }

    def _unreported(self) -> Iterator[str]:
        """Members, and nodes that leave, that were told of the halt and have not said yet what replicas they hold. Who joined later holds
        none."""
        agents = ((i, self.agents[i]) for i in self.unreported if i in self.agents)
        return (i for i, agent in agents if agent.leaving or not agent.spare)

    def _resume_overdue(self, now: float) -> list[Decision]:
        """Some ranks did not restore in time. That does not say whose fault it is, since they wait for each other: halt them again;
        who is stuck does not report and is started again, and all others still hold their snapshots."""
        assert self.recovery is not None and self.membership is not None
        missing = sorted(set(range(len(self.membership.members))) - self.recovery.restored.keys())
        what = f"rank(s) {missing} did not restore generation {self.recovery.generation} in {self.config.resume_timeout_s} s"
        if self.recovery.timeouts >= RESUME_TIMEOUTS_MAX:
            return self._end(1, f"{what}, {RESUME_TIMEOUTS_MAX + 1} times in a row; evidence: {'; '.join(self.recovery.evidence)}")
        self.recovery.timeouts += 1
        return self._begin_recovery([], [what], now, now)

    def _try_plan(self, now: float) -> list[Decision]:
        assert self.membership is not None and self.recovery is not None
        if self.spare_deadline_s is not None and (vacant := self._vacant()):
            if now > self.spare_deadline_s:
                text = f"ranks {vacant} have no spare, and none came in {self.config.wait_for_spare_s:g} s"
                return self._last_rung(Ending(75, text, for_want_of_spares=True), now)
            return self._wait_only_with_hope(vacant, now)
        # Thousands of reports are taken one by one: whether one is missing must not cost as many looks for each.
        if len(self.halt_reports) < len(self.membership.members):
            return []
        if self.saving is not None and self.saving.ending is not None and not self.saving.ending.for_want_of_spares:
            return []
        if not self.recovery.halted_s:
            self.recovery.halted_s = now
        if any(self._unreported()) or self._vacant():
            return []
        choice = plan.choose(*self._held())
        if isinstance(choice, str):
            return self._nothing_held(choice, now)
        if self._store() is None:
            first = self.membership.members[0]
            why = "no rank has a state, and no process is known to serve an unused store for their rendezvous"
            return self._lose({}, now, {(first.incarnation, first.worker): why})
        return self._resume(choice, now)

    def _wait_only_with_hope(self, vacant: list[int], now: float) -> list[Decision]:
        """No spare is there for these ranks. If no memory has what they need, one that comes could not help: the job ends at once. Looked
        at once in a membership, when all that live have told what they have, and nobody can come back who has more."""
        assert self.membership is not None and self.recovery is not None
        members, recovery = self.membership.members, self.recovery
        if recovery.hoped_in == self.version or self._at_the_last_rung or len(self.halt_reports) + len(vacant) < len(members):
            return []
        gone = all(i in self.fenced or i in self.agents for i in (members[rank].incarnation for rank in vacant))
        if not gone or any(self._unreported()):
            return []
        choice = plan.choose(*self._held())
        if isinstance(choice, str):
            return self._nothing_held(choice, now)
        recovery.hoped_in = self.version
        return []

    def _nothing_held(self, why: str, now: float) -> list[Decision]:
        """The living have no generation in common: the end, unless a node that leaves has not told yet what it has."""
        if (asked := self._ask_leaving(now)) is not None:
            return asked
        return self._end_elsewhere("", why)

    def _ask_leaving(self, now: float) -> list[Decision] | None:
        """The slots of a node that leaves may have what nobody else has: wait for its workers to tell, then ask its agent what those that
        are stuck have left. None: all is told."""
        silent = {i: a for i, a in self.agents.items() if a.leaving and a.left_ranks - a.left.keys()}
        if silent and self.deadline_s is not None and now <= self.deadline_s:
            return []
        unasked = {i: a for i, a in silent.items() if a.left_ranks - a.left.keys() - a.left_dead}
        if not unasked:
            return None
        self.deadline_s = now + self.config.halt_timeout_s
        for agent in unasked.values():
            agent.left_dead |= agent.left_ranks - agent.left.keys()
        return [Send(i, m.TakeStock(self.version)) for i in unasked]

    def _held(self) -> tuple[list[plan.Holdings], dict[int, dict[int, list[str]]]]:
        """What every rank and every holder has said to have, less what is known to be damaged: as plan.choose wants it. A rank that is
        vacant has nothing of its own."""
        assert self.membership is not None
        holdings = [
            plan.Holdings(r.done, r.between_steps, self._usable(member.incarnation, rank, r.own))
            if (r := self.halt_reports.get(rank)) is not None
            else plan.Holdings()
            for rank, member in enumerate(self.membership.members)
        ]
        replicas: dict[int, dict[int, list[str]]] = {}
        leaving = [(i, agent.left) for i, agent in self.agents.items() if agent.leaving]
        for incarnation, held in [*((i, report.replicas) for i, report in self.replica_reports.items()), *leaving]:
            for rank, generations in held.items():
                for generation in self._usable(incarnation, rank, generations):
                    replicas.setdefault(rank, {}).setdefault(generation, []).append(incarnation)
        return holdings, replicas

    def _resume(self, choice: plan.Choice, now: float) -> list[Decision]:
        assert self.membership is not None and self.recovery is not None
        members, store = self.membership.members, self._store()
        assert store is not None
        holders, worse = place_again(self.config, self.membership, self.agents)
        self.membership = m.Membership(self.version, members, holders)
        # A node that leaves is asked last: it is there, but not fit.
        self.sources = {r: tuple(sorted(dict.fromkeys(i), key=lambda i: bool(self.agents[i].leaving))) for r, i in choice.fetch.items()}
        sources = {r: tuple(m.Source(i, self.agents[i].join.h2h) for i in held_by) for r, held_by in self.sources.items()}
        self._enter(Phase.RESUMING)
        self.deadline_s = now + self.config.resume_timeout_s
        self.recovery.planned_s = now
        self.recovery.generation = choice.generation
        for agent in self.agents.values():
            if agent.leaving:
                agent.left_up_to = choice.generation if agent.left_up_to is None else min(agent.left_up_to, choice.generation)
        self.commits.begin_again(choice.generation)
        replaced = tuple(rank for rank, report in sorted(self.halt_reports.items()) if report.done is None)
        resume = m.Resume(self.membership, choice.generation, store, sources, choice.redo_sections, replaced)
        self.newest_step, self.newest_step_known = choice.generation, True
        self.base = choice.generation
        data = {"version": self.version, "generation": choice.generation, "fetch": sorted(sources), "holders": holders}
        logs = [*self._saving_unneeded(), Log("plan", choice.reason, data)]
        logs += [Log("placement", worse, {"holders": holders})] if worse else []
        return [*(Send(i, resume) for i in self._member_agents()), *logs]

    def _store(self) -> str | None:
        """An unused rendezvous store: that of a rank which had a state when it was halted, else one that a spare served when warm. None: a
        coordinator that has taken the job up does not hear of those again that were in use."""
        assert self.membership is not None
        survivors = [r for r, report in sorted(self.halt_reports.items()) if report.done is not None]
        if survivors:
            return self.halt_reports[survivors[0]].store
        first = self.membership.members[0]
        return self.agents[first.incarnation].stores.get(first.worker)

    def _restored(self, incarnation: str, event: m.Restored, now: float) -> list[Decision]:
        if not self._counts(incarnation, event) or self.membership is None or self.recovery is None:
            return []
        if event.rank in self.sources and self.recovery.generation is not None:  # fetched, over a copy that may have been damaged
            self.commits.mend(incarnation, event.rank, self.recovery.generation)
        self.recovery.restored[event.rank] = event
        self.recovery.fresh.pop(event.rank, None)
        if len(self.recovery.restored) < len(self.membership.members):
            return []
        self.recovery.restored_s = now
        self._enter(Phase.TRAINING)
        self.deadline_s = None
        reason = f"membership {self.version} trains on from generation {self.recovery.generation}"
        return [Log("resumed", reason, {"version": self.version})]

    def _first_step(self, incarnation: str, event: m.FirstStep, now: float) -> list[Decision]:
        if not self._counts(incarnation, event) or self.membership is None or self.recovery is None:
            return []
        self.recovery.first_step.add(event.rank)
        if self.phase is not Phase.TRAINING or len(self.recovery.first_step) < len(self.membership.members):
            return []
        done, self.recovery = self.recovery, None
        self.revision += self.loop.passed((done.generation or 0) + 1)
        self.recoveries.append(done)
        recovered = Log("recovered", f"{done.kind} complete", {"recovery": done.time_line(self.version, now)})
        left = {i: agent.leaving for i, agent in self.agents.items() if agent.leaving}  # not needed any more
        return [recovered, *self._lose(left, now)]
