"""The real Control, plan and ReplicaStore under thousands of schedules of faults; and each planted bug is found.

More schedules: DEADPOOL_SIM_SCHEDULES=200000 pytest tests/sim. A failure prints its seed; repeat it with
`PYTHONPATH=. python tests/sim/sim_driver.py SEED`.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import os
import random
import re
from unittest import mock

import pytest
import sim_driver
from sim_agent import FakeAgent
from sim_driver import simulate
from sim_worker import FakeWorker
from sim_world import Content, Snapshot
from violation import Violation

from megatron.hotswap.control.attempt import Saving
from megatron.hotswap.control.commits import Commits
from megatron.hotswap.control.loop import LoopBreaker
from megatron.hotswap.control.membership import Agent
from megatron.hotswap.control.state import Control
from megatron.hotswap.recovery import plan
from megatron.hotswap.replication.transfer import ReplicaStore

FULL = os.environ.get("DEADPOOL_FULL_MATRIX") == "1"
SCHEDULES = int(os.environ.get("DEADPOOL_SIM_SCHEDULES", "3000"))
#: Of all guarantees at once. 200 in a second of one core; a million takes an hour and a half of two (make test-all).
SCHEDULES_ONCE = int(os.environ.get("DEADPOOL_SIM_SCHEDULES", "1000000" if FULL else "20000"))
CHUNK = 1000
PLANTED_WITHIN = 4000


def endings_of(seeds):
    """How these schedules ended, and what they reached."""
    endings = collections.Counter()
    for outcome in map(simulate, seeds):
        endings[outcome.exit_code] += 1
        endings["second failure"] += outcome.versions > 2
        endings["recovered"] += outcome.swaps > 0
        endings["skipped"] += outcome.skipped > 0
        endings["damaged"] += outcome.damaged > 0
        endings["respawned"] += outcome.respawned > 0
        endings["respawn, then swap"] += outcome.climbed
        endings["replaced"] += outcome.replaced > 0
        endings["loop"] += "never completed, so it is not the nodes" in outcome.reason
        endings["program"] += "failed in step" in outcome.reason
        endings["durable"] += outcome.last_rung
        endings["not written"] += "was not written to" in outcome.reason
        endings["refused"] += outcome.refused
        endings["taken up"] += outcome.taken_up > 0
        endings["taken up again"] += outcome.taken_up > 1
        endings["split"] += outcome.split
    return endings


@pytest.mark.timeout(0 if FULL else 600)
def test_no_schedule_breaks_a_guarantee():
    """Guarantees 1 to 5 and 10, and: every run trains to the end or ends with a reason that is true."""
    count = SCHEDULES_ONCE
    chunks = [range(first, min(first + CHUNK, count)) for first in range(0, count, CHUNK)]
    if count > 20 * CHUNK:
        with concurrent.futures.ProcessPoolExecutor() as pool:
            endings = sum(pool.map(endings_of, chunks), collections.Counter())
    else:
        endings = sum(map(endings_of, chunks), collections.Counter())
    print(dict(endings))
    # The schedules reach what they are meant to reach: each ending, and failures during a recovery.
    reached = (0, 1, 75, "second failure", "recovered", "skipped", "damaged", "respawned", "respawn, then swap", "program", "replaced")
    assert all(endings[kind] > count // 60 for kind in (*reached, "taken up")), endings
    seldom = ("durable", "not written", "refused", "taken up again", "split")
    assert all(endings[kind] > count // 400 for kind in seldom), endings


def test_a_coordinator_that_stands_still_gives_nobody_up():
    """On a machine with more to do than cores it stands still again and again; nothing else happens, so nobody may be lost."""

    def only_pauses(world):
        nothing_breaks(world)
        world.pauses = True

    for seed in range(SCHEDULES // 10):
        outcome = simulate(seed, only_pauses)
        assert (outcome.exit_code, outcome.versions) == (0, 1), outcome


@pytest.mark.parametrize("seed", [1, 2])
def test_an_hour_on_a_machine_with_three_times_its_load_gives_nobody_up(seed):
    """Each node gets its turn for a third of the time, in slices, and now and then none for most of a lease; so does the coordinator."""
    chance, clocks = random.Random(seed), []

    def stand_still(world, stops):
        pause_s = chance.uniform(0.04, 0.4) if chance.random() < 0.98 else chance.uniform(0.4, 0.9)
        stops(pause_s)
        world.clock.after(1.5 * pause_s, stand_still, world, stops)

    def overloaded(world):
        def node(agent, pause_s):
            agent.node.frozen = True
            world.clock.after(pause_s, agent.node.thaw)

        def coordinator(pause_s):
            world.coordinators.leader.stand_still(pause_s, 0.01)

        def begin():
            for stops in [coordinator, *(functools.partial(node, agent) for agent in world.agents.values())]:
                stand_still(world, stops)

        nothing_breaks(world)
        world.steps = 12_000
        world.clock.after(1.0, begin)
        clocks.append(world.clock)

    with mock.patch.object(sim_driver, "TIME_MAX_S", 20_000.0):
        outcome = simulate(seed, overloaded)
    assert (outcome.exit_code, outcome.versions) == (0, 1), outcome
    assert clocks[0].now > 3600


def nothing_breaks(world):
    """What a test adds to a schedule is all that happens in it."""
    world.faults_left, world.sick_chance, world.respawns_fail, world.pauses = 0, 0.0, False, False
    world.coordinators.losses_left = world.network.splits_left = 0
    world.records.slow = 0.0
    for folder in world.disk.folders.values():
        folder.damaged.clear()


def test_health_alone_ends_no_job():
    """However many nodes say that they are unhealthy, and whenever: as many as there are spares are replaced, and all steps are done."""

    def only_sick(world):
        nothing_breaks(world)
        world.sick_chance, world.sick_nodes = 1.0, 3

    replaced = 0
    for seed in range(SCHEDULES // 5):
        outcome = simulate(seed, only_sick)
        assert outcome.exit_code == 0, outcome
        replaced += outcome.replaced > 0
    assert replaced > SCHEDULES // 50


NEVER_COMPLETED = re.compile(r"failed (\d+) times and \w+ never completed, so it is not the nodes(?:; replaced for it in vain: ([^;]*))?")


def test_a_step_that_kills_whoever_runs_it_ends_the_job():
    """Not all spares are spent on it: two nodes are replaced for it at most, and it is tried six times at most."""

    def poisoned(world):
        nothing_breaks(world)
        world.poison = min(world.everyone), world.steps

    endings = collections.Counter()
    for seed in range(SCHEDULES // 5):
        outcome = simulate(seed, poisoned)
        loop = NEVER_COMPLETED.search(outcome.reason)
        if loop is None:
            assert outcome.exit_code == 75 and "have no spare" in outcome.reason, outcome
        else:
            assert int(loop[1]) <= 6 and (loop[2] or "").count(",") <= 1, outcome
        endings["no spare" if loop is None else "loop"] += 1
    assert min(endings["loop"], endings["no spare"]) > SCHEDULES // 100, endings


def test_a_seed_repeats_itself():
    """A failure can be looked at: the same seed is the same run."""
    assert [dataclasses.asdict(simulate(s)) for s in range(20)] == [dataclasses.asdict(simulate(s)) for s in range(20)]


def own_acknowledgement_is_enough():
    """Slot reused too early: a rank waits for its own holder only, not for the commit of all."""
    return mock.patch.object(FakeWorker, "await_commit", lambda self, generation, then: then())


def no_fence():
    """Slot reused too early: main parameters change before the replica of the last generation is acknowledged."""

    def fence(self):
        newest = self.newest
        self._wait(lambda: self.copied >= newest, self._optimizer)

    return mock.patch.object(FakeWorker, "fence", fence)


def no_wait_for_the_copy():
    """Main parameters change while they are copied: a torn snapshot."""

    def fence(self):
        self._optimizer()

    return mock.patch.object(FakeWorker, "fence", fence)


def stale_transfer_accepted():
    """Stale version accepted, H2H: a node that was given up comes back and pushes."""
    return mock.patch.object(FakeAgent, "accepts", lambda self, version: True)


def same_snapshot_overwritten():
    """A holder that has a snapshot already takes it again into the same slot: for a while it is nowhere else."""
    return mock.patch.object(FakeAgent, "holds", lambda self, header: False)


def without_version(handler):
    """A handler that takes every version for the present one."""
    original = getattr(Control, handler)

    def careless(self, incarnation, event, now):
        offset = 1 if handler in ("_halt_report", "_replica_report") else 0
        return original(self, incarnation, type(event)(**{**event_fields(event), "version": self.version - offset}), now)

    return careless


def event_fields(event):
    return {name: getattr(event, name) for name in event.__struct_fields__}


def stale_acknowledgement_accepted():
    """Stale version accepted, control: an acknowledgement of an old membership counts."""
    return patch_transition("_acknowledged", without_version("_acknowledged"))


def fenced_agents_are_heard():
    """A node that was given up is let in again under its old identity."""

    def handle(self, incarnation, event, now):
        self.fenced.clear()
        return ORIGINAL_HANDLE(self, incarnation, event, now)

    return mock.patch.object(Control, "handle", handle)


def newest_of_anybody():
    """The plan takes the newest generation that some rank has, not that all have."""

    def choose(holdings, replicas):
        choice = ORIGINAL_CHOOSE(holdings, replicas)
        newest = max((g for h in holdings for g in h.own), default=None)
        return choice if isinstance(choice, str) or newest is None else dataclasses.replace(choice, generation=newest)

    return mock.patch.object(plan, "choose", choose)


def commit_not_said_again():
    """After a swap the generation that all go back to is not announced as committed once its new holders have it."""

    def resume(self, choice, now):
        before = self.committed
        decisions = ORIGINAL_RESUME(self, choice, now)
        self.commits.committed = min(before, choice.generation)
        return decisions

    return mock.patch.object(Control, "_resume", resume)


def late_spare_is_waited_for():
    """The plan waits for the replica report of a spare that joined after the halt, which never comes."""

    def unreported(self):
        return [i for i in self._member_agents() if i not in self.replica_reports]

    def give_up(self, now):
        with mock.patch.object(Control, "_unreported", lambda self: []):
            return ORIGINAL_GIVE_UP(self, now)

    return mock.patch.multiple(Control, _unreported=unreported, _give_up_silent_ranks=give_up)


def one_holder_is_enough():
    """With two replicas, a rank takes the first holder's answer for both."""

    def further(self, worker, generation):
        if any(known == generation for known, _ in self._replicated[worker.rank]):
            self._pushing.discard(worker.index)
            self._acknowledge(worker, generation)
            self.copies_changed()

    return mock.patch.object(FakeAgent, "_replicated_further", further)


def holders_keep_nothing():
    """A holder overwrites the oldest replica, though the newer one may never be committed, since some rank skipped it."""
    return mock.patch.object(ReplicaStore, "reserve", lambda self, header, size, version=0, keep=-1: ORIGINAL_RESERVE(self, header, size))


def damaged_copies_are_planned_with():
    """The plan forgets which copies were found damaged."""
    return mock.patch.object(Commits, "usable", lambda self, incarnation, rank, generations: frozenset(generations))


def torn_copies_count():
    """The agent takes a slot for complete whose copy the worker died over."""

    def take_stock(self):
        if self.torn is not None:
            self.own[self.torn[0]] = Snapshot(Content(self.rank, self.torn[1]), self.version, torn=True)
        ORIGINAL_TAKE_STOCK(self)

    return mock.patch.object(FakeWorker, "take_stock", take_stock)


def errors_of_the_program_are_the_nodes():
    """The same exception in the same step again and again costs one process and one node after the other."""

    def program_error(self, incarnation, event, now):
        self.program_errors.clear()
        return ORIGINAL_PROGRAM_ERROR(self, incarnation, event, now)

    return mock.patch.object(Control, "_program_error", program_error)


def manifest_before_the_last_file():
    """The manifest is ordered once the first file is written."""

    def written(self, incarnation, event, now):
        if self.saving is not None:
            self.saving.by = {event.rank: incarnation, 0: self.saving.by.get(0, incarnation)}
            self.saving.files.setdefault(0, event.file)
        return ORIGINAL_WRITTEN(self, incarnation, event, now)

    return patch_transition("_snapshot_written", written)


def files_of_another_attempt_count():
    """A file that was written for an attempt that failed counts for the one after it."""
    return mock.patch.object(Saving, "under_way", lambda self, attempt: self.generation is not None and self.retry_s is None)


def unhealthy_nodes_get_ranks():
    """A spare that says that it is not fit is taken all the same."""
    return mock.patch.object(Agent, "free", property(lambda self: self.warm and self.spare and not self.leaving))


def quarantined_nodes_come_back():
    """A node that has failed too often is let in again."""
    return mock.patch.object(Control, "_unfit", lambda self, join, now: "")


def failures_of_all_steps_are_one_loop():
    """Whatever fails counts as the same step."""
    strike = LoopBreaker.strike
    return mock.patch.object(LoopBreaker, "strike", lambda self, newest, replaced, evidence: strike(self, 0, replaced, evidence))


def patch_transition(name, handler):
    from megatron.hotswap.control import state

    original = getattr(Control, name)
    table = {key: handler if value is original else value for key, value in state._TRANSITIONS.items()}
    return mock.patch.dict(state._TRANSITIONS, table)


ORIGINAL_WRITTEN = Control._snapshot_written
ORIGINAL_HANDLE = Control.handle
ORIGINAL_CHOOSE = plan.choose
ORIGINAL_RESUME = Control._resume
ORIGINAL_RESERVE = ReplicaStore.reserve
ORIGINAL_TAKE_STOCK = FakeWorker.take_stock
ORIGINAL_PROGRAM_ERROR = Control._program_error
ORIGINAL_GIVE_UP = Control._give_up_silent_ranks


def slow_copies_many_repeats(world):
    """Weather in which a stale acknowledgement matters: replicas take long, messages arrive again, one node dies."""
    world.proven_by_step, world.h2h_s, world.repeat_chance, world.faults_left = False, 0.2, 0.5, 1
    world.coordinators.losses_left = world.network.splits_left = 0


def nodes_that_come_back(world):
    """Weather in which a stale transfer matters: nodes fall silent while they push, which takes them long, are given up, and go on."""
    nothing_breaks(world)
    world.fault_kinds, world.h2h_s, world.faults_left = ("freeze", "freeze", "kill"), 0.5, 4
    world.proven_by_step, world.steps = False, 12


def late_and_skipping(world):
    """Weather in which generations are skipped: replicas take longer than steps."""
    world.skip, world.proven_by_step, world.h2h_s, world.steps = True, False, 0.2, 12


def dying_workers(world):
    """Weather in which processes die and nodes live."""
    world.fault_kinds, world.respawns_fail = ("worker", "error", "hang"), False


def unhealthy_nodes(world):
    """Weather in which nodes are lost, and several of those that are left say that they are not fit."""
    world.fault_kinds, world.faults_left, world.sick_chance, world.sick_nodes = ("kill",), 2, 1.0, 3


def nodes_that_fail_again(world):
    """Weather in which nodes fail, come back and fail again."""
    world.fault_kinds, world.faults_left = ("kill", "worker"), 4


def rotting_copies(world):
    """Weather in which copies rot before a node is lost."""
    world.fault_kinds, world.faults_left = ("rot", "rot", "kill"), 4


def failing_disks(world):
    """Weather in which generations are asked for, many writes fail, and messages arrive again, some after the next attempt has begun."""
    nothing_breaks(world)
    world.disk.fails, world.repeat_chance, world.repeat_s, world.steps = 0.3, 0.5, 2.0, 40
    for _ in range(10):
        world.clock.after(world.disk_rng.uniform(0.0, 5.0), world.save)


PLANTED = [
    (manifest_before_the_last_file, "durable", failing_disks),
    (files_of_another_attempt_count, "durable", failing_disks),
    (own_acknowledgement_is_enough, "guarantee 4", None),
    (no_fence, "guarantee", None),
    (no_wait_for_the_copy, "guarantee 2", None),
    (stale_transfer_accepted, "guarantee 4", nodes_that_come_back),
    (same_snapshot_overwritten, "guarantee 4", None),
    (stale_acknowledgement_accepted, "guarantee 4", slow_copies_many_repeats),
    (fenced_agents_are_heard, "guarantee 1", None),
    (newest_of_anybody, "Violation", None),  # a wrong plan breaks whatever comes first: a guarantee, the order of sections, the ending
    (commit_not_said_again, "ending", None),
    (late_spare_is_waited_for, "ending", None),
    (one_holder_is_enough, "guarantee 4", None),
    (holders_keep_nothing, "guarantee 4", late_and_skipping),
    (damaged_copies_are_planned_with, "ending", rotting_copies),
    (torn_copies_count, "guarantee 2", dying_workers),
    (errors_of_the_program_are_the_nodes, "ladder", None),
    (unhealthy_nodes_get_ranks, "health", unhealthy_nodes),
    (quarantined_nodes_come_back, "quarantine", nodes_that_fail_again),
    (failures_of_all_steps_are_one_loop, "ladder", nodes_that_fail_again),
]


def find(bug, says, weather):
    """Of a bug that is planted now, a schedule that shows it in these words. It may break something else in another one before."""
    others = collections.Counter()
    for seed in range(PLANTED_WITHIN):
        try:
            simulate(seed, weather)
        except Violation as found:
            if says in str(found):
                print(f"found by seed {seed}: {found}")
                return
            others[str(found).split(": ")[2]] += 1
    pytest.fail(f"{bug.__doc__} was not found in {PLANTED_WITHIN} schedules, but {dict(others)}")


@pytest.mark.parametrize(("bug", "says", "weather"), PLANTED, ids=[bug.__name__ for bug, _, _ in PLANTED])
def test_a_planted_bug_is_found(bug, says, weather):
    """The simulator can fail: each kind of bug breaks a guarantee within a few thousand schedules."""
    with bug():
        find(bug, says, weather)
