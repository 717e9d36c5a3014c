"""One suite for every Transport (replication/transfer.py): TCP, and a fake in memory. Guarantee 6 on both sides of a transfer.

What only a network can suffer (damage, cuts, stalls) is asked in test_wire.py.
"""

from __future__ import annotations

import asyncio
import time

import pytest
from transport_pair import (
    CHUNK_BYTES,
    PAYLOAD_BYTES,
    SLOT_BYTES,
    Copy,
    Pair,
    content,
    every,
    on_a_loop,
    outgoing,
    push_as_agents_do,
    snapshot,
    soon,
)

from megatron.hotswap.errors import PeerFault, SnapshotMismatch, UsageError


@every
@on_a_loop
async def test_what_was_pushed_comes_back_in_equal_bytes(kind):
    slots, slot, header = snapshot()
    async with Pair(kind) as pair:
        await pair.push((slots, slot, header))
        assert pair.store.generations() == {3: (7,)}
        back, place, got = await pair.fetch()
    assert got == header
    assert content(back, place, got) == content(slots, slot, header)
    assert back.verify(place) == header


@every
@on_a_loop
async def test_two_generations_are_kept_and_the_third_replaces_the_first(kind):
    async with Pair(kind) as pair:
        for generation in (6, 7, 8):
            await pair.push(snapshot(generation=generation))
        assert pair.store.generations() == {3: (7, 8)}
        with pytest.raises(PeerFault, match="no replica of rank 3, generation 6"):
            await pair.fetch(generation=6)


@every
@on_a_loop
async def test_the_generation_that_the_owner_wants_kept_stays(kind):
    """Guarantee 4 where generations are skipped: the newest committed one is not always the newest one."""
    async with Pair(kind) as pair:
        for generation in (6, 7):
            await pair.push(snapshot(generation=generation))
        await pair.push(snapshot(generation=9), keep=6)
        assert pair.store.generations() == {3: (6, 9)}


@every
@on_a_loop
async def test_two_ranks_push_at_once(kind):
    parts = [snapshot(rank=rank) for rank in range(4)]
    async with Pair(kind) as pair:
        await asyncio.gather(*(pair.push(part) for part in parts))
        for rank, part in enumerate(parts):
            assert content(*await pair.fetch(rank=rank)) == content(*part)


@every
@on_a_loop
async def test_a_snapshot_of_another_run_is_refused(kind):
    async with Pair(kind) as pair:
        with pytest.raises(PeerFault, match="run-2"):
            await pair.push(snapshot(run="run-2"))
        assert pair.store.generations() == {}


@every
@on_a_loop
async def test_a_fetch_for_another_run_is_refused(kind):
    async with Pair(kind) as pair:
        await pair.push(snapshot())
        with pytest.raises(SnapshotMismatch, match="run is 'run-1', asked for 'run-2'"):
            await pair.fetch(run="run-2")


@every
@on_a_loop
async def test_a_stranger_without_the_token_changes_nothing(kind):
    async with Pair(kind) as pair, Pair(kind, owner_token="guess") as stranger:
        mine = snapshot()
        await pair.push(mine)
        with pytest.raises(PeerFault):
            await stranger.push(snapshot(seed=1), pair.address)
        with pytest.raises(PeerFault):
            await stranger.fetch(address=pair.address)
        assert content(*await pair.fetch()) == content(*mine)


@every
@on_a_loop
async def test_an_own_slot_that_was_damaged_is_not_sent_on_as_good(kind):
    """Its header was right when it was written; memory has changed since."""
    async with Pair(kind) as pair:
        old = snapshot(generation=6)
        await pair.push(old)
        slots, slot, header = snapshot(generation=7)
        slots.view(slot)[-1] ^= 1
        with pytest.raises(SnapshotMismatch, match=r"rank 3, generation 7: .*damaged in this node's memory"):
            await pair.push((slots, slot, header))
        assert pair.store.generations() == {3: (6,)}
        assert content(*await pair.fetch(generation=6)) == content(*old)


@every
@on_a_loop
async def test_memory_that_changes_between_checksum_and_send_is_refused_by_chunk(kind):
    async with Pair(kind) as pair:
        slots, slot, header = snapshot()
        out = outgoing((slots, slot, header))
        await out.header()
        slots.view(slot)[SLOT_BYTES - PAYLOAD_BYTES + 3 * CHUNK_BYTES] ^= 1
        with pytest.raises(PeerFault, match=r"rank 3, generation 7, chunk 4: the checksum is \w{8} on arrival, \w{8} at the sender"):
            await pair.owner.push(pair.address, out)
        assert pair.store.generations() == {}


@every
@on_a_loop
async def test_a_push_begins_before_the_copy_is_complete_and_ends_after_it(kind):
    async with Pair(kind) as pair:
        part = snapshot()
        expected = content(*part)
        copy = Copy(part)
        push = asyncio.ensure_future(pair.owner.push(pair.address, copy.outgoing))
        await soon(lambda: 3 in pair.store._slots)
        arrived = pair.store._slots[3].view(0)
        for step in range(1, 4):
            copy.place(step * 2 * CHUNK_BYTES)
            first = SLOT_BYTES - PAYLOAD_BYTES + (step * 2 - 1) * CHUNK_BYTES
            await soon(lambda at=first: any(arrived[at : at + CHUNK_BYTES]))
            assert not any(arrived[first + CHUNK_BYTES : first + 2 * CHUNK_BYTES])
            assert not push.done() and pair.store.generations() == {}
        copy.place(PAYLOAD_BYTES)
        await push
        back = await pair.fetch()
        assert content(*back) == expected
        assert back[2] == copy.header == await copy.outgoing.header()


@every
@on_a_loop
async def test_two_holders_are_pushed_to_at_once_from_one_snapshot(kind):
    async with Pair(kind) as pair, Pair(kind) as other:
        part = snapshot()
        expected = content(*part)
        copy = Copy(part)
        pushes = [asyncio.ensure_future(pair.owner.push(p.address, copy.outgoing)) for p in (pair, other)]
        for step in range(1, 17):
            copy.place(step * CHUNK_BYTES)
            await asyncio.sleep(0.002)
        await asyncio.gather(*pushes)
        assert content(*await pair.fetch()) == content(*await other.fetch()) == expected


@every
@on_a_loop
async def test_one_holder_that_fails_does_not_spoil_the_push_to_another(kind):
    async with Pair(kind) as pair, Pair(kind) as other:
        other.store.frozen = True
        copy = Copy(snapshot())
        pushes = [asyncio.ensure_future(pair.owner.push(p.address, copy.outgoing)) for p in (pair, other)]
        with pytest.raises(PeerFault):
            await pushes[1]
        copy.place(PAYLOAD_BYTES)
        await pushes[0]
        assert pair.store.generations() == {3: (7,)} and other.store.generations() == {}


@every
@on_a_loop
async def test_a_snapshot_of_an_older_membership_is_refused_and_both_are_named(kind):
    """Guarantee 1."""
    async with Pair(kind) as pair:
        pair.store.version = 5
        with pytest.raises(PeerFault, match="membership 4, which is over: 5 is known here"):
            await pair.push(snapshot(), version=4)
        assert pair.store._slots == {}
        await pair.push(snapshot(), version=5)
        await pair.push(snapshot(generation=8), version=6)
        with pytest.raises(PeerFault, match="membership 4"):  # what is here already is not acknowledged to it either
            await pair.push(snapshot(), version=4)
        assert pair.store.generations() == {3: (7, 8)}


@every
@on_a_loop
async def test_a_membership_that_becomes_known_in_the_middle_of_a_transfer_keeps_it_out(kind):
    async with Pair(kind) as pair:
        copy = Copy(snapshot(), version=4)
        push = asyncio.ensure_future(pair.owner.push(pair.address, copy.outgoing))
        await soon(lambda: 3 in pair.store._slots)
        pair.store.version = 5
        copy.place(PAYLOAD_BYTES)
        with pytest.raises(PeerFault, match="the membership ended while this snapshot was under way"):
            await push
        assert pair.store.generations() == {}


@every
@on_a_loop
async def test_a_snapshot_that_is_there_already_is_acknowledged_and_not_written_again(kind):
    """Guarantee 4: after a swap an agent may send what its holder has; the holder's bytes are not touched for it."""
    async with Pair(kind) as pair:
        part = snapshot()
        assert await pair.push(part)
        expected = content(*part)
        slots, slot = pair.store.find(3, 7)
        before = slots.view(slot)[-1]
        slots.view(slot)[-1] ^= 1  # a mark that writing would wipe out
        assert not await pair.push(part)
        copy = Copy(part)  # and before its sender knows the checksum
        push = asyncio.ensure_future(pair.owner.push(pair.address, copy.outgoing))
        copy.place(PAYLOAD_BYTES)
        assert not await push
        assert slots.view(slot)[-1] == before ^ 1
        slots.view(slot)[-1] = before
        assert content(*await pair.fetch()) == expected


@every
@on_a_loop
async def test_the_same_step_run_again_with_other_bytes_replaces_the_old(kind):
    async with Pair(kind) as pair:
        await pair.push(snapshot())
        part = snapshot()
        expected = content(*part)
        copy = Copy(part)
        copy.place(PAYLOAD_BYTES)
        await pair.owner.push(pair.address, copy.outgoing)
        assert content(*await pair.fetch()) == expected
        again = snapshot()
        await pair.push(again)
        assert content(*await pair.fetch()) == content(*again)


@every
@on_a_loop
async def test_a_replica_that_rotted_at_the_holder_is_refused_by_who_fetches_it(kind):
    async with Pair(kind) as pair:
        await pair.push(snapshot())
        slots, slot = pair.store.find(3, 7)
        slots.view(slot)[-5] ^= 0x10
        with pytest.raises(SnapshotMismatch, match="checksum"):
            await pair.fetch()


@every
@on_a_loop
async def test_a_frozen_holder_takes_nothing_and_still_gives(kind):
    """Between the report of what is held and the plan made from it, nothing may change (guarantee 2)."""
    async with Pair(kind) as pair:
        old = snapshot(generation=6)
        await pair.push(old)
        pair.store.frozen = True
        with pytest.raises(PeerFault, match="the membership is over"):
            await pair.push(snapshot(generation=8))
        assert pair.store.generations() == {3: (6,)}
        assert content(*await pair.fetch(generation=6)) == content(*old)
        pair.store.frozen = False
        await push_as_agents_do(pair, snapshot(generation=8))
        assert pair.store.generations() == {3: (6, 8)}


@every
@on_a_loop
async def test_what_is_not_there_is_said_in_words(kind):
    async with Pair(kind) as pair:
        with pytest.raises(PeerFault, match="no replica of rank 3, generation 7"):
            await pair.fetch()


@every
@on_a_loop
async def test_a_holder_without_room_says_so(kind):
    def full(wanted):
        raise UsageError(f"{wanted} bytes are missing")

    async with Pair(kind) as pair:
        pair.store._require_room = full
        with pytest.raises(PeerFault, match=f"{2 * SLOT_BYTES} bytes are missing"):
            await pair.push(snapshot())


@every
@on_a_loop
async def test_nobody_at_the_address_is_a_peers_fault_at_once(kind):
    async with Pair(kind) as pair:
        await pair.holder.close()
        began = time.monotonic()
        with pytest.raises(PeerFault):
            await pair.push(snapshot())
        with pytest.raises(PeerFault):
            await pair.fetch()
        assert time.monotonic() - began < 5.0


@every
@on_a_loop
async def test_dropped_ranks_are_forgotten(kind):
    async with Pair(kind) as pair:
        for rank in (3, 4):
            await pair.push(snapshot(rank=rank))
        pair.store.drop(keep=frozenset({4}))
        assert pair.store.generations() == {4: (7,)}
        with pytest.raises(PeerFault):
            await pair.fetch(rank=3)
