"""The coordinator's state machine. Pure: see the package docstring for the caller's loop.

    GATHERING -> TRAINING -> HALTING -> RESUMING -> TRAINING … -> ENDED
                                ^           |
                                '-----------'   a failure during a recovery starts it over with what is left

Transitions are the table at the end of the file; an event that has no entry there for the present phase is logged and dropped
when it comes from a network peer (late and repeated messages are normal), and is a bug of ours otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..errors import UsageError
from ..recovery import plan
from ..replication import placement
from ..topology.grid import Grid
from . import messages as m
from .membership import Agent, in_order


class Phase(Enum):
    """Where the job is."""

    GATHERING = "gathering"
    TRAINING = "training"
    HALTING = "halting"
    RESUMING = "resuming"
    ENDED = "ended"


@dataclass(frozen=True)
class ControlConfig:
    """The job's shape and its deadlines. The relations between the deadlines are checked here, once."""

    run_id: str
    token: str
    grid: Grid
    nodes: int
    spares: int
    lease_s: float = 3.0
    heartbeat_interval_s: float = 0.5
    halt_timeout_s: float = 30.0  # from the halt order to a survivor's report; then its node is given up
    resume_timeout_s: float = 120.0  # from the plan to the last rank's "restored"; then the silent nodes are given up
    wait_for_spare_s: float = 60.0
    settle_s: float = 30.0  # at start: how long spares are waited for once enough nodes are there

    def __post_init__(self) -> None:
        if self.lease_s < 3 * self.heartbeat_interval_s:
            raise UsageError(
                f"a lease must outlast three heartbeats, or one late message ends a healthy node: --hot-swap-lease-s is "
                f"{self.lease_s}, --hot-swap-heartbeat-interval-s is {self.heartbeat_interval_s}; raise the first"
            )
        if self.halt_timeout_s <= self.lease_s:
            raise UsageError(
                f"--hot-swap-halt-timeout-s ({self.halt_timeout_s}) must be longer than --hot-swap-lease-s ({self.lease_s}): a "
                "second node may fall silent during a recovery, and must be noticed first"
            )
        if self.nodes < 1 or self.grid.world_size % self.nodes:
            raise UsageError(
                f"every node holds the same number of ranks: {self.grid.world_size} ranks on {self.nodes} nodes do not divide; "
                "change --nodes or --ranks-per-node"
            )

    @property
    def ranks_per_node(self) -> int:
        """Workers of each node."""
        return self.grid.world_size // self.nodes


@dataclass(frozen=True)
class Send:
    """Decision: put a message on an agent's connection."""

    incarnation: str
    message: m.FromCoordinator


@dataclass(frozen=True)
class Log:
    """Decision: a line for events.jsonl, with the reason and the evidence."""

    kind: str
    reason: str
    data: dict[str, Any] = field(default_factory=dict)


Decision = Send | Log


@dataclass
class Recovery:
    """One recovery in progress, and its time line (seconds of the caller's clock)."""

    detected_s: float
    last_heard_s: float  # when the lost node was last known to live
    lost_nodes: list[str]
    evidence: list[str]
    halt_sent_s: float
    halted_s: float | None = None
    planned_s: float | None = None
    restored: dict[int, m.Restored] = field(default_factory=dict)
    restored_s: float | None = None
    first_step: set[int] = field(default_factory=set)
    generation: int | None = None
    attempts: int = 1


class Control:
    """The decisions of one job. `exit_code` is set once, when the job is over."""

    def __init__(self, config: ControlConfig) -> None:
        self.config = config
        self.phase = Phase.GATHERING
        self.agents: dict[str, Agent] = {}
        self.fenced: dict[str, str] = {}  # incarnation -> why it may not come back
        self.membership: m.Membership | None = None
        self.version = 0  # the newest version ever used; only grows
        self.committed = -1
        self.acknowledged: dict[int, int] = {}
        self.exit_code: int | None = None
        self.exit_reason = ""
        self.recovery: Recovery | None = None
        self.recoveries: list[Recovery] = []
        self.gathered_s: float | None = None
        self.said_waiting = ""
        self.halt_reports: dict[int, m.HaltReport] = {}
        self.replica_reports: dict[str, m.ReplicaReport] = {}
        self.errors: dict[int, tuple[float, m.WorkerError]] = {}
        self.finished: set[int] = set()
        self.deadline_s: float | None = None
        self.spare_deadline_s: float | None = None
        self.last_tick_s: float | None = None

    # ---- the caller's two entries

    def handle(self, incarnation: str, event: m.Event, now: float) -> list[Decision]:
        """Take one event of the agent `incarnation` at time `now`."""
        agent = self.agents.get(incarnation)
        if agent is not None:
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
        self._forgive_own_pause(now)
        # Until there are ranks to lose, only a closed connection counts: a machine that starts many workers may be slow to speak.
        started = self.phase is not Phase.GATHERING
        silent = [a for a in self.agents.values() if started and now - a.last_heard_s > self.config.lease_s]
        if silent:
            evidence = {a.incarnation: f"silent for {now - a.last_heard_s:.2f} s, lease {self.config.lease_s} s" for a in silent}
            out += self._lose(evidence, now)
        if self.phase is Phase.GATHERING:
            out += self._try_start(now)
        elif self.phase is Phase.TRAINING:
            out += self._judge_errors(now)
        elif self.phase is Phase.HALTING:
            if self.deadline_s is not None and now > self.deadline_s:
                out += self._give_up_silent_ranks("did not report its halt", set(self.halt_reports), now)
            if self.phase is Phase.HALTING:
                out += self._try_plan(now)
        elif self.phase is Phase.RESUMING and self.deadline_s is not None and now > self.deadline_s:
            assert self.recovery is not None
            out += self._give_up_silent_ranks("did not restore its state", set(self.recovery.restored), now)
        return out

    def _forgive_own_pause(self, now: float) -> None:
        """Time in which the coordinator itself stood still says nothing about the agents: their messages wait unread."""
        pause = now - self.last_tick_s if self.last_tick_s is not None else 0.0
        self.last_tick_s = now
        if pause > self.config.heartbeat_interval_s:
            for agent in self.agents.values():
                agent.last_heard_s += pause

    # ---- joining and starting

    def _join(self, incarnation: str, event: m.Join, now: float) -> list[Decision]:
        refusal = self._refusal(event)
        if refusal:
            return [Send(incarnation, m.Refused(refusal)), Log("refused", refusal, {"node": event.node})]
        agent = Agent(event, now, ranks=[None] * event.workers)
        self.agents[incarnation] = agent
        welcome = m.Welcome(self.config.lease_s, self.config.heartbeat_interval_s)
        return [Send(incarnation, welcome), Log("joined", f"node {event.node} joined with {event.workers} workers", {"node": event.node})]

    def _refusal(self, event: m.Join) -> str:
        if event.protocol != m.PROTOCOL:
            return f"protocol {m.PROTOCOL} is spoken here, node {event.node} speaks {event.protocol}; install the same version"
        if event.token != self.config.token:
            return f"node {event.node} does not have this job's token"
        if event.run_id != self.config.run_id:
            return f"this is run {self.config.run_id!r}, node {event.node} belongs to run {event.run_id!r}"
        if event.workers != self.config.ranks_per_node:
            return (
                f"every node of this job has {self.config.ranks_per_node} workers, node {event.node} has {event.workers}; "
                "start it with the same --ranks-per-node"
            )
        return ""

    def _ready(self, incarnation: str, event: m.WorkerReady, now: float) -> list[Decision]:
        agent = self.agents[incarnation]
        agent.ready.add(event.worker)
        agent.stores[event.worker] = event.store
        if self.phase is Phase.GATHERING:
            return self._try_start(now)
        if self.phase is Phase.HALTING:
            return self._assign_spares(now) + self._try_plan(now)
        return [Log("spare", f"node {agent.node} is a warm spare", {"node": agent.node})] if agent.warm and agent.spare else []

    def _try_start(self, now: float) -> list[Decision]:
        warm = in_order(a for a in self.agents.values() if a.warm)
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
        members: list[m.Member] = []
        for agent in active:
            for worker in range(self.config.ranks_per_node):
                agent.ranks[worker] = len(members)
                members.append(agent.member(worker))
        holders = placement.place(self.config.grid, [member.node for member in members])
        self.version = 1
        self.membership = m.Membership(1, tuple(members), holders)
        self.phase = Phase.TRAINING
        start = m.Start(self.membership, active[0].stores.pop(0))
        nodes, spares = [a.node for a in active], [a.node for a in warm[self.config.nodes :]]
        return [
            *(Send(a.incarnation, start) for a in active),
            Log("start", f"{len(members)} ranks on {nodes}, spares {spares}", {"nodes": nodes, "spares": spares, "holders": holders}),
        ]

    # ---- while training

    def _acknowledged(self, incarnation: str, event: m.Acknowledged, now: float) -> list[Decision]:
        if self.agents[incarnation].ranks.count(event.rank) == 0:
            return []
        self.acknowledged[event.rank] = max(event.generation, self.acknowledged.get(event.rank, -1))
        assert self.membership is not None
        if len(self.acknowledged) < len(self.membership.members):
            return []
        committed = min(self.acknowledged.values())
        if committed <= self.committed:
            return []
        self.committed = committed
        return [Send(i, m.Commit(committed)) for i in self._member_agents()]

    def _worker_error(self, incarnation: str, event: m.WorkerError, now: float) -> list[Decision]:
        if event.version != self.version:
            return []
        log = Log("error", f"rank {event.rank} in step {event.step}: {event.text}", {"rank": event.rank, "step": event.step})
        if not event.collective:
            return [log, *self._end(1, f"rank {event.rank} failed in step {event.step}: {event.text}")]
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
        if event.code != 0:
            who = f"rank {event.rank}" if event.rank is not None else f"worker {event.worker}"
            return self._end(event.code, f"{who} on node {self.agents[incarnation].node} ended: {event.text}")
        if event.rank is not None:
            self.finished.add(event.rank)
        if len(self.finished) == self.config.grid.world_size:
            return self._end(0, "training is done")
        return []

    def _inject(self, incarnation: str, event: m.Inject, now: float) -> list[Decision]:
        on_node = [a for a in self.agents.values() if a.node == event.injection.node]
        if not on_node:
            return [Log("inject-refused", f"there is no node {event.injection.node!r}; nodes: {sorted(a.node for a in self.agents.values())}")]
        text = f"{event.injection.action} {event.injection.scope} on {event.injection.node}"
        if event.injection.at_step is not None:
            text += f" in step {event.injection.at_step}, phase {event.injection.phase or 'forward'}"
        return [Send(on_node[0].incarnation, m.Arm(event.injection)), Log("inject", text, {"node": event.injection.node})]

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
        self.phase = Phase.HALTING
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
        what = f"lost {lost}" if lost else "a collective failed with every node alive"
        reason = f"{what}: membership {over} is over"
        halt = m.Halt(over, reason)
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
        spares = [a for a in in_order(self.agents.values()) if a.warm and a.spare]
        for ranks in (vacant[i : i + per_node] for i in range(0, len(vacant), per_node)):
            if not spares:
                self.spare_deadline_s = self.spare_deadline_s or now + self.config.wait_for_spare_s
                out.append(Log("no-spare", f"ranks {ranks} wait for a spare, at most {self.config.wait_for_spare_s} s", {"ranks": ranks}))
                break
            spare = spares.pop(0)
            for worker, rank in enumerate(ranks):
                spare.ranks[worker] = rank
                members[rank] = spare.member(worker)
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

    def _give_up_silent_ranks(self, what: str, reported: set[int], now: float) -> list[Decision]:
        assert self.membership is not None
        silent = {
            x.incarnation: f"rank {r} {what} in time"
            for r, x in enumerate(self.membership.members)
            if r not in reported and x.incarnation in self.agents
        }
        return self._lose(silent, now) if silent else []

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
        if any(i not in self.replica_reports for i in self._member_agents()):
            return []
        holdings = [
            plan.Holdings(r.done, r.between_steps, frozenset(r.own)) for _, r in sorted(self.halt_reports.items())
        ]
        replicas: dict[int, dict[int, list[str]]] = {}
        for incarnation, report in self.replica_reports.items():
            for rank, generations in report.replicas.items():
                for generation in generations:
                    replicas.setdefault(rank, {}).setdefault(generation, []).append(incarnation)
        choice = plan.choose(holdings, replicas)
        if isinstance(choice, str):
            return self._end(1, f"nothing to go back to: {choice}")
        return self._resume(choice, now)

    def _resume(self, choice: plan.Choice, now: float) -> list[Decision]:
        assert self.membership is not None and self.recovery is not None
        members = self.membership.members
        holders = placement.place(self.config.grid, [x.node for x in members])
        self.membership = m.Membership(self.version, members, holders)
        # The store is served by a survivor: a rank that had a state when it was halted.
        host = min(r for r, report in self.halt_reports.items() if report.done is not None)
        sources = {rank: self.agents[incarnation].join.h2h for rank, incarnation in choice.fetch.items()}
        self.phase = Phase.RESUMING
        self.deadline_s = now + self.config.resume_timeout_s
        self.recovery.planned_s = now
        self.recovery.generation = choice.generation
        self.acknowledged.clear()
        self.committed = min(self.committed, choice.generation)
        resume = m.Resume(self.membership, choice.generation, self.halt_reports[host].store, sources, choice.redo_sections)
        data = {"version": self.version, "generation": choice.generation, "fetch": sorted(sources), "holders": holders}
        return [*(Send(i, resume) for i in self._member_agents()), Log("plan", choice.reason, data)]

    def _restored(self, incarnation: str, event: m.Restored, now: float) -> list[Decision]:
        if event.version != self.version or self.membership is None or self.recovery is None:
            return []
        self.recovery.restored[event.rank] = event
        if len(self.recovery.restored) < len(self.membership.members):
            return []
        self.recovery.restored_s = now
        self.phase = Phase.TRAINING
        self.deadline_s = None
        return [Log("resumed", f"membership {self.version} trains on from generation {self.recovery.generation}", {"version": self.version})]

    def _first_step(self, incarnation: str, event: m.FirstStep, now: float) -> list[Decision]:
        if event.version != self.version or self.recovery is None or self.membership is None:
            return []
        self.recovery.first_step.add(event.rank)
        if self.phase is not Phase.TRAINING or len(self.recovery.first_step) < len(self.membership.members):
            return []
        done, self.recovery = self.recovery, None
        self.recoveries.append(done)
        return [Log("recovered", f"{'swap' if done.lost_nodes else 'reset'} complete", {"recovery": self._time_line(done, now)})]

    def _time_line(self, r: Recovery, now: float) -> dict[str, Any]:
        restored = list(r.restored.values())
        rebuild = max((x.rebuild_s for x in restored), default=0.0)
        restore = max((x.restore_s for x in restored), default=0.0)
        halted, planned, end = (r.halted_s or now), (r.planned_s or now), (r.restored_s or now)
        return {
            "kind": "swap" if r.lost_nodes else "reset",
            "nodes_lost": r.lost_nodes,
            "evidence": r.evidence,
            "generation": r.generation,
            "attempts": r.attempts,
            "version": self.version,
            "last_heard_s": r.last_heard_s,
            "detected_s": r.detected_s,
            "halt_s": halted - r.detected_s,
            "plan_s": planned - halted,
            "rebuild_s": rebuild,
            "restore_s": max(restore, end - planned - rebuild),
            "first_step_s": now - end,
            "ended_s": now,
            "steps_rerun": max((x.steps_rerun for x in restored), default=0),
            "bytes_restored": sum(x.bytes_restored for x in restored),
        }

    def _member_agents(self) -> list[str]:
        assert self.membership is not None
        return [i for i in dict.fromkeys(x.incarnation for x in self.membership.members) if i in self.agents]

    def _end(self, code: int, reason: str) -> list[Decision]:
        self.phase = Phase.ENDED
        self.exit_code, self.exit_reason = code, reason
        return [Log("end", reason, {"code": code}), *(Send(i, m.Stop(code, reason)) for i in self.agents)]


_Handler = Callable[[Control, str, Any, float], list[Decision]]
_LIVE = (Phase.GATHERING, Phase.TRAINING, Phase.HALTING, Phase.RESUMING)
_STARTED = _LIVE[1:]
#: (phase, event) -> what is done. docs/architecture.md shows it as a diagram.
_TRANSITIONS: dict[tuple[Phase, type], _Handler] = {
    **{(p, m.Join): Control._join for p in _LIVE},
    **{(p, m.WorkerReady): Control._ready for p in _LIVE},
    **{(p, m.Heartbeat): Control._heartbeat for p in Phase},
    **{(p, m.AgentLost): Control._agent_lost for p in _LIVE},
    **{(p, m.WorkerLost): Control._worker_lost for p in _LIVE},
    **{(p, m.Inject): Control._inject for p in _LIVE},
    **{(p, m.Note): Control._note for p in _LIVE},
    **{(p, m.Finished): Control._finished for p in _LIVE},
    **{(p, m.StepDone): Control._step_done for p in Phase},
    **{(p, m.Acknowledged): Control._acknowledged for p in (Phase.TRAINING, Phase.RESUMING)},
    **{(p, m.FirstStep): Control._first_step for p in (Phase.TRAINING, Phase.RESUMING)},
    (Phase.TRAINING, m.WorkerError): Control._worker_error,
    (Phase.HALTING, m.HaltReport): Control._halt_report,
    (Phase.HALTING, m.ReplicaReport): Control._replica_report,
    (Phase.RESUMING, m.Restored): Control._restored,
}
