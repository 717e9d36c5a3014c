"""`--on-failure restart`: no hot swap; the whole job is started anew from Megatron's newest checkpoint. Pure.

What is done where there is no hot swap, with the same agents, detectors and instruments: the fallback, and what hot swap is measured
against. The workers train plainly: no snapshots, no replicas, no fence. The phases are those of a recovery:

    HALTING     every worker that had a rank is ended and started anew; a lost node waits for another in its place
    RESUMING    enough nodes are warm: ranks are given out anew, models are built, the checkpoint is read
    TRAINING    every rank has read it, and all the same one

A committed generation is one that Megatron's checkpoint has. Evidence, leases, quarantine and the count of failures in vain are those of
hot swap, so a step that fails again and again ends this job as it ends that one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from . import messages as m
from .config import ControlConfig
from .decided import Decided
from .decisions import Decision, Log, Send
from .hang import HangDetector
from .membership import Agent, give_ranks, one_per_node
from .phases import Phase
from .state import Control
from .timeline import Recovery

#: Moments of a step that only hot swap has, so that no fault can strike in them.
HOT_SWAP_PHASES = ("fence", "d2h", "h2h")
#: Heartbeats that a failed collective waits for: whoever broke it, all begin anew, but its loss is the better evidence.
_ERROR_HEARTBEATS = 2


def control_of(config: ControlConfig, decided: Decided | None = None, now: float = 0.0) -> Control:
    """The core of a job: hot swap's, or this one."""
    return (Restarting if config.on_failure == "restart" else Control)(config, decided, now)


class Restarting(Control):
    """The decisions of a job that restarts."""

    def __init__(self, config: ControlConfig, decided: Decided | None = None, now: float = 0.0) -> None:
        super().__init__(config, decided, now)
        self._armed: list[m.Injection] = []  # faults on purpose whose step is yet to come: they would end with the processes

    def handle(self, incarnation: str, event: m.Event, now: float) -> list[Decision]:
        """Take one event of the agent `incarnation` at time `now`."""
        own = _TRANSITIONS.get((self.phase, type(event)))
        agent = self.agents.get(incarnation)
        if own is None or (agent is None and isinstance(event, m.Restored | m.Finished)):
            return super().handle(incarnation, event, now)
        if agent is not None:
            agent.last_heard_s = now
        return own(self, incarnation, event, now)

    # ---- from the loss to enough warm nodes

    def _begin_recovery(
        self,
        lost: list[str],
        evidence: list[str],
        heard: float,
        now: float,
        down: Mapping[int, str] | None = None,
        what: str = "",
    ) -> list[Decision]:
        """End every worker that has a rank, and start it anew. The arguments are hot swap's; `_lose` has ordered for `down` already."""
        over = self.version
        begins = Recovery(now, heard, [], [], now, over, restart=True)
        _, happened = self._membership_over(begins, lost, evidence, down or {}, what)
        reason = f"{happened}: the whole job is started anew"
        self.deadline_s = None  # each process that is started has its own
        self.hang = HangDetector(self.config.hang_factor, self.config.hang_min_s)  # reading a checkpoint takes as long as it takes
        log = Log("recovery", reason, {"rung": "restart", "evidence": evidence, "version": over, "lost": lost})
        orders = [order for agent in self.agents.values() if not agent.spare for order in self._start_anew(agent, reason, now)]
        self._armed = [i for i in self._armed if (i.at_step or 0) > self.newest_step + 1]  # others have struck, or had their chance
        return [*orders, log]

    def _start_anew(self, agent: Agent, reason: str, now: float) -> list[Decision]:
        """All workers of a node but those that are being started already; it has no ranks until all are warm."""
        running = [worker for worker in range(agent.join.workers) if worker not in agent.due_s]
        for worker in running:
            agent.start_again(worker, now + self.config.respawn_timeout_s)
        agent.ranks = [None] * agent.join.workers
        return [Send(agent.incarnation, m.Respawn(worker, reason)) for worker in running]

    def _assign_spares(self, now: float) -> list[Decision]:
        return []  # nobody takes a rank alone

    def _assign_again(self, agent: Agent, worker: int, now: float) -> list[Decision]:
        return []

    def _give_up_silent_ranks(self, now: float) -> list[Decision]:
        return []  # nobody is asked for a report

    def _try_plan(self, now: float) -> list[Decision]:
        """Once enough nodes are warm, give the ranks out anew, in the order of the nodes. Called at every tick, too. Only lost nodes are
        replaced: a job with as many spares as nodes would else go on without those that still start, and how long a restart takes would
        depend on that."""
        assert self.recovery is not None and self.membership is not None
        nodes = one_per_node(a for a in self.agents.values() if not a.unhealthy and not a.leaving)
        if len(nodes) < self.config.nodes:
            return self._wait_for_node(len(nodes), now)
        self.spare_deadline_s = None
        had = {member.incarnation for member in self.membership.members}
        stay = [agent for agent in nodes if agent.incarnation in had]
        chosen = stay + [agent for agent in nodes if agent.incarnation not in had and agent.warm][: self.config.nodes - len(stay)]
        if len(chosen) < self.config.nodes or not all(agent.warm for agent in chosen):
            return []
        self.recovery.halted_s = self.recovery.planned_s = now
        self.recovery.generation = max(self.committed, 0)  # at least; what was read is said by who has read it
        self.deadline_s = now + self.config.resume_timeout_s
        members = give_ranks(sorted(chosen, key=lambda agent: agent.order))
        return self._start(m.Membership(self.version, tuple(members), ()), None)

    def _wait_for_node(self, here: int, now: float) -> list[Decision]:
        wait_s, wanted = self.config.wait_for_spare_s, self.config.nodes
        if self.spare_deadline_s is None:
            self.spare_deadline_s = now + wait_s
            ranks = list(range(self.config.grid.world_size))
            return [Log("no-spare", f"{here} of {wanted} nodes are here; another is waited for, at most {wait_s:g} s", {"ranks": ranks})]
        if now <= self.spare_deadline_s:
            return []
        text = (
            f"{here} of {wanted} nodes are here, and no other came in {wait_s:g} s; Megatron's newest checkpoint is that of step "
            f"{max(self.committed, 0)}: start the same command again with --load where --save is"
        )
        return self._end(75, text)

    # ---- from warm nodes to the first step

    def _start(self, membership: m.Membership, generation: int | None) -> list[Decision]:
        """The first time training begins at once, as hot swap's does; later once all have read the checkpoint."""
        again = self.recovery is not None
        self.membership = m.Membership(membership.version, membership.members, ((),) * len(membership.members))
        self._enter(Phase.RESUMING if again else Phase.TRAINING)
        active = [self.agents[i] for i in dict.fromkeys(x.incarnation for x in membership.members)]
        nodes, spares = [a.node for a in active], [a.node for a in one_per_node(self.agents.values()) if a.spare and a.warm]
        start = m.Start(self.membership, active[0].stores.pop(0))
        how = "from Megatron's newest checkpoint" if again else "checkpoints are Megatron's own; a loss starts the whole job anew"
        data: dict[str, Any] = {"nodes": nodes, "spares": spares, "holders": self.membership.holders}
        return [*(Send(a.incarnation, start) for a in active), Log("start", f"{len(membership.members)} ranks on {nodes}; {how}", data)]

    def _read_checkpoint(self, incarnation: str, event: m.Restored, now: float) -> list[Decision]:
        """A rank has built its model and read the checkpoint. All must have read the same one, or the job would train on a mix."""
        recovery = self.recovery
        if not self._counts(incarnation, event) or recovery is None or event.generation is None:
            return []
        recovery.restored[event.rank] = msgspec.structs.replace(event, steps_rerun=max(0, self.newest_step - event.generation))
        if len(recovery.restored) < self.config.grid.world_size:
            return []
        read = {rank: restored.generation for rank, restored in recovery.restored.items()}
        if len(set(read.values())) > 1:
            text = f"the ranks have read checkpoints of different steps: {read}; see that all nodes have the same file system at --save"
            return self._end(1, text)
        recovery.generation = event.generation
        self.commits.begin_again(event.generation)
        self.commits.committed = event.generation
        recovery.restored_s = now
        self._enter(Phase.TRAINING)
        self.deadline_s = None
        text = f"membership {self.version} trains on from the checkpoint of step {event.generation}, {self.newest_step} had been completed"
        resumed = Log("resumed", text, {"version": self.version, "generation": event.generation})
        commit: list[Decision] = [Send(i, m.Commit(event.generation)) for i in self._member_agents()]
        armed, self._armed = self._armed, []
        return [*commit, resumed, *(said for injection in armed for said in self._arm("", m.Inject(injection), now))]

    def _ended_while_halted(self, incarnation: str, event: m.Finished, now: float) -> list[Decision]:
        """Nobody has a rank now: one that speaks of its rank is a process that is being ended."""
        return [] if event.rank is not None else super()._finished(incarnation, event, now)

    def _could_not_begin(self, incarnation: str, event: m.Finished, now: float) -> list[Decision]:
        """Its script ended before it had read the checkpoint: all others end in the same way, and so they would the next time."""
        if event.code == 0 or event.rank is None:
            return super()._finished(incarnation, event, now)
        return self._end(event.code, f"rank {event.rank} could not go on from the checkpoint: {event.text}", (incarnation, event.worker))

    # ---- users

    def _save_refused(self, incarnation: str, event: m.SaveWanted, now: float) -> list[Decision]:
        text = "under --on-failure restart there are no snapshots to write; Megatron saves by its own --save-interval"
        return [Log("save-refused", text, {"phase": self.phase.value})]

    def _arm(self, incarnation: str, event: m.Inject, now: float) -> list[Decision]:
        injection = event.injection
        if injection.phase in HOT_SWAP_PHASES:
            data = {"node": injection.node, "worker": injection.worker, "action": injection.action}
            return [Log("inject-refused", f"the phase {injection.phase} is hot swap's; this job restarts, and never enters it", data)]
        decisions = super()._inject(incarnation, event, now)
        if injection.at_step is not None and any(isinstance(d, Send) for d in decisions):
            self._armed.append(injection)
        return decisions

    def _heard_enough(self, since_s: float, now: float) -> bool:
        """What follows a failed collective is the same whoever broke it. A loss that comes at once is named in its place."""
        return now - since_s > _ERROR_HEARTBEATS * self.config.heartbeat_interval_s

    def _struck(self, gone: list[str], down: Mapping[int, str], evidence: list[str]) -> str:
        """What fails while the checkpoint is read counts too: the next time it would fail again."""
        if self.phase is Phase.RESUMING and self.recovery is not None:
            on_purpose = any(self.quarantine.on_purpose(node, len(self.recoveries)) for node in (*gone, *down.values()))
            return "" if on_purpose else self._strike(gone, evidence)
        return super()._struck(gone, down, evidence)


_Handler = Callable[[Restarting, str, Any, float], list[Decision]]
_LIVE = tuple(phase for phase in Phase if phase is not Phase.ENDED)
#: (phase, event) -> what is done, where that is not what state.py's table says.
_TRANSITIONS: dict[tuple[Phase, type], _Handler] = {
    (Phase.RESUMING, m.Restored): Restarting._read_checkpoint,
    (Phase.HALTING, m.Finished): Restarting._ended_while_halted,
    (Phase.RESUMING, m.Finished): Restarting._could_not_begin,
    **{(p, m.SaveWanted): Restarting._save_refused for p in _LIVE},
    **{(p, m.Inject): Restarting._arm for p in _LIVE},
}
