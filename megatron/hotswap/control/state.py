"""The coordinator's state machine. Pure: see the package docstring for the caller's loop.

    GATHERING -> TRAINING -> HALTING -> RESUMING -> TRAINING … -> ENDED
                                ^           |
                                '-----------'   a failure during a recovery starts it over with what is left

Changes of phase are the table in phases.py, events the table at the end of this file. An event that has no entry there for the
present phase is logged and dropped: late and repeated messages are normal. A change of phase that has none is a bug of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import UsageError
from ..recovery import plan
from ..replication import placement
from . import messages as m
from .commits import Commits
from .config import ControlConfig as ControlConfig
from .decisions import Decision as Decision
from .decisions import Log as Log
from .decisions import Send as Send
from .injection import arm
from .lease import Lease
from .membership import Agent, give_ranks, one_per_node, place_again, refusal_of, start_log
from .phases import Phase as Phase
from .phases import require_change
from .timeline import Recovery

#: Recoveries of one failure that may end by the deadline of resuming before the job does: a fault that comes again is no accident.
RESUME_TIMEOUTS_MAX = 2


class Control:
    """The decisions of one job. `exit_code` is set once, when the job is over."""

    def __init__(self, config: ControlConfig) -> None:
        self.config = config
        self.phase = Phase.GATHERING
        self.agents: dict[str, Agent] = {}
        self.fenced: dict[str, str] = {}  # incarnation -> why it may not come back
        self.membership: m.Membership | None = None
        self.version = 0  # the newest version ever used; only grows
        self.commits = Commits(config.grid.world_size)
        self.exit_code: int | None = None
        self.exit_reason = ""
        self.failed: tuple[str, int] | None = None  # the worker whose failure ended the job: its agent's incarnation, its index
        self.recovery: Recovery | None = None
        self.recoveries: list[Recovery] = []
        self.gathered_s: float | None = None
        self.said_waiting = ""
        self.sources: Mapping[int, tuple[str, ...]] = {}  # of the plan: rank -> agents to fetch from; own slots are not in it
        self.halt_reports: dict[int, m.HaltReport] = {}
        self.replica_reports: dict[str, m.ReplicaReport] = {}
        self.halted: set[str] = set()  # agents that were told of the halt, so that their report of replicas must come
        self.errors: dict[int, tuple[float, m.WorkerError]] = {}
        self.finished: set[int] = set()
        self.deadline_s: float | None = None
        self.spare_deadline_s: float | None = None
        self.lease = Lease(config)

    @property
    def committed(self) -> int:
        """The newest generation that every rank's holders have; -1: none yet."""
        return self.commits.committed

    # ---- the caller's two entries

    def handle(self, incarnation: str, event: m.Event, now: float) -> list[Decision]:
        """Take one event of the agent `incarnation` at time `now`."""
        agent = self.agents.get(incarnation)
        if agent is not None:
            if isinstance(event, m.Join):
                return [Log("ignored", f"{incarnation} has joined already", {"agent": incarnation})]
            if not isinstance(event, m.AgentLost):
                agent.last_heard_s = now
        elif incarnation in self.fenced and not isinstance(event, m.AgentLost):
            return [Send(incarnation, m.Refused(f"this agent was fenced: {self.fenced[incarnation]}"))]
        elif not isinstance(event, m.Join | m.AgentLost | m.Inject):
            return [Send(incarnation, m.Refused("not joined: the first message must be Join"))]
        handler = _TRANSITIONS.get((self.phase, type(event)))
        if handler is None:
            return [Log("ignored", f"{type(event).__name__} has no meaning while {self.phase.value}", {"agent": incarnation})]
        return handler(self, incarnation, event, now)

    def tick(self, now: float) -> list[Decision]:
        """Deadlines: leases, reports that do not come, spares that do not come. Call at least every heartbeat interval."""
        if self.phase is Phase.ENDED:
            return []
        out: list[Decision] = []
        silent = self.lease.silent(self.agents.values(), now)
        # Until there are ranks to lose, only a closed connection counts: a machine that starts many workers may be slow to speak.
        if silent and self.phase is not Phase.GATHERING:
            out += self._lose(silent, now)
        overdue = self.deadline_s is not None and now > self.deadline_s
        if self.phase is Phase.GATHERING:
            out += self._try_start(now)
        elif self.phase is Phase.HALTING:
            if overdue:
                out += self._give_up_silent_ranks(now)
            if self.phase is Phase.HALTING:
                out += self._try_plan(now)
        elif self.phase is Phase.RESUMING and overdue:
            out += self._resume_overdue(now)
        elif self.phase in (Phase.TRAINING, Phase.RESUMING):
            out += self._judge_errors(now)
        return out

    def stop(self, code: int, reason: str) -> list[Decision]:
        """The job is over for a reason that lies outside: its user, or its launcher, wants no more of it."""
        return [] if self.phase is Phase.ENDED else self._end(code, reason)

    def _enter(self, phase: Phase) -> None:
        require_change(self.phase, phase)
        self.phase = phase

    # ---- joining and starting

    def _join(self, incarnation: str, event: m.Join, now: float) -> list[Decision]:
        refusal = refusal_of(event, self.config)
        if refusal:
            return [Send(incarnation, m.Refused(refusal)), Log("refused", refusal, {"node": event.node})]
        agent = Agent(event, now, ranks=[None] * event.workers)
        self.agents[incarnation] = agent
        welcome = m.Welcome(self.config.lease_s, self.config.heartbeat_interval_s)
        return [Send(incarnation, welcome), Log("joined", f"node {event.node} joined with {event.workers} workers", {"node": event.node})]

    def _ready(self, incarnation: str, event: m.WorkerReady, now: float) -> list[Decision]:
        agent = self.agents[incarnation]
        if not 0 <= event.worker < agent.join.workers:
            return [Log("ignored", f"node {agent.node} has {agent.join.workers} workers, there is no worker {event.worker}")]
        agent.ready.add(event.worker)
        agent.stores[event.worker] = event.store
        if self.phase is Phase.GATHERING:
            return self._try_start(now)
        if self.phase is Phase.HALTING:
            return self._assign_spares(now) + self._try_plan(now)
        return [Log("spare", f"node {agent.node} is a warm spare", {"node": agent.node})] if agent.warm and agent.spare else []

    def _try_start(self, now: float) -> list[Decision]:
        warm = one_per_node(a for a in self.agents.values() if a.warm)
        if len(warm) < self.config.nodes:
            said = f"{len(warm)} of {self.config.nodes} nodes are ready"
            if said == self.said_waiting:
                return []
            self.said_waiting = said
            return [Log("waiting", said)]
        self.gathered_s = now if self.gathered_s is None else self.gathered_s
        if len(warm) < self.config.nodes + self.config.spares and now - self.gathered_s < self.config.settle_s:
            return []
        active = warm[: self.config.nodes]
        members = give_ranks(active)
        nodes = [member.node for member in members]
        domains = [self.agents[x.incarnation].domain for x in members]
        try:
            holders = placement.place(self.config.grid, nodes, self.config.replicas, domains)
        except UsageError as impossible:  # nothing is lost yet: the user can start it better
            return self._end(2, str(impossible))
        self.version = 1
        self.membership = m.Membership(1, tuple(members), holders)
        self._enter(Phase.TRAINING)
        start = m.Start(self.membership, active[0].stores.pop(0))
        spares = [a.node for a in warm[self.config.nodes :]]
        return [*(Send(a.incarnation, start) for a in active), start_log(nodes, spares, holders, domains)]

    def _counts(self, incarnation: str, event: m.Acknowledged | m.Skipped | m.Restored | m.FirstStep) -> bool:
        """Whether it is of the present membership, and said by the agent that holds the rank in it."""
        return event.version == self.version and event.rank in self.agents[incarnation].ranks

    # ---- while training

    def _acknowledged(self, incarnation: str, event: m.Acknowledged, now: float) -> list[Decision]:
        if not self._counts(incarnation, event) or not self.commits.acknowledge(event):
            return []
        commit: list[Decision] = [Send(i, m.Commit(event.generation)) for i in self._member_agents()]
        differ = self.commits.difference(event.generation)
        return [*commit, Log("peers-differ", differ), *(Send(i, m.SendWhole(differ)) for i in self.agents)] if differ else commit

    def _skipped(self, incarnation: str, event: m.Skipped, now: float) -> list[Decision]:
        """One rank's skip makes the generation void for all: else those who took it would wait for a commit that never comes."""
        if not self._counts(incarnation, event) or not self.commits.skip(event.generation):
            return []
        text = f"generation {event.generation}: rank {event.rank} still waits for the one before it to be committed"
        log = Log("generation-skipped", text, {"generation": event.generation, "rank": event.rank})
        return [log, *(Send(i, m.Void(event.generation)) for i in self._member_agents())]

    def _copy_damaged(self, incarnation: str, event: m.CopyDamaged, now: float) -> list[Decision]:
        """Guarantee 6: what did not match is never restored from, and is said. Where the plan has no other copy, another is made."""
        if event.version != self.version:
            return []
        self.commits.damage(event.incarnation, event.rank, event.generation)
        where = {"rank": event.rank, "generation": event.generation, "incarnation": event.incarnation}
        log = Log("copy-damaged", text := "rank {rank}, generation {generation}, at {incarnation}: ".format(**where) + event.text, where)
        sources = self.sources.get(event.rank, (incarnation,))
        left = any(self.commits.usable(i, event.rank, [event.generation]) for i in sources)
        if left or self.phase is not Phase.RESUMING:
            return [log]
        return [log, *self._begin_recovery([], [f"the copy of {text}"], now, now)]

    def _worker_error(self, incarnation: str, event: m.WorkerError, now: float) -> list[Decision]:
        if event.version != self.version:
            return []
        log = Log("error", f"rank {event.rank} in step {event.step}: {event.text}", {"rank": event.rank, "step": event.step})
        if not event.collective:
            ranks = self.agents[incarnation].ranks
            failed = (incarnation, ranks.index(event.rank)) if event.rank in ranks else None
            return [log, *self._end(1, f"rank {event.rank} failed in step {event.step}: {event.text}", failed)]
        self.errors[event.rank] = (now, event)
        return [log]

    def _judge_errors(self, now: float) -> list[Decision]:
        """A collective failed, yet no node was lost within a lease: the fault was in between, so all begin again in place."""
        if not self.errors:
            return []
        first_s, first = min(self.errors.values(), key=lambda e: e[0])
        if now - first_s <= self.config.lease_s + 2 * self.config.heartbeat_interval_s:
            return []
        return self._begin_recovery([], [f"rank {first.rank}: {first.text}"], now, now)

    def _worker_lost(self, incarnation: str, event: m.WorkerLost, now: float) -> list[Decision]:
        return self._lose({incarnation: f"worker {event.worker}: {event.evidence}"}, now)

    def _agent_lost(self, incarnation: str, event: m.AgentLost, now: float) -> list[Decision]:
        return self._lose({incarnation: event.evidence}, now) if incarnation in self.agents else []

    def _finished(self, incarnation: str, event: m.Finished, now: float) -> list[Decision]:
        node = self.agents[incarnation].node
        who = f"rank {event.rank}" if event.rank is not None else f"worker {event.worker}"
        if event.code != 0 and self.phase is not Phase.GATHERING and self._has_no_state(incarnation):
            return self._lose({incarnation: f"{who} could not begin: {event.text}"}, now)
        if event.code != 0:
            return self._end(event.code, f"{who} on node {node} ended: {event.text}", (incarnation, event.worker))
        if event.rank is not None and event.rank in self.agents[incarnation].ranks:
            self.finished.add(event.rank)
        if self.phase is Phase.HALTING and self.finished:  # it was through before the halt reached it, so all have trained to the end
            return self._end(0, f"training is done; {self.recovery.lost_nodes if self.recovery else []} were lost after it")
        if len(self.finished) == self.config.grid.world_size:
            return self._end(0, "training is done")
        return []

    def _has_no_state(self, incarnation: str) -> bool:
        """Whether an agent is a spare, or one that has been given ranks in this recovery and has not restored them yet."""
        ranks = {r for r in self.agents[incarnation].ranks if r is not None}
        if self.recovery is None:
            return not ranks
        had = {r for r, report in self.halt_reports.items() if report.done is not None} | self.recovery.restored.keys()
        return self.phase is not Phase.TRAINING and not ranks & had

    def _inject(self, incarnation: str, event: m.Inject, now: float) -> list[Decision]:
        return arm(event.injection, self.agents.values())

    def _note(self, incarnation: str, event: m.Note, now: float) -> list[Decision]:
        return [Log(event.kind, event.text, {"node": self.agents[incarnation].node})]

    def _heartbeat(self, incarnation: str, event: m.Heartbeat, now: float) -> list[Decision]:
        return [Send(incarnation, m.Alive())]

    def _step_done(self, incarnation: str, event: m.StepDone, now: float) -> list[Decision]:
        return []  # the service records it; the core decides nothing by it

    # ---- losing nodes

    def _lose(self, evidence: dict[str, str], now: float) -> list[Decision]:
        """Nodes are gone: fence them, and if they held ranks, begin (or begin again) a recovery. Many at once are one recovery."""
        out: list[Decision] = []
        lost, heard = [], now
        for incarnation, why in evidence.items():
            agent = self.agents.pop(incarnation)
            self.fenced[incarnation] = why
            self.replica_reports.pop(incarnation, None)
            out.append(Send(incarnation, m.Refused(f"node {agent.node} was given up: {why}")))
            out.append(Log("node-lost", f"{agent.node}: {why}", {"node": agent.node, "incarnation": incarnation, "spare": agent.spare}))
            if self._holds_rank(incarnation):
                lost.append(agent.node)
                heard = min(heard, agent.last_heard_s)
        if not lost or self.phase is Phase.GATHERING:
            return out
        if self.finished:  # some rank is through its whole script, so all have trained to the end
            return out + self._end(0, f"training is done; {lost} were lost after it")
        return out + self._begin_recovery(lost, list(evidence.values()), heard, now)

    def _holds_rank(self, incarnation: str) -> bool:
        return self.membership is not None and any(x.incarnation == incarnation for x in self.membership.members)

    def _begin_recovery(self, lost: list[str], evidence: list[str], heard: float, now: float) -> list[Decision]:
        assert self.membership is not None
        over = self.version
        self.version += 1
        self._enter(Phase.HALTING)
        self.deadline_s = now + self.config.halt_timeout_s
        self.halt_reports.clear()
        self.replica_reports.clear()
        self.errors.clear()
        self.finished.clear()
        if self.recovery is None:
            self.recovery = Recovery(now, heard, [], [], now)
        else:
            self.recovery.attempts += 1
            self.recovery.restored.clear()
            self.recovery.first_step.clear()
        self.recovery.lost_nodes += lost
        self.recovery.evidence += evidence
        what = f"lost {lost}" if lost else f"every node lives, but {evidence[0]}"
        reason = f"{what}: membership {over} is over"
        halt = m.Halt(over, reason, tuple(self._vacant()))
        self.halted = set(self.agents)
        rung = "swap" if self._vacant() else "reset"
        log = Log("recovery", reason, {"rung": rung, "evidence": evidence, "version": over, "lost": lost})
        return [*(Send(i, halt) for i in self.agents), log, *self._assign_spares(now)]

    def _vacant(self) -> list[int]:
        """Ranks whose member is gone."""
        assert self.membership is not None
        return [r for r, x in enumerate(self.membership.members) if x.incarnation not in self.agents]

    def _assign_spares(self, now: float) -> list[Decision]:
        """Give each vacant node's ranks to a warm spare, as soon as there is one."""
        assert self.membership is not None and self.recovery is not None
        out: list[Decision] = []
        vacant = self._vacant()
        per_node = self.config.ranks_per_node
        members = list(self.membership.members)
        # A node that came back before its former life was given up must not hold its own replicas: it waits for that verdict.
        taken = {x.node for x in members if x.incarnation in self.agents}
        spares = one_per_node(a for a in self.agents.values() if a.warm and a.spare and a.node not in taken)
        for ranks in (vacant[i : i + per_node] for i in range(0, len(vacant), per_node)):
            if not spares:
                self.spare_deadline_s = self.spare_deadline_s or now + self.config.wait_for_spare_s
                out.append(Log("no-spare", f"ranks {ranks} wait for a spare, at most {self.config.wait_for_spare_s} s", {"ranks": ranks}))
                break
            spare = spares.pop(0)
            for worker, rank in enumerate(ranks):
                spare.ranks[worker] = rank
                members[rank] = spare.member(worker)
            self.deadline_s = max(self.deadline_s or now, now + self.config.halt_timeout_s)  # it may have joined long after the halt
            out.append(Send(spare.incarnation, m.Assign(self.version, tuple(ranks), len(members))))
            out.append(Log("assign", f"spare {spare.node} takes ranks {ranks}", {"node": spare.node, "ranks": ranks}))
        self.membership = m.Membership(self.version, tuple(members), self.membership.holders)
        if not self._vacant():
            self.spare_deadline_s = None
        return out

    # ---- planning and resuming

    def _halt_report(self, incarnation: str, event: m.HaltReport, now: float) -> list[Decision]:
        if event.version != self.version - 1 or event.rank not in self.agents[incarnation].ranks:
            return []
        self.halt_reports[event.rank] = event
        return self._try_plan(now)

    def _replica_report(self, incarnation: str, event: m.ReplicaReport, now: float) -> list[Decision]:
        if event.version != self.version - 1:
            return []
        self.replica_reports[incarnation] = event
        return self._try_plan(now)

    def _give_up_silent_ranks(self, now: float) -> list[Decision]:
        """A halt that does not get through within its time: the nodes of the ranks (or agents) that are silent are given up."""
        assert self.membership is not None
        silent = dict.fromkeys(self._unreported(), "its agent did not report its replicas in time")
        for rank, member in enumerate(self.membership.members):
            if rank not in self.halt_reports and member.incarnation in self.agents:
                silent[member.incarnation] = f"rank {rank} did not report its halt in time"
        return self._lose(silent, now) if silent else []

    def _unreported(self) -> list[str]:
        """Members that were told of the halt and have not said yet what replicas they hold. Who joined later holds none."""
        return [i for i in self._member_agents() if i in self.halted and i not in self.replica_reports]

    def _resume_overdue(self, now: float) -> list[Decision]:
        """Some ranks did not restore in time. That does not say whose fault it is, since they wait for each other: halt them again;
        who is stuck does not report and is given up, and all others still hold their snapshots."""
        assert self.recovery is not None and self.membership is not None
        missing = sorted(set(range(len(self.membership.members))) - self.recovery.restored.keys())
        what = f"rank(s) {missing} did not restore generation {self.recovery.generation} in {self.config.resume_timeout_s} s"
        if self.recovery.timeouts >= RESUME_TIMEOUTS_MAX:
            return self._end(1, f"{what}, {RESUME_TIMEOUTS_MAX + 1} times in a row; evidence: {'; '.join(self.recovery.evidence)}")
        self.recovery.timeouts += 1
        return self._begin_recovery([], [what], now, now)

    def _try_plan(self, now: float) -> list[Decision]:
        assert self.membership is not None and self.recovery is not None
        vacant = self._vacant()
        if vacant:
            if self.spare_deadline_s is not None and now > self.spare_deadline_s:
                return self._end(75, f"ranks {vacant} have no spare, and none came in {self.config.wait_for_spare_s} s")
            return []
        if len(self.halt_reports) < len(self.membership.members):
            return []
        if not self.recovery.halted_s:
            self.recovery.halted_s = now
        if self._unreported():
            return []
        choice = plan.choose(*self._held())
        if isinstance(choice, str):
            return self._end(1, f"nothing to go back to: {choice}")
        return self._resume(choice, now)

    def _held(self) -> tuple[list[plan.Holdings], dict[int, dict[int, list[str]]]]:
        """What every rank and every holder has said to have, less what is known to be damaged: as plan.choose wants it."""
        assert self.membership is not None
        holdings = [
            plan.Holdings(r.done, r.between_steps, self.commits.usable(member.incarnation, rank, r.own))
            for (rank, r), member in zip(sorted(self.halt_reports.items()), self.membership.members, strict=True)
        ]
        replicas: dict[int, dict[int, list[str]]] = {}
        for incarnation, report in self.replica_reports.items():
            for rank, generations in report.replicas.items():
                for generation in self.commits.usable(incarnation, rank, generations):
                    replicas.setdefault(rank, {}).setdefault(generation, []).append(incarnation)
        return holdings, replicas

    def _resume(self, choice: plan.Choice, now: float) -> list[Decision]:
        assert self.membership is not None and self.recovery is not None
        members = self.membership.members
        holders, worse = place_again(self.config, self.membership, self.agents)
        self.membership = m.Membership(self.version, members, holders)
        self.sources = choice.fetch
        sources = {r: tuple(m.Source(i, self.agents[i].join.h2h) for i in held_by) for r, held_by in choice.fetch.items()}
        self._enter(Phase.RESUMING)
        self.deadline_s = now + self.config.resume_timeout_s
        self.recovery.planned_s = now
        self.recovery.generation = choice.generation
        self.commits.begin_again(choice.generation)
        replaced = tuple(rank for rank, report in sorted(self.halt_reports.items()) if report.done is None)
        resume = m.Resume(self.membership, choice.generation, self._store(), sources, choice.redo_sections, replaced)
        data = {"version": self.version, "generation": choice.generation, "fetch": sorted(sources), "holders": holders}
        logs = [Log("plan", choice.reason, data), *([Log("placement", worse)] if worse else [])]
        return [*(Send(i, resume) for i in self._member_agents()), *logs]

    def _store(self) -> str:
        """An unused rendezvous store: that of a rank which had a state when it was halted, else one that a spare served when warm."""
        assert self.membership is not None
        survivors = [r for r, report in sorted(self.halt_reports.items()) if report.done is not None]
        if survivors:
            return self.halt_reports[survivors[0]].store
        first = self.membership.members[0]
        return self.agents[first.incarnation].stores[first.worker]

    def _restored(self, incarnation: str, event: m.Restored, now: float) -> list[Decision]:
        if not self._counts(incarnation, event) or self.membership is None or self.recovery is None:
            return []
        self.recovery.restored[event.rank] = event
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
        self.recoveries.append(done)
        return [Log("recovered", f"{'swap' if done.lost_nodes else 'reset'} complete", {"recovery": done.time_line(self.version, now)})]

    def _member_agents(self) -> list[str]:
        assert self.membership is not None
        return [i for i in dict.fromkeys(x.incarnation for x in self.membership.members) if i in self.agents]

    def _end(self, code: int, reason: str, failed: tuple[str, int] | None = None) -> list[Decision]:
        self._enter(Phase.ENDED)
        self.exit_code, self.exit_reason, self.failed = code, reason, failed
        return [Log("end", reason, {"code": code, "failed": failed}), *(Send(i, m.Stop(code, reason)) for i in self.agents)]


_Handler = Callable[[Control, str, Any, float], list[Decision]]
_LIVE = (Phase.GATHERING, Phase.TRAINING, Phase.HALTING, Phase.RESUMING)
_STARTED = _LIVE[1:]
#: (phase, event) -> what is done. docs/architecture.md shows it as a diagram.
_TRANSITIONS: dict[tuple[Phase, type], _Handler] = {
    **{(p, m.Join): Control._join for p in _LIVE},
    (Phase.ENDED, m.Join): lambda self, who, event, now: [Send(who, m.Refused(f"the job is over: {self.exit_reason}"))],
    **{(p, m.WorkerReady): Control._ready for p in _LIVE},
    **{(p, m.Heartbeat): Control._heartbeat for p in Phase},
    **{(p, m.AgentLost): Control._agent_lost for p in _LIVE},
    **{(p, m.WorkerLost): Control._worker_lost for p in _LIVE},
    **{(p, m.Inject): Control._inject for p in _LIVE},
    **{(p, m.Note): Control._note for p in _LIVE},
    **{(p, m.Finished): Control._finished for p in _LIVE},
    **{(p, m.StepDone): Control._step_done for p in Phase},
    **{(p, m.Acknowledged): Control._acknowledged for p in (Phase.TRAINING, Phase.RESUMING)},
    **{(p, m.Skipped): Control._skipped for p in (Phase.TRAINING, Phase.RESUMING)},
    **{(p, m.CopyDamaged): Control._copy_damaged for p in _STARTED},
    **{(p, m.FirstStep): Control._first_step for p in (Phase.TRAINING, Phase.RESUMING)},
    **{(p, m.WorkerError): Control._worker_error for p in (Phase.TRAINING, Phase.RESUMING)},
    (Phase.HALTING, m.HaltReport): Control._halt_report,
    (Phase.HALTING, m.ReplicaReport): Control._replica_report,
    (Phase.RESUMING, m.Restored): Control._restored,
}
