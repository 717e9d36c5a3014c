"""A second failure in every phase of a recovery (guarantees 2, 3 and 7): whoever it takes, it is one recovery, and no bit differs."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hot_swap_job import GRIDS, argv, events, run_job, steps
from test_copies import agent_of

from megatron.hotswap.control import messages as m
from megatron.hotswap.control.state import Control, Decision, Send
from megatron.hotswap.coordinator.service import Scheduled

FULL = os.environ.get("DEADPOOL_FULL_MATRIX") == "1"
CASE = GRIDS["tp2-dp2"]
STEPS_A_CASE = 4
pytestmark = pytest.mark.timeout(1500)


@dataclass(frozen=True)
class Second:
    """When the next failure comes, and whom it takes: a survivor of the first, or the spare that replaces what was lost."""

    moment: type  # of the first order, or of the first report, of this kind in the recovery
    spare: bool = False
    worker: bool = False  # only its process


EVERY = (
    Second(m.Halt),
    Second(m.Resume, spare=True),
    Second(m.FirstStep),
    Second(m.HaltReport),
    Second(m.Assign, spare=True),
    Second(m.Resume),
    Second(m.Restored),
    Second(m.Restored, spare=True),
    Second(m.Resume, worker=True),
)
CASES = EVERY if FULL else EVERY[:2]


class Striker:
    """Watches the core decide, and strikes at the moment that it waits for, once in each recovery."""

    def __init__(self) -> None:
        self.struck: list[tuple[str, str]] = []  # (what had just been said, node)
        self._spares: set[str] = set()  # agents that have been given a rank in this recovery

    def look(self, control: Control, event: Any, decisions: list[Decision]) -> None:
        """After every event, before anybody hears what was decided upon it."""
        if control.recovery is None:
            self._spares.clear()
        sent = [d for d in decisions if isinstance(d, Send)]
        self._spares |= {d.incarnation for d in sent if isinstance(d.message, m.Assign)}
        if control.recovery is None or len(self.struck) > len(control.recoveries) or len(self.struck) == len(CASES):
            return
        case = CASES[len(self.struck)]
        said = [event, *(d.message for d in sent)]
        victims = self._victims(control, case) if any(isinstance(x, case.moment) for x in said) else []
        if victims:
            self.struck.append((case.moment.__name__, victims[0].node))
            self._strike(victims[0].node, case.worker)

    def _victims(self, control: Control, case: Second) -> list[m.Member]:
        """Who holds a rank, and lives."""
        assert control.membership is not None
        living = [member for member in control.membership.members if member.incarnation in control.agents]
        return [member for member in living if (member.incarnation in self._spares) == case.spare]

    def _strike(self, node: str, worker: bool) -> None:
        agent = agent_of(node)
        if worker:
            (process,) = (p for p in agent.children(recursive=True) if "megatron.hotswap.worker" in p.cmdline())
            process.kill()
        else:
            os.killpg(agent.pid, signal.SIGKILL)


@pytest.fixture
def striker(monkeypatch: pytest.MonkeyPatch) -> Striker:
    watched, handle = Striker(), Control.handle

    def handle_and_look(control: Control, incarnation: str, event: Any, now: float) -> list[Decision]:
        decisions = handle(control, incarnation, event, now)
        watched.look(control, event, decisions)
        return decisions

    monkeypatch.setattr(Control, "handle", handle_and_look)
    return watched


def test_a_second_failure_in_every_phase_of_a_recovery(tmp_path: Path, undisturbed: Path, striker: Striker) -> None:
    """Two replicas, so that any two losses leave a copy of everything."""
    iterations = STEPS_A_CASE * (len(CASES) + 1)
    command = [*argv(CASE, iterations, None), "--hot-swap-replicas", "2", "--hot-swap-quarantine-failures", "99"]
    faults = [Scheduled("kill", "node", 3 - i % 4, 3 + STEPS_A_CASE * i, "backward") for i in range(len(CASES))]
    summary = run_job(CASE, tmp_path / "disturbed", command, spares=2, faults=faults)
    assert summary["exit_code"] == 0, summary["ended"]
    assert [name for name, _ in striker.struck] == [case.moment.__name__ for case in CASES]
    assert len(summary["recoveries"]) == len(CASES)
    for case, (_, node), recovery in zip(CASES, striker.struck, summary["recoveries"], strict=True):
        assert recovery["kind"] == "swap" and recovery["attempts"] > 1 and recovery["steps_rerun"] <= 1, (case, recovery)
        assert (node in recovery["nodes_lost"], len(recovery["ranks_respawned"])) == (not case.worker, case.worker), (case, recovery)
        assert len(recovery["nodes_lost"]) == 2 - case.worker, (case, recovery)
    # None was ended by a deadline: that it is, in the end, would hide an attempt that all of them waited in.
    assert not [event for event in events(tmp_path / "disturbed", "recovery") if "did not restore" in event["reason"]]
    assert steps(tmp_path / "disturbed") == steps(undisturbed)[:iterations]
