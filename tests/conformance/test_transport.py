"""One suite for every Transport (replication/transfer.py): TCP, and a fake in memory. Guarantee 6 on both sides of a transfer.

What only a network can suffer (damage, cuts, stalls) is asked of those that have one; `NETWORKED` lists them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from transport_pair import (
    METADATA_BYTES,
    PAYLOAD_BYTES,
    PREAMBLE_BYTES,
    SLOT_BYTES,
    Pair,
    content,
    every,
    networked,
    on_a_loop,
    push_as_agents_do,
    snapshot,
    soon,
)
from wire_proxy import Proxy

from megatron.hotswap.errors import PeerFault, SnapshotMismatch, UsageError

# ---- every transport


@every
@on_a_loop
async def test_what_was_pushed_comes_back_in_equal_bytes(kind):
    slots, slot, header = snapshot()
    async with Pair(kind) as pair:
        await pair.owner.push(pair.address, slots, slot, header)
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
            await pair.owner.push(pair.address, *snapshot(generation=generation))
        assert pair.store.generations() == {3: (7, 8)}
        with pytest.raises(PeerFault, match="no replica of rank 3, generation 6"):
            await pair.fetch(generation=6)


@every
@on_a_loop
async def test_two_ranks_push_at_once(kind):
    parts = [snapshot(rank=rank) for rank in range(4)]
    async with Pair(kind) as pair:
        await asyncio.gather(*(pair.owner.push(pair.address, *part) for part in parts))
        for rank, part in enumerate(parts):
            assert content(*await pair.fetch(rank=rank)) == content(*part)


@every
@on_a_loop
async def test_a_snapshot_of_another_run_is_refused(kind):
    async with Pair(kind) as pair:
        with pytest.raises(PeerFault, match="run-2"):
            await pair.owner.push(pair.address, *snapshot(run="run-2"))
        assert pair.store.generations() == {}


@every
@on_a_loop
async def test_a_fetch_for_another_run_is_refused(kind):
    async with Pair(kind) as pair:
        await pair.owner.push(pair.address, *snapshot())
        with pytest.raises(SnapshotMismatch, match="run is 'run-1', asked for 'run-2'"):
            await pair.fetch(run="run-2")


@every
@on_a_loop
async def test_a_stranger_without_the_token_changes_nothing(kind):
    async with Pair(kind) as pair, Pair(kind, owner_token="guess") as stranger:
        mine = snapshot()
        await pair.owner.push(pair.address, *mine)
        with pytest.raises(PeerFault):
            await stranger.owner.push(pair.address, *snapshot(seed=1))
        with pytest.raises(PeerFault):
            await stranger.fetch(address=pair.address)
        assert content(*await pair.fetch()) == content(*mine)


@every
@on_a_loop
async def test_content_that_does_not_match_its_checksum_is_refused_and_the_older_replica_stays(kind):
    """The sender's memory changed under the transfer."""
    async with Pair(kind) as pair:
        old = snapshot(generation=6)
        await pair.owner.push(pair.address, *old)
        slots, slot, header = snapshot(generation=7)
        slots.view(slot)[-1] ^= 1
        with pytest.raises(PeerFault, match="checksum"):
            await pair.owner.push(pair.address, slots, slot, header)
        assert pair.store.generations() == {3: (6,)}
        assert content(*await pair.fetch(generation=6)) == content(*old)


@every
@on_a_loop
async def test_a_replica_that_rotted_at_the_holder_is_refused_by_who_fetches_it(kind):
    async with Pair(kind) as pair:
        await pair.owner.push(pair.address, *snapshot())
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
        await pair.owner.push(pair.address, *old)
        pair.store.frozen = True
        with pytest.raises(PeerFault, match="the membership is over"):
            await pair.owner.push(pair.address, *snapshot(generation=8))
        assert pair.store.generations() == {3: (6,)}
        assert content(*await pair.fetch(generation=6)) == content(*old)
        pair.store.frozen = False
        await push_as_agents_do(pair, *snapshot(generation=8))
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
            await pair.owner.push(pair.address, *snapshot())


@every
@on_a_loop
async def test_nobody_at_the_address_is_a_peers_fault_at_once(kind):
    async with Pair(kind) as pair:
        await pair.holder.close()
        began = time.monotonic()
        with pytest.raises(PeerFault):
            await pair.owner.push(pair.address, *snapshot())
        with pytest.raises(PeerFault):
            await pair.fetch()
        assert time.monotonic() - began < 5.0


@every
@on_a_loop
async def test_dropped_ranks_are_forgotten(kind):
    async with Pair(kind) as pair:
        for rank in (3, 4):
            await pair.owner.push(pair.address, *snapshot(rank=rank))
        pair.store.drop(keep=frozenset({4}))
        assert pair.store.generations() == {4: (7,)}
        with pytest.raises(PeerFault):
            await pair.fetch(rank=3)


# ---- those with a network between


async def through(pair):
    proxy = Proxy(pair.address)
    return proxy, await proxy.start()


@networked
@pytest.mark.parametrize("at", [0, METADATA_BYTES - 1, METADATA_BYTES, METADATA_BYTES + PAYLOAD_BYTES - 1])
@on_a_loop
async def test_a_bit_flipped_on_the_wire_is_refused_and_the_older_replica_stays(kind, at):
    async with Pair(kind) as pair:
        old = snapshot(generation=6)
        await pair.owner.push(pair.address, *old)
        proxy, address = await through(pair)
        proxy.flip_at = PREAMBLE_BYTES + at
        with pytest.raises(PeerFault, match="checksum"):
            await pair.owner.push(address, *snapshot(generation=7))
        assert proxy.flip_at is None
        assert pair.store.generations() == {3: (6,)}
        assert content(*await pair.fetch(generation=6)) == content(*old)
        # The connection is still good: the same snapshot goes through when it is sent again.
        await pair.owner.push(address, *snapshot(generation=7))
        assert pair.store.generations() == {3: (6, 7)}
        await proxy.stop()


@networked
@pytest.mark.parametrize("at", [0, 40, PREAMBLE_BYTES - 1, PREAMBLE_BYTES + 10, PREAMBLE_BYTES + PAYLOAD_BYTES])
@on_a_loop
async def test_a_transfer_that_is_cut_short_leaves_the_older_replica(kind, at):
    async with Pair(kind) as pair:
        old = snapshot(generation=6)
        await pair.owner.push(pair.address, *old)
        proxy, address = await through(pair)
        proxy.cut_at = at
        with pytest.raises(PeerFault):
            await pair.owner.push(address, *snapshot(generation=7))
        assert pair.store.generations() == {3: (6,)}
        assert content(*await pair.fetch(generation=6)) == content(*old)
        await proxy.stop()


@networked
@on_a_loop
async def test_a_holder_that_dies_in_the_middle_of_a_transfer_is_noticed_soon(kind):
    async with Pair(kind) as pair:
        proxy, address = await through(pair)
        proxy.stall_at = PREAMBLE_BYTES + 200_000
        push = asyncio.ensure_future(pair.owner.push(address, *snapshot()))
        await soon(lambda: proxy.passed > PREAMBLE_BYTES)
        began = time.monotonic()
        await proxy.stop()
        with pytest.raises(PeerFault):
            await push
        assert time.monotonic() - began < 2.0


@networked
@on_a_loop
async def test_a_push_that_is_cancelled_does_not_spoil_the_next_one(kind):
    """A halt cancels transfers; the connection with half a frame on it must not be used again."""
    async with Pair(kind) as pair:
        proxy, address = await through(pair)
        proxy.stall_at = PREAMBLE_BYTES + 200_000
        push = asyncio.ensure_future(pair.owner.push(address, *snapshot()))
        await soon(lambda: proxy.passed > PREAMBLE_BYTES)
        push.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await push
        proxy.stall_at = None
        mine = snapshot()
        await pair.owner.push(address, *mine)
        assert content(*await pair.fetch()) == content(*mine)
        await proxy.stop()


@networked
@on_a_loop
async def test_the_membership_that_ends_in_the_middle_of_a_transfer_keeps_it_out(kind):
    """What was under way was not in the report; it must not appear after it."""
    async with Pair(kind) as pair:
        proxy, address = await through(pair)
        resume = asyncio.Event()
        proxy._damage = _waiting(proxy, resume)
        push = asyncio.ensure_future(pair.owner.push(address, *snapshot()))
        await soon(lambda: 3 in pair.store._slots)
        pair.store.frozen = True
        resume.set()
        with pytest.raises(PeerFault, match="the membership ended while this snapshot was under way"):
            await push
        assert pair.store.generations() == {}
        await proxy.stop()


def _waiting(proxy, resume):
    async def wait(data):
        if proxy.passed > PREAMBLE_BYTES:
            await resume.wait()
        proxy.passed += len(data)
        return data

    return wait


@networked
@on_a_loop
async def test_a_node_that_was_given_up_cannot_destroy_a_newer_replica(kind):
    """Guarantee 1: it froze before it pushed generation 5, its rank has gone on elsewhere, and it thaws."""
    async with Pair(kind) as successor, Pair(kind) as zombie:
        new = snapshot(generation=7)
        await successor.owner.push(successor.address, *new)
        with contextlib.suppress(PeerFault):
            await zombie.owner.push(successor.address, *snapshot(generation=5))
        assert content(*await successor.fetch(generation=7)) == content(*new)


@networked
@on_a_loop
async def test_a_snapshot_that_is_there_already_stays_whole_while_it_is_sent_again(kind):
    """Guarantee 4: after a swap an agent may send what its holder has; the sender can die at any byte of it."""
    async with Pair(kind) as pair:
        mine = snapshot()
        await pair.owner.push(pair.address, *mine)
        proxy, address = await through(pair)
        proxy.cut_at = PREAMBLE_BYTES + 200_000
        with pytest.raises(PeerFault):
            await pair.owner.push(address, *mine)
        await proxy.stop()
        assert content(*await pair.fetch()) == content(*mine)


@networked
@on_a_loop
async def test_a_stalled_transfer_cannot_write_into_what_came_after_it(kind):
    """Guarantee 6: the sender froze in the middle; the slot holds a newer, complete snapshot when it thaws."""
    async with Pair(kind) as pair, Pair(kind) as successor:
        proxy, address = await through(pair)
        resume = asyncio.Event()
        proxy._damage = _waiting(proxy, resume)
        stalled = asyncio.ensure_future(pair.owner.push(address, *snapshot(generation=5)))
        await soon(lambda: 3 in pair.store._slots)
        new = snapshot(generation=7)
        await successor.owner.push(pair.address, *new)
        resume.set()
        with contextlib.suppress(PeerFault):
            await stalled
        assert content(*await pair.fetch(generation=7)) == content(*new)
        await proxy.stop()
