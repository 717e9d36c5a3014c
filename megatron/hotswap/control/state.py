"""The coordinator's state machine. Pure: see the package docstring for the caller's loop.

    GATHERING -> TRAINING -> HALTING -> RESUMING -> TRAINING … -> ENDED
                 ^              ^           |
    RETURNING ---'              '-----------'   a failure during a recovery starts it over with what is left

Changes of phase are the table in phases.py, events the table at the end of this file. What another coordinator has begun is taken up in
returning.py, what comes before training is in starting.py, what follows a loss in recovering.py, what is written to disk in saving.py. An
event that has no entry in the table for the present phase is logged and dropped: late and repeated messages are normal. A change of phase
that has none is a bug of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import messages as m
from .attempt import Ending
from .config import ControlConfig as ControlConfig
from .decisions import Decision as Decision
from .decisions import Log as Log
from .decisions import Send as Send
from .injection import arm
from .phases import Phase as Phase
from .returning import Returning


class Control(Returning):
    """The decisions of one job. `exit_code` is set once, when the job is over."""

    # ---- the caller's two entries

    def handle(self, incarnation: str, event: m.Event, now: float) -> list[Decision]:
        """Take one event of the agent `incarnation` at time `now`."""
        agent = self.agents.get(incarnation)
        if agent is not None:
            if isinstance(event, m.Join | m.Rejoin):
                return [Log("ignored", f"{incarnation} has joined already", {"agent": incarnation})]
            if not isinstance(event, m.AgentLost):
                agent.last_heard_s = now
        elif incarnation in self.fenced and not isinstance(event, m.AgentLost):
            return [Send(incarnation, m.Refused(f"this agent was fenced: {self.fenced[incarnation]}"))]
        elif not isinstance(event, m.Join | m.Rejoin | m.AgentLost | m.Inject | m.SaveWanted | m.Release):
            return [Send(incarnation, m.Refused("not joined: the first message must be Join"))]
        handler = _TRANSITIONS.get((self.phase, type(event)))
        if handler is None:
            return [Log("ignored", f"{type(event).__name__} has no meaning while {self.phase.value}", {"agent": incarnation})]
        return handler(self, incarnation, event, now)

    def tick(self, now: float) -> list[Decision]:
        """Deadlines: leases, reports that do not come, spares that do not come. Call at least every heartbeat interval."""
        if self.phase is Phase.ENDED:
            return []
        if self.phase is Phase.RETURNING:
            return self._go_on_returning(now)
        out: list[Decision] = []
        late = {} if self._at_the_last_rung else self._late_respawns(now)
        gone = {**late, **self.lease.silent(self.agents.values(), now)}
        # Until there are ranks to lose, only a closed connection counts: a machine that starts many workers may be slow to speak.
        if gone and self.phase is not Phase.GATHERING:
            out += self._lose(gone, now)
        overdue = self.deadline_s is not None and now > self.deadline_s
        if self.phase is Phase.LOADING:
            out += self._go_on_loading(now)
        if self.phase is Phase.GATHERING:
            out += self._gather(now)
        elif self.phase is Phase.HALTING:
            if overdue and not self._at_the_last_rung:
                out += self._give_up_silent_ranks(now)
            if self.phase is Phase.HALTING:
                out += self._try_plan(now)
        elif self.phase is Phase.RESUMING and overdue:
            out += self._resume_overdue(now)
        elif self.phase in (Phase.TRAINING, Phase.RESUMING):
            out += self._judge_errors(now)
        if self.phase is Phase.TRAINING and not self.finished and (evidence := self.hang.look(self.config.grid.world_size, now)):
            out += self._reset(self.hang.behind, evidence, now, now)
        if self.exit_code is None:
            out += self._replace_unhealthy(now)
        return out if self.exit_code is not None else out + self._go_on_saving(now)

    def stop(self, code: int, reason: str) -> list[Decision]:
        """The job is over for a reason that lies outside: its user, or its launcher, wants no more of it."""
        return [] if self.phase is Phase.ENDED else self._end(code, reason)

    # ---- joining and starting

    def _join(self, incarnation: str, event: m.Join, now: float) -> list[Decision]:
        return self._admit(incarnation, event, now, f"joined with {event.workers} workers")

    def _ready(self, incarnation: str, event: m.WorkerReady, now: float) -> list[Decision]:
        agent = self.agents[incarnation]
        if not 0 <= event.worker < agent.join.workers:
            text = f"node {agent.node} has {agent.join.workers} workers, there is no worker {event.worker}"
            return [Log("ignored", text, {"agent": incarnation})]
        agent.ready.add(event.worker)
        agent.stores[event.worker] = event.store
        was_down = agent.due_s.pop(event.worker, None) is not None
        if self.phase is Phase.GATHERING:
            return self._one_more_is_warm(now) if agent.warm else []
        if self.phase is Phase.HALTING:
            again = self._assign_again(agent, event.worker, now) if was_down else []
            return again + self._assign_spares(now) + self._try_plan(now)
        return [Log("spare", f"node {agent.node} is a warm spare", {"node": agent.node})] if agent.warm and agent.spare else []

    # ---- while training

    def _acknowledged(self, incarnation: str, event: m.Acknowledged, now: float) -> list[Decision]:
        if not self._counts(incarnation, event) or not self.commits.acknowledge(event):
            return []
        commit: list[Decision] = [Send(i, m.Commit(event.generation)) for i in self._member_agents()]
        if not (differ := self.commits.difference(event.generation)):
            return commit
        log = Log("peers-differ", differ, {"generation": event.generation})
        return [*commit, log, *(Send(i, m.SendWhole(differ)) for i in self.agents)]

    def _skipped(self, incarnation: str, event: m.Skipped, now: float) -> list[Decision]:
        """One rank's skip makes the generation void for all: else those who took it would wait for a commit that never comes."""
        if not self._counts(incarnation, event) or not self.commits.skip(event.generation):
            return []
        text = f"generation {event.generation}: rank {event.rank} still waits for the one before it to be committed"
        log = Log("generation-skipped", text, {"generation": event.generation, "rank": event.rank})
        return [log, *(Send(i, m.Void(event.generation)) for i in self._member_agents()), *self._saving_void(event.generation)]

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
        current = event.version == self.version
        if self.phase is Phase.HALTING and self.recovery is not None:  # it may have met the halt on the way, and another one after that
            current = self.recovery.first_over <= event.version < self.version
        if self._at_the_last_rung or not current or event.rank not in self.agents[incarnation].ranks:
            return []
        log = Log("error", f"rank {event.rank} in step {event.step}: {event.text}", {"rank": event.rank, "step": event.step})
        if not event.collective:
            return [log, *self._program_error(incarnation, event, now)]
        if self.phase is Phase.HALTING:  # what it says is what the halt does to everyone
            return []
        self.errors[event.rank] = (now, event)
        return [log]

    def _program_error(self, incarnation: str, event: m.WorkerError, now: float) -> list[Decision]:
        """An exception that no communication raised. Memory that is full, or a device gone wrong, raises too: the first time, its
        process is started again. The same exception in the same step once more, wherever, is the program's own."""
        agent = self.agents[incarnation]
        worker, kind = agent.ranks.index(event.rank), event.text.split(":", 1)[0]
        what = f"failed in step {event.step}: {event.text}"
        before = self.program_errors.setdefault((event.step, kind), event)
        if worker in agent.due_s or (before is not event and (before.rank, before.version) == (event.rank, event.version)):
            return []  # said before
        if before is not event or not self.stepped or self.finished:
            why = "" if before is event else f"; rank {before.rank} had failed there in the same way, so it is the program, not a node"
            return self._fail(Ending(1, f"rank {event.rank} {what}{why}", (incarnation, worker)), now)
        return self._lose({}, now, {(incarnation, worker): what})

    def _judge_errors(self, now: float) -> list[Decision]:
        """A collective failed, yet no node was lost: the fault was in between, so all begin again in place."""
        if not self.errors:
            return []
        first_s, first = min(self.errors.values(), key=lambda e: e[0])
        if not self._heard_enough(first_s, now):
            return []
        return self._reset(self.errors.keys(), f"rank {first.rank}: {first.text}", first_s, now)

    def _heard_enough(self, since_s: float, now: float) -> bool:
        """Whether every node was heard long enough after a failure to have spoken since. (A worker's death that its agent sees later
        belongs to the recovery that has begun.) Who is not heard has as long as its lease."""
        interval_s = self.config.heartbeat_interval_s
        heard = all(self.agents[i].last_heard_s >= since_s + interval_s for i in self._member_agents())
        return heard or now - since_s > self.config.lease_s + 2 * interval_s

    def _worker_lost(self, incarnation: str, event: m.WorkerLost, now: float) -> list[Decision]:
        if not 0 <= event.worker < self.agents[incarnation].join.workers:
            return []
        if self._at_the_last_rung or self.agents[incarnation].leaving:  # its agent has what it left
            data = {"worker": event.worker, "rank": None}
            return [Log("worker-lost", f"worker {event.worker}: {event.evidence}; it is not needed any more", data)]
        return self._lose({}, now, {(incarnation, event.worker): event.evidence})

    def _agent_lost(self, incarnation: str, event: m.AgentLost, now: float) -> list[Decision]:
        if incarnation not in self.agents:
            return []
        if event.misbehaved or self.phase not in (Phase.GATHERING, Phase.LOADING):
            return self._lose({incarnation: event.evidence}, now)
        # Nothing depends on it yet: if it was the connection alone, it may come back. Back before the next tick, it would be waited for,
        # and not know.
        return [*self._lose({incarnation: event.evidence}, now, may_return=[incarnation]), *self._go_on_loading(now)]

    def _finished(self, incarnation: str, event: m.Finished, now: float) -> list[Decision]:
        if event.code != 0 and (self._at_the_last_rung or self.agents[incarnation].leaving):
            return []
        node = self.agents[incarnation].node
        who = f"rank {event.rank}" if event.rank is not None else f"worker {event.worker}"
        if event.code != 0 and self._has_no_state(event.rank):
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

    def _has_no_state(self, rank: int | None) -> bool:
        """Whether a worker is a spare's, or one that has been given its rank in this recovery and has not restored it yet."""
        if self.recovery is None or rank is None:
            return rank is None and self.phase not in (Phase.GATHERING, Phase.LOADING)
        had = {r for r, report in self.halt_reports.items() if report.done is not None} | self.recovery.restored.keys()
        return self.phase is not Phase.TRAINING and rank not in had

    def _over_for_all(self, incarnation: str, event: m.Rejoin, now: float) -> list[Decision]:
        """The job ended while it had no coordinator."""
        return [Send(incarnation, m.Stop(1 if self.exit_code is None else self.exit_code, self.exit_reason))]

    def _inject(self, incarnation: str, event: m.Inject, now: float) -> list[Decision]:
        decisions = arm(event.injection, self.agents.values())
        if any(isinstance(d, Log) and d.kind == "inject-refused" for d in decisions):
            return decisions
        if event.injection.action == "fail-collective":  # nobody is lost
            self.resets.expect()
        elif event.injection.action != "plug":
            self.quarantine.expect(event.injection.node)
            self.revision += 1
        return decisions

    def _note(self, incarnation: str, event: m.Note, now: float) -> list[Decision]:
        return [Log(event.kind, event.text, {"node": self.agents[incarnation].node})]

    def _heartbeat(self, incarnation: str, event: m.Heartbeat, now: float) -> list[Decision]:
        agent = self.agents[incarnation]
        self.hang.heard({r: p for r, p in event.progress.items() if r in agent.ranks})
        if now - agent.answered_s < self.config.lease_s * _ANSWERED_LEASES:
            return []
        agent.answered_s = now
        return [Send(incarnation, m.Alive())]

    def on_course(self, record: m.StepRecord) -> bool:
        """Whether a step was completed in the course that training takes, as far as is known. One of a membership that is over may be
        told late, by a node that leaves even: it stays complete unless the plan goes back behind it."""
        if record.version >= self.version or self.phase is Phase.HALTING:
            return record.version <= self.version
        return record.step <= self.base

    def _step_done(self, incarnation: str, event: m.StepDone, now: float) -> list[Decision]:
        self.stepped = True  # the service records the rest
        if event.record.step > self.newest_step:
            self.newest_step, self.newest_step_known = event.record.step, True
        self.revision += self.loop.passed(self.newest_step)  # once, after the step has failed
        self.hang.step_done(event.record.seconds)
        return []


#: Of a lease: heartbeats that come sooner after an answer get none. A lease outlasts three heartbeats, so an agent hears something within
#: two thirds of one, and the coordinator of thousands says half as much.
_ANSWERED_LEASES = 1 / 3
_Handler = Callable[[Control, str, Any, float], list[Decision]]
_LIVE = (Phase.RETURNING, Phase.GATHERING, Phase.LOADING, Phase.TRAINING, Phase.HALTING, Phase.RESUMING)
_STARTED = _LIVE[3:]
#: What agents say to a coordinator that has not yet heard them all.
_HELD = (m.WorkerReady, m.WorkerLost, m.Finished, m.Acknowledged, m.Skipped, m.CopyDamaged, m.FirstStep, m.WorkerError)
#: (phase, event) -> what is done. docs/architecture.md shows it as a diagram.
_TRANSITIONS: dict[tuple[Phase, type], _Handler] = {
    **{(p, m.Join): Control._join for p in _LIVE},
    (Phase.ENDED, m.Join): lambda self, who, event, now: [Send(who, m.Refused(f"the job is over: {self.exit_reason}"))],
    **{(p, m.Rejoin): Control._rejoin for p in _LIVE},
    (Phase.ENDED, m.Rejoin): Control._over_for_all,
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
    **{(p, m.WorkerError): Control._worker_error for p in _STARTED},
    **{(p, m.SaveWanted): Control._save_wanted for p in _LIVE},
    **{(p, m.Unhealthy): Control._unhealthy for p in _LIVE},
    **{(p, m.HealthyAgain): Control._healthy_again for p in _LIVE},
    **{(p, m.Release): Control._release for p in _LIVE},
    **{(p, m.SnapshotWritten): Control._snapshot_written for p in _STARTED},
    **{(p, m.WriteFailed): Control._write_failed for p in _STARTED},
    **{(p, m.GenerationWhole): Control._generation_whole for p in _STARTED},
    **{(p, m.Stock): Control._stock_or_left for p in _STARTED},
    (Phase.LOADING, m.Loaded): Control._loaded,
    (Phase.HALTING, m.HaltReport): Control._halt_report,
    (Phase.HALTING, m.ReplicaReport): Control._replica_report,
    (Phase.RESUMING, m.Restored): Control._restored,
    **{(Phase.RETURNING, event): Control._hold for event in _HELD},
    (Phase.RETURNING, m.AgentLost): Control._lost_returning,
}
