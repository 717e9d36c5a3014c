"""Strikes a second time, while a job recovers from a first loss."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from test_copies import agent_of

from megatron.hotswap.control import messages as m
from megatron.hotswap.control.state import Control, Decision, Log, Send


@dataclass(frozen=True)
class Second:
    """When the next failure comes, and whom it takes: a survivor of the first, or the spare that replaces what was lost."""

    moment: type | str  # of the first order, of the first report, or of the first line of events.jsonl of this kind in the recovery
    spare: bool = False
    worker: bool = False  # only its process

    def has_come(self, said: Any) -> bool:
        """Whether this is what it waits for."""
        return isinstance(said, Log) and said.kind == self.moment if isinstance(self.moment, str) else isinstance(said, self.moment)


EVERY = (
    Second(m.Halt),
    Second(m.Resume, spare=True),
    Second("resumed"),  # the first step begins; when the first rank has done it, the others mostly have
    Second(m.HaltReport),
    Second(m.Assign, spare=True),
    Second(m.Resume),
    Second(m.Restored),
    Second(m.Restored, spare=True),
    Second(m.Resume, worker=True),
)


class Striker:
    """Watches the core decide, and strikes at the moment that it waits for, once in each recovery."""

    def __init__(self, cases: Sequence[Second]) -> None:
        self._cases = cases
        self.struck: list[tuple[Second, str]] = []  # with the node
        self._spares: set[str] = set()  # agents that have been given a rank in this recovery

    def look(self, control: Control, event: Any, decisions: list[Decision]) -> None:
        """After every event, before anybody hears what was decided upon it."""
        if control.recovery is None:
            self._spares.clear()
        sent = [d for d in decisions if isinstance(d, Send)]
        self._spares |= {d.incarnation for d in sent if isinstance(d.message, m.Assign)}
        if control.recovery is None or len(self.struck) > len(control.recoveries) or len(self.struck) == len(self._cases):
            return
        case = self._cases[len(self.struck)]
        said = [event, *decisions, *(d.message for d in sent)]
        victims = self._victims(control, case) if any(map(case.has_come, said)) else []
        if victims:
            self.struck.append((case, victims[0].node))
            self._strike(victims[0].node, case.worker)

    def _victims(self, control: Control, case: Second) -> list[m.Member]:
        """Who holds a rank, and lives."""
        assert control.membership is not None
        living = [member for member in control.membership.members if member.incarnation in control.agents]
        return [member for member in living if (member.incarnation in self._spares) == case.spare]

    def _strike(self, node: str, worker: bool) -> None:
        agent = agent_of(node)
        if worker:
            next(p for p in agent.children(recursive=True) if "megatron.hotswap.worker" in p.cmdline()).kill()
        else:
            os.killpg(agent.pid, signal.SIGKILL)

    def check(self, recoveries: list[dict[str, Any]]) -> None:
        """It has struck in every recovery, and each of the job's was one: of both that were lost, with no more than a step run again."""
        assert [case for case, _ in self.struck] == list(self._cases)
        assert len(recoveries) == len(self._cases)
        for (case, node), recovery in zip(self.struck, recoveries, strict=True):
            assert recovery["kind"] == "swap" and recovery["attempts"] > 1 and recovery["steps_rerun"] <= 1, (case, recovery)
            assert (node in recovery["nodes_lost"], len(recovery["ranks_respawned"])) == (not case.worker, case.worker), (case, recovery)
            assert len(recovery["nodes_lost"]) == 2 - case.worker, (case, recovery)


def watched(cases: Sequence[Second], monkeypatch: pytest.MonkeyPatch) -> Striker:
    """One that sees what the coordinator of the next job decides."""
    striker, handle = Striker(cases), Control.handle

    def handle_and_look(control: Control, incarnation: str, event: Any, now: float) -> list[Decision]:
        decisions = handle(control, incarnation, event, now)
        striker.look(control, event, decisions)
        return decisions

    monkeypatch.setattr(Control, "handle", handle_and_look)
    return striker
