"""One recovery in progress and its time line: detect, halt, plan, rebuild, restore, first step. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import messages as m


@dataclass
class Recovery:
    """One recovery in progress, and its time line (seconds of the caller's clock)."""

    detected_s: float
    last_heard_s: float  # when the lost node was last known to live
    lost_nodes: list[str]
    evidence: list[str]
    halt_sent_s: float
    first_over: int = 0  # the membership that was over when it began; each further failure in it ends one more
    respawned: dict[int, str] = field(default_factory=dict)  # rank whose process was started again -> node
    fresh: dict[int, int] = field(default_factory=dict)  # rank whose process is new and has no state yet -> version that it begins in
    out_s: float = 0.0  # from the order until the last survivor's training thread was out, by its own clock
    halted_s: float | None = None
    planned_s: float | None = None
    restored: dict[int, m.Restored] = field(default_factory=dict)
    restored_s: float | None = None
    first_step: set[int] = field(default_factory=set)
    generation: int | None = None
    attempts: int = 0
    timeouts: int = 0  # of resuming, in a row
    hoped_in: int = 0  # the membership in which it was last seen that a spare, if one came, could go on
    restart: bool = False  # of the whole job, from a checkpoint (restarting.py)

    def once_more(self, lost: list[str], evidence: list[str], down: Mapping[int, str]) -> Recovery:
        """It begins, or begins again since something more was lost: nodes, and ranks (with their nodes) whose process is started again."""
        self.attempts += 1
        self.restored.clear()
        self.first_step.clear()
        self.lost_nodes += lost
        self.evidence += evidence
        self.respawned |= down
        return self

    @property
    def kind(self) -> str:
        """The highest rung of the ladder that was needed; or what is done in place of climbing it."""
        if self.restart:
            return "restart"
        return "swap" if self.lost_nodes else "respawn" if self.respawned else "reset"

    def time_line(self, version: int, now: float) -> dict[str, Any]:
        """What events.jsonl says of it once every rank has completed a step of membership `version`."""
        restored = list(self.restored.values())
        rebuild = max((x.rebuild_s for x in restored), default=0.0)
        restore = max((x.restore_s for x in restored), default=0.0)
        halted, planned, end = (self.halted_s or now), (self.planned_s or now), (self.restored_s or now)
        return {
            "kind": self.kind,
            "nodes_lost": self.lost_nodes,
            "ranks_respawned": sorted(self.respawned),
            "nodes_struck": [*self.lost_nodes, *dict.fromkeys(self.respawned.values())],
            "evidence": self.evidence,
            "generation": self.generation,
            "attempts": self.attempts,
            "version": version,
            "last_heard_s": self.last_heard_s,
            "detected_s": self.detected_s,
            "halt_s": halted - self.detected_s,
            "survivors_out_s": self.out_s,
            "plan_s": planned - halted,
            "rebuild_s": rebuild,
            "restore_s": max(restore, end - planned - rebuild),
            "first_step_s": now - end,
            "ended_s": now,
            "steps_rerun": max((x.steps_rerun for x in restored), default=0),
            "bytes_restored": sum(x.bytes_restored for x in restored),
            "groups": {"kept": sum(x.groups_kept for x in restored), "made": sum(x.groups_made for x in restored)},
        }
