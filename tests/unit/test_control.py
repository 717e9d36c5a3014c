"""control/: the coordinator's decisions, told as stories (tests/unit/scenarios/*.txt).

The expected decisions stand in the files. After a change that is meant, write them anew and read the difference:
`DEADPOOL_REWRITE=1 pytest tests/unit/test_control.py`, then `git diff tests/unit/scenarios`.
"""

import os
from itertools import pairwise
from pathlib import Path

import pytest
from story import Story

from megatron.hotswap.control import messages as m
from megatron.hotswap.control.phases import CHANGES, Phase, diagram, require_change
from megatron.hotswap.control.state import _TRANSITIONS, Control, ControlConfig
from megatron.hotswap.errors import UsageError
from megatron.hotswap.topology.grid import Grid

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda p: p.stem)
def test_scenario(path):
    """Guarantee 1, and the ladder of the design's section 5."""
    told = Story().play(path.read_text())
    if os.environ.get("DEADPOOL_REWRITE"):
        path.write_text(told)
    assert told == path.read_text()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lease_s": 1.0}, "a lease must outlast three heartbeats.*lease-s is 1.0.*heartbeat-interval-s is 0.5; raise the first"),
        ({"halt_timeout_s": 2.0}, r"halt-timeout-s \(2.0\) must be longer than --hot-swap-lease-s \(3.0\)"),
        ({"nodes": 3}, "4 ranks on 3 nodes do not divide"),
        ({"nodes": 1}, "at least two nodes.*--nodes is 1"),
    ],
)
def test_deadlines_and_sizes_that_do_not_fit_are_refused_at_construction(settings, says):
    with pytest.raises(UsageError, match=says):
        ControlConfig(**{"run_id": "r", "token": "t", "grid": Grid(4), "nodes": 2, "spares": 0, **settings})


def test_every_event_has_an_entry_in_some_phase():
    """A message type that no phase handles would be dropped in silence."""
    assert {event for _, event in _TRANSITIONS} == set(m.Event.__args__)


def test_an_illegal_change_of_phase_names_both():
    with pytest.raises(AssertionError, match="from training to resuming"):
        require_change(Phase.TRAINING, Phase.RESUMING)
    for before, after in CHANGES:
        require_change(before, after)


def test_the_diagram_shows_every_change():
    lines = diagram().splitlines()
    assert len([line for line in lines if " --> " in line and ": " in line]) == len(CHANGES)


def test_a_pause_of_the_coordinator_itself_is_not_held_against_the_agents():
    """Their messages wait unread meanwhile; the lease runs on from where it was."""
    control = Control(ControlConfig("r", "t", Grid(2), 2, 0))
    for node in "ab":
        control.handle(node, m.Join(m.PROTOCOL, "r", "t", node, node, 1, "h"), 0.0)
        control.handle(node, m.WorkerReady(0, "s"), 0.0)
    assert control.phase is Phase.TRAINING
    control.tick(0.5)
    control.tick(100.0)
    assert set(control.agents) == {"a", "b"}
    for tenth in range(1, 45):
        control.tick(100.0 + tenth / 10)
    assert not control.agents


def test_heartbeats_are_answered_within_two_thirds_of_a_lease_and_not_each():
    """4,096 agents that are each answered twice a second cost the coordinator half of what it does at rest."""
    story = Story()
    story.play("job nodes=2 spares=0\nup node0 node1\n")
    answered = []
    for beat in range(1, 121):
        now = beat * story.control.config.heartbeat_interval_s
        if story.control.handle("node0.1", m.Heartbeat(beat), now):
            answered.append(now)
    gaps = [later - earlier for earlier, later in pairwise(answered)]
    assert max(gaps) <= story.control.config.lease_s * 2 / 3 and len(answered) <= 61


def test_a_step_that_is_told_late_is_not_lost():
    """Its rank said it before the halt, and its node's connection was slow (or it is the node that leaves): it is complete unless the plan
    goes back behind it. Seen once: of 200 steps one had no line."""
    story = Story()
    story.play("job nodes=2 spares=1\nup node0 node1 node2\nacknowledged 7 0 1\n")
    control = story.control

    def on_course(step: int, version: int) -> bool:
        return control.on_course(m.StepRecord(step, version, 0, 0.1, 0.0, {}, None))

    assert on_course(8, 1) and not on_course(8, 2)
    story.play("closed node1\n")
    assert control.phase is Phase.HALTING
    assert on_course(8, 1) and on_course(9, 1) and on_course(9, 2)
    story.play("halted 0 done=8 own=7,8\nhalted 1\nreplicas node0 1:7,8\nreplicas node2\n")
    assert (control.phase, control.base) == (Phase.RESUMING, 8)
    assert on_course(8, 1) and not on_course(9, 1) and on_course(9, 2)
    story.play("restored 0 1\n")
    assert control.phase is Phase.TRAINING
    assert on_course(8, 1) and not on_course(9, 1) and on_course(9, 2) and not on_course(9, 3)
