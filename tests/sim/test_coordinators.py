"""A coordinator may be lost at any point (guarantee 10): what that costs a job, and that each planted bug is found."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from unittest import mock

import pytest
from sim_coordinator import Records
from sim_driver import World, simulate
from test_simulation import SCHEDULES, find, nothing_breaks, patch_transition
from violation import require

from megatron.hotswap.agent import retold
from megatron.hotswap.control import messages as m
from megatron.hotswap.control.returning import Returning
from megatron.hotswap.control.saving import Saves
from megatron.hotswap.control.state import Control
from megatron.hotswap.coordinator import records_first
from megatron.hotswap.coordinator.records_first import InOrder


def only_coordinators_are_lost(world):
    """Weather in which coordinators are lost, stand still, or record slowly, and nothing else happens."""
    slow = world.records.slow
    nothing_breaks(world)
    world.pauses, world.coordinators.losses_left, world.records.slow = False, 2, slow

    original = World.run

    def run():
        original(world)
        control = world.control
        require(not control.fenced, "guarantee 10", f"the loss of coordinators cost {dict(control.fenced)}; {world.faults}")
        # Who hears the start alone, and then nothing for three leases, stops; nobody has anything yet to go back to.
        before_the_first_step = world.checkers.peak == 0 and "nothing to go back to" in control.exit_reason
        require(control.exit_code == 0 or before_the_first_step, "guarantee 10", f"{control.exit_reason}; {world.faults}")

    world.run = run


def a_store_that_hangs(world):
    """Weather in which every other record takes long, and collectives fail now and then, so that there is something to record."""
    only_coordinators_are_lost(world)
    world.coordinators.losses_left, world.records.slow = 0, 0.5
    world.fault_kinds, world.faults_left = ("link",), 2


def test_a_store_that_hangs_costs_no_node():
    """Nobody has been told yet, so nobody is late."""
    for seed in range(SCHEDULES // 10):
        simulate(seed, a_store_that_hangs)


def test_the_loss_of_coordinators_costs_no_node():
    """Guarantee 10: training goes on, or goes on again; nobody is given up, whenever coordinators are lost."""
    taken_up = collections.Counter(simulate(seed, only_coordinators_are_lost).taken_up for seed in range(SCHEDULES // 4))
    assert all(taken_up[times] > SCHEDULES // 40 for times in (0, 1, 2)), taken_up


def told_before_recorded():
    """A decision is told while it is being recorded."""

    def take(self, decisions):
        ORIGINAL_TAKE(self, [])
        self._carry_out(decisions)
        return self.waiting

    return mock.patch.object(InOrder, "take", take)


def both_halves_decide():
    """The store takes a record from whoever sends it: a leader that is cut off, and the one that was elected since."""

    def arrived(self, life, record):
        leader, self.leader = self.leader, life
        ORIGINAL_ARRIVED(self, life, record)
        self.leader = leader

    return mock.patch.object(Records, "_arrived", arrived)


def a_late_record_overwrites():
    """A record that the store was sent and did not answer in time lands after the next one."""
    return mock.patch.object(Records, "is_late", lambda self, life, writes: False)


def one_acknowledgement_is_told_again():
    """Of each rank only the newest acknowledgement is said to the next coordinator."""
    return mock.patch.object(retold, "_GENERATIONS", 1)


def nothing_is_told_again():
    """The next coordinator hears where agents stand, and not what they have said since."""
    return mock.patch.object(retold.Retold, "messages", lambda self: [])


def deadlines_run_while_nobody_is_told():
    """What a slow store holds up is taken for silence of those who have not been told."""
    return mock.patch.multiple(InOrder, waiting=False), mock.patch.object(Control, "told_late", lambda self, seconds: None)


def answers_wait_for_records():
    """An agent hears nothing while a decision is being recorded, and takes the coordinator for lost."""
    return mock.patch.object(records_first, "_AT_ONCE", ())


def attempts_are_not_recorded():
    """The next coordinator names the folders of durable generations as the one before."""

    def write(self, generation, by, why):
        before = self.revision
        decisions = ORIGINAL_WRITE(self, generation, by, why)
        self.revision = before
        return decisions

    return mock.patch.object(Saves, "_write", write)


def stopped_ranks_are_taken_for_running():
    """The next coordinator does not ask whether ranks have stopped for want of one."""

    def rejoin(self, incarnation, event, now):
        return ORIGINAL_REJOIN(self, incarnation, m.Rejoin(event.join, event.version, event.ranks, False, event.away_s), now)

    return patch_transition("_rejoin", rejoin)


ORIGINAL_TAKE = InOrder.take
ORIGINAL_ARRIVED = Records._arrived
ORIGINAL_WRITE = Saves._write
ORIGINAL_REJOIN = Returning._rejoin


def etcd_and_losses(world):
    """Weather in which two coordinators may be alive at once."""
    world.records.etcd, world.coordinators.losses_left = True, 2


def commits_are_waited_for(world):
    """Weather in which ranks wait for the coordinator's word that a generation is committed."""
    world.proven_by_step, world.skip, world.coordinators.losses_left = False, False, 2


PLANTED = [
    (told_before_recorded, "guarantee", None),
    (both_halves_decide, "guarantee", etcd_and_losses),
    (a_late_record_overwrites, "guarantee 10", etcd_and_losses),
    (one_acknowledgement_is_told_again, "ending", commits_are_waited_for),
    (nothing_is_told_again, "ending", None),
    (deadlines_run_while_nobody_is_told, "guarantee 10", a_store_that_hangs),
    (answers_wait_for_records, "guarantee 10", a_store_that_hangs),
    (attempts_are_not_recorded, "guarantee 10", None),
    (stopped_ranks_are_taken_for_running, "ending", only_coordinators_are_lost),
]


@pytest.mark.parametrize(("bug", "says", "weather"), PLANTED, ids=[bug.__name__ for bug, _, _ in PLANTED])
def test_a_planted_bug_is_found(bug, says, weather):
    """Each kind of bug breaks a guarantee within a few thousand schedules."""
    planted = bug()
    with contextlib.ExitStack() as stack:
        for patch in planted if isinstance(planted, tuple) else (planted,):
            stack.enter_context(patch)
        find(bug, says, weather)


def test_a_seed_with_losses_repeats_itself():
    """A failure can be looked at: the same seed is the same run."""
    runs = [[dataclasses.asdict(simulate(s, etcd_and_losses)) for s in range(20)] for _ in range(2)]
    assert runs[0] == runs[1]
