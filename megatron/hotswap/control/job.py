"""The state of one job, and what every part of the core asks of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from . import messages as m
from .attempt import Saving
from .commits import Commits
from .config import ControlConfig
from .decisions import Decision, Log, Send
from .hang import HangDetector
from .lease import Lease
from .loop import LoopBreaker, Resets
from .membership import Agent
from .phases import Phase, require_change
from .quarantine import Quarantine
from .timeline import Recovery


class Job:
    """What is known of one job. `exit_code` is set once, when the job is over."""

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
        self.unreported: set[str] = set()  # agents that were told of the halt, and have not said what replicas they hold
        self.errors: dict[int, tuple[float, m.WorkerError]] = {}
        self.finished: set[int] = set()
        self.stepped = False  # whether any step was ever completed: what fails before is the program's, or the user's
        self.program_errors: dict[tuple[int, str], m.WorkerError] = {}  # (step, type of exception) -> who raised it first
        self.deadline_s: float | None = None
        self.spare_deadline_s: float | None = None
        self.lease = Lease(config)
        self.quarantine = Quarantine(config.quarantine_failures, config.quarantine_window_s)
        self.loop = LoopBreaker()
        self.resets = Resets(config.respawn_window_s)
        self.hang = HangDetector(config.hang_factor, config.hang_min_s)
        self.base = 0  # the generation that the membership began from
        self.newest_step = 0  # completed, as far as was said
        self.newest_step_known = True  # False: the job was taken up, and how far it came without a coordinator is not known yet
        self.saving: Saving | None = None  # while a generation is being written
        self.save_wanted = False  # by a user
        self.save_text = ""  # how the last one that a user wanted went
        self.attempts = 0  # to write a generation
        self.durable_generation = -1  # the newest that is whole on disk; -1: none that this job has written or begun from
        self.durable_folder = ""
        self.start: m.Start | None = None  # until the first recovery
        #: Grows with everything decided that a coordinator which takes the job up must know (decided.py).
        self.revision = 0

    @property
    def committed(self) -> int:
        """The newest generation that every rank's holders have; -1: none yet."""
        return self.commits.committed

    @property
    def generation_lag(self) -> int | None:
        """Completed steps after the committed generation: a loss now may run them again. None before the first is committed."""
        return max(0, self.newest_step - self.committed) if self.committed >= 0 else None

    def _enter(self, phase: Phase) -> None:
        require_change(self.phase, phase)
        self.phase = phase
        self.revision += 1
        if phase is Phase.TRAINING:
            self.hang.begin()

    def told_late(self, seconds: float) -> None:
        """What was decided could be told so much later only, so who is waited for has that much longer."""
        if self.deadline_s is not None:
            self.deadline_s += seconds
        if self.spare_deadline_s is not None:
            self.spare_deadline_s += seconds
        if self.saving is not None:
            self.saving.stock_due_s += seconds
        for agent in self.agents.values():
            agent.due_s = {worker: due_s + seconds for worker, due_s in agent.due_s.items()}

    def _vacant(self) -> list[int]:
        """Ranks whose member is gone, or leaves."""
        assert self.membership is not None
        staying = {i for i, agent in self.agents.items() if not agent.leaving}
        return [r for r, x in enumerate(self.membership.members) if x.incarnation not in staying]

    def _usable(self, incarnation: str, rank: int, generations: Iterable[int]) -> frozenset[int]:
        """Of the generations of a rank that an agent says it has: those that can be restored from, as far as is known."""
        up_to = self.agents[incarnation].left_up_to if incarnation in self.agents else None
        return self.commits.usable(incarnation, rank, (g for g in generations if up_to is None or g <= up_to))

    def _down(self) -> list[int]:
        """Ranks whose node lives and whose process is being started again."""
        assert self.membership is not None
        members = self.membership.members
        return [r for r, x in enumerate(members) if x.incarnation in self.agents and x.worker in self.agents[x.incarnation].due_s]

    def _member_agents(self) -> list[str]:
        assert self.membership is not None
        return [i for i in dict.fromkeys(x.incarnation for x in self.membership.members) if i in self.agents]

    def _holds_rank(self, incarnation: str) -> bool:
        return self.membership is not None and any(x.incarnation == incarnation for x in self.membership.members)

    def _counts(self, incarnation: str, event: m.Acknowledged | m.Skipped | m.Restored | m.FirstStep) -> bool:
        """Whether it is of the present membership, and said by the agent that holds the rank in it."""
        return event.version == self.version and event.rank in self.agents[incarnation].ranks

    def _end(self, code: int, reason: str, failed: tuple[str, int] | None = None) -> list[Decision]:
        self._enter(Phase.ENDED)
        self.exit_code, self.exit_reason, self.failed = code, reason, failed
        return [Log("end", reason, {"code": code, "failed": failed}), *(Send(i, m.Stop(code, reason)) for i in self.agents)]
