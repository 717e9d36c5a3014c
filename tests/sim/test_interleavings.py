"""10,000 random interleavings of copy, fence, send, acknowledgement and death keep guarantees 2, 3, 4 and 6; planted bugs do not.

More: DEADPOOL_INTERLEAVINGS=1000000 pytest tests/sim/test_interleavings.py. A failure prints its seed.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from unittest import mock

import pytest
from interleavings import World, simulate
from violation import Violation

from megatron.hotswap.recovery import plan
from megatron.hotswap.replication.transfer import ReplicaStore
from megatron.hotswap.snapshot.slots import next_slot

SCHEDULES = int(os.environ.get("DEADPOOL_INTERLEAVINGS", "10000"))
PLANTED_WITHIN = 10_000


def test_no_interleaving_breaks_a_guarantee():
    """For 1 and 2 replicas a rank, a snapshot every 1, 2 and 3 steps, late ones waited for or skipped."""
    seen = collections.Counter()
    for seed in range(SCHEDULES):
        world = simulate(seed)
        seen[world.outcome] += 1
        seen[f"R={world.holders_per_rank}"] += 1
        seen[f"N={world.interval}"] += 1
        seen["late snapshots skipped"] += world.commits.skipped_generations > 0
        seen["recovered"] += world.recoveries > 0 and world.outcome == "done"
        seen["died again in a recovery"] += world.recoveries > 1
    print(dict(seen))
    kinds = ("done", "nothing left", "R=1", "R=2", "N=1", "N=2", "N=3", "late snapshots skipped", "recovered", "died again in a recovery")
    assert all(seen[kind] > SCHEDULES // 100 for kind in kinds), seen


def test_a_seed_repeats_itself():
    def once():
        return [(w.outcome, w.events, w.recoveries) for w in map(simulate, range(30))]

    assert once() == once()


def reused_before_commit():
    """A slot is reused once the rank's own holders have its newer snapshot, whatever the others have."""

    def train(self, rank, version):
        self.proven_by_step = False
        return ORIGINAL_TRAIN(self, rank, version)

    return mock.patch.multiple(World, train=train, await_commit=lambda self, rank, generation: iter(()))


def acknowledged_before_the_checksum():
    """A holder counts a snapshot as held when its last byte is there."""

    def take_in(self, holder, slots, slot, header, version):
        if not holder.alive or holder.replicas.frozen:
            return False
        holder.replicas.complete(header, slot)
        slots.written_in[slot] = version
        return True

    return mock.patch.object(World, "take_in", take_in)


def newest_of_each_rank():
    """The plan takes the newest generation that some rank has, not one that all have."""

    def choose(holdings, replicas):
        choice = ORIGINAL_CHOOSE(holdings, replicas)
        if isinstance(choice, str):
            return choice
        newest = max(g for r, h in enumerate(holdings) for g in h.own | replicas.get(r, {}).keys())
        fetch = {r: tuple(replicas.get(r, {}).get(newest, ())) for r, h in enumerate(holdings) if newest not in h.own}
        return dataclasses.replace(choice, generation=newest, fetch=fetch)

    return mock.patch.object(plan, "choose", choose)


def no_wait_for_the_copy():
    """Main parameters change while they are copied."""

    def fence(self, rank):
        before = max((g for g in rank.held.values() if g != rank.newest), default=-1)
        yield lambda: rank.acknowledged >= before

    return mock.patch.object(World, "fence", fence)


def no_wait_for_the_holder():
    """Main parameters change before the holder has the last generation."""

    def fence(self, rank):
        newest = rank.newest
        yield lambda: rank.copied >= newest

    return mock.patch.object(World, "fence", fence)


def one_holder_is_enough():
    """With two replicas a rank, the first acknowledgement counts for both."""

    def acknowledge(self, rank, generation):
        replicated = {(generation, h.name) for h in self.holders(rank.rank)}
        if replicated & rank.replicated:
            rank.replicated |= replicated
        ORIGINAL_ACKNOWLEDGE(self, rank, generation)

    return mock.patch.object(World, "_acknowledge", acknowledge)


def slots_by_parity():
    """The slot is chosen by the step, so that with an even interval all snapshots go to one."""
    return mock.patch.object(World, "pick_slot", staticmethod(lambda held, keep: (max(held.values(), default=-1) + 1) % 2 if held else 0))


def kept_by_nobody():
    """The oldest slot is taken, committed or not, although newer ones have been skipped."""
    return mock.patch.object(World, "pick_slot", staticmethod(lambda held, keep: next_slot(held, -1)))


def holder_keeps_nothing():
    """The same at holders: they are not told which generation is committed."""

    def reserve(self, header, slot_bytes, keep=-1):
        return ORIGINAL_RESERVE(self, header, slot_bytes, keep=-1)

    return mock.patch.object(ReplicaStore, "reserve", reserve)


def same_snapshot_overwritten():
    """A holder takes a snapshot that it has into the slot where it has it."""
    return mock.patch.object(World, "has_it", staticmethod(lambda holder, header: False))


ORIGINAL_TRAIN, ORIGINAL_ACKNOWLEDGE, ORIGINAL_CHOOSE = World.train, World._acknowledge, plan.choose
ORIGINAL_RESERVE = ReplicaStore.reserve
PLANTED = [
    (reused_before_commit, "guarantee"),
    (acknowledged_before_the_checksum, "guarantee 6"),
    (newest_of_each_rank, "guarantee 2"),
    (no_wait_for_the_copy, "guarantee"),
    (no_wait_for_the_holder, "guarantee"),
    (one_holder_is_enough, "guarantee"),
    (slots_by_parity, "guarantee"),
    (kept_by_nobody, "guarantee 4"),
    (holder_keeps_nothing, "guarantee 4"),
    (same_snapshot_overwritten, "guarantee 4"),
]


@pytest.mark.parametrize(("bug", "says"), PLANTED, ids=[bug.__name__ for bug, _ in PLANTED])
def test_a_planted_bug_is_found(bug, says):
    with bug():
        for seed in range(PLANTED_WITHIN):
            try:
                simulate(seed)
            except Violation as found:
                print(f"found by seed {seed}: {found}")
                assert says in str(found)
                return
    pytest.fail(f"{bug.__doc__} This was not found in {PLANTED_WITHIN} interleavings.")
