"""What only a network can suffer (damage, cuts, stalls, slowness), asked of every transport that has one: guarantee 6.

Where bytes lie, behind the proof: on a control connection the verb (4) and the offer; on a stream JOIN and the transfer's name
(20), then chunks, each with a head of 20 bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import pytest
from transport_pair import (
    CHUNK_BYTES,
    METADATA_BYTES,
    PAYLOAD_BYTES,
    Copy,
    Pair,
    content,
    networked,
    on_a_loop,
    snapshot,
    soon,
)
from wire_proxy import Proxy

from megatron.hotswap.errors import PeerFault, SnapshotMismatch
from megatron.hotswap.replication.tcp_stream import Offer
from megatron.hotswap.snapshot.layout import HEADER_BYTES

CHUNK_HEAD = ("stream", 20)
CHUNK = ("stream", 40)
OFFER_BYTES = 4 + Offer.BYTES


@contextlib.asynccontextmanager
async def through(pair, **damage):
    """A proxy in front of the holder; yields it and its address."""
    proxy = Proxy(pair.address)
    for name, value in damage.items():
        setattr(proxy, name, value)
    try:
        yield proxy, await proxy.start()
    finally:
        await proxy.stop()


async def pair_with_an_old_replica(pair):
    old = snapshot(generation=6)
    await pair.push(old)
    return old


@networked
@pytest.mark.parametrize("at", [0, METADATA_BYTES - 1])
@on_a_loop
async def test_a_bit_flipped_in_a_chunk_is_refused_by_name_and_the_older_replica_stays(kind, at):
    async with Pair(kind) as pair, through(pair, flip_at=(CHUNK[0], CHUNK[1] + at)) as (proxy, address):
        old = await pair_with_an_old_replica(pair)
        with pytest.raises(PeerFault, match=r"rank 3, generation 7, chunk \d+: the checksum is \w{8} on arrival, \w{8} at the sender"):
            await pair.push(snapshot(generation=7), address)
        assert proxy.flip_at is None
        assert pair.store.generations() == {3: (6,)}
        assert content(*await pair.fetch(generation=6)) == content(*old)
        await pair.push(snapshot(generation=7), address)  # the same again goes through
        assert pair.store.generations() == {3: (6, 7)}


@networked
@pytest.mark.parametrize("at", range(0, 20, 3))
@on_a_loop
async def test_a_bit_flipped_in_a_chunks_head_is_refused(kind, at):
    async with Pair(kind) as pair, through(pair, flip_at=(CHUNK_HEAD[0], CHUNK_HEAD[1] + at)) as (_, address):
        await pair_with_an_old_replica(pair)
        with pytest.raises(PeerFault, match="the head of a chunk was damaged on its way"):
            await pair.push(snapshot(generation=7), address)
        assert pair.store.generations() == {3: (6,)}


@networked
@pytest.mark.parametrize("at", [4, 20, 4 + HEADER_BYTES - 1, 4 + HEADER_BYTES, OFFER_BYTES - 1])
@on_a_loop
async def test_a_bit_flipped_in_the_frame_that_begins_a_transfer_costs_no_memory(kind, at):
    async with Pair(kind) as pair, through(pair, flip_at=("control", at)) as (_, address):
        with pytest.raises(PeerFault, match="the frame that begins a transfer was damaged"):
            await pair.push(snapshot(), address)
        assert pair.store._slots == {}
        await pair.push(snapshot(), address)


@networked
@pytest.mark.parametrize("at", [0, 30, 100])
@on_a_loop
async def test_a_bit_flipped_in_the_header_that_comes_last_is_refused(kind, at):
    async with Pair(kind) as pair, through(pair, flip_at=("control", OFFER_BYTES + at)) as (_, address):
        await pair_with_an_old_replica(pair)
        with pytest.raises(PeerFault, match=r"header|a snapshot begins with"):
            await pair.push(snapshot(generation=7), address)
        assert pair.store.generations() == {3: (6,)}


@networked
@on_a_loop
async def test_a_bit_flipped_on_the_way_back_is_refused_by_who_fetches(kind):
    async with Pair(kind) as pair, through(pair) as (proxy, address):
        await pair.push(snapshot())
        proxy.flip_back_at = 64 + 20 + 500  # behind the server's half of the proof and a chunk's head
        with pytest.raises(SnapshotMismatch, match=r"chunk \d+: the checksum is"):
            await pair.fetch(address=address)
        await pair.fetch(address=address)


@networked
@pytest.mark.parametrize(
    "place",
    [("control", 0), ("control", 40), ("control", OFFER_BYTES), ("stream", 0), CHUNK_HEAD, CHUNK, ("stream", 40 + METADATA_BYTES + 10)],
    ids=str,
)
@on_a_loop
async def test_a_transfer_that_is_cut_short_leaves_the_older_replica(kind, place):
    async with Pair(kind) as pair, through(pair, cut_at=place) as (_, address):
        old = await pair_with_an_old_replica(pair)
        with pytest.raises(PeerFault):
            await pair.push(snapshot(generation=7), address)
        assert pair.store.generations() == {3: (6,)}
        assert content(*await pair.fetch(generation=6)) == content(*old)


@networked
@on_a_loop
async def test_a_holder_that_dies_in_the_middle_of_a_transfer_is_noticed_soon(kind):
    async with Pair(kind) as pair, through(pair, stall_at=CHUNK) as (proxy, address):
        push = asyncio.ensure_future(pair.push(snapshot(), address))
        await soon(lambda: 3 in pair.store._slots)
        began = time.monotonic()
        await proxy.stop()
        with pytest.raises(PeerFault):
            await push
        assert time.monotonic() - began < 2.0


@networked
@on_a_loop
async def test_a_push_that_is_cancelled_ends_at_once_and_does_not_spoil_the_next_one(kind):
    """A halt cancels transfers; the connections with half a transfer on them must not be used again."""
    async with Pair(kind) as pair, through(pair, stall_at=CHUNK) as (proxy, address):
        push = asyncio.ensure_future(pair.push(snapshot(), address))
        await soon(lambda: 3 in pair.store._slots)
        began = time.monotonic()
        push.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await push
        assert time.monotonic() - began < 1.0
        proxy.stall_at = None
        mine = snapshot()
        await pair.push(mine, address)
        assert content(*await pair.fetch()) == content(*mine)


@networked
@on_a_loop
async def test_a_push_that_waits_for_its_copy_is_cancelled_at_once(kind):
    async with Pair(kind) as pair:
        copy = Copy(snapshot())
        copy.place(3 * CHUNK_BYTES)
        push = asyncio.ensure_future(pair.owner.push(pair.address, copy.outgoing))
        await soon(lambda: 3 in pair.store._slots)
        began = time.monotonic()
        push.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await push
        assert time.monotonic() - began < 1.0
        assert pair.store.generations() == {}


def anonymous_bytes():
    """Memory of this process that is not shared: slots are, buffers are not."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@networked
@on_a_loop
async def test_a_slow_holder_costs_time_and_no_memory(kind):
    """Back-pressure: what the holder does not take yet stays in the slot."""
    async with Pair(kind) as pair, through(pair, pause_s=0.05) as (_, address):
        mine = snapshot(payload_bytes=8 << 20)
        push = asyncio.ensure_future(pair.push(mine, address))
        await soon(lambda: 3 in pair.store._slots)
        before = anonymous_bytes()
        await asyncio.sleep(0.5)
        assert not push.done()
        assert anonymous_bytes() - before < 3 << 20
        await push
        assert pair.store.generations() == {3: (7,)}


@networked
@on_a_loop
async def test_the_membership_that_ends_in_the_middle_of_a_transfer_keeps_it_out(kind):
    """What was under way was not in the report; it must not appear after it."""
    async with Pair(kind) as pair, through(pair, gate=asyncio.Event()) as (proxy, address):
        push = asyncio.ensure_future(pair.push(snapshot(), address))
        await soon(lambda: 3 in pair.store._slots)
        pair.store.frozen = True
        proxy.gate.set()
        with pytest.raises(PeerFault, match="the membership ended while this snapshot was under way"):
            await push
        assert pair.store.generations() == {}


@networked
@on_a_loop
async def test_a_node_that_was_given_up_cannot_destroy_a_newer_replica(kind):
    """Guarantee 1: it froze before it pushed generation 5, its rank has gone on elsewhere, and it thaws."""
    async with Pair(kind) as successor, Pair(kind) as zombie:
        new = snapshot(generation=7)
        await successor.push(new)
        with contextlib.suppress(PeerFault):
            await zombie.push(snapshot(generation=5), successor.address)
        assert content(*await successor.fetch(generation=7)) == content(*new)


@networked
@on_a_loop
async def test_a_snapshot_that_is_there_already_stays_whole_while_it_is_sent_again(kind):
    """Guarantee 4: after a swap an agent may send what its holder has; the sender can die at any byte of it."""
    async with Pair(kind) as pair:
        mine = snapshot()
        await pair.push(mine)
        for place in (("control", 100), ("control", OFFER_BYTES - 1), CHUNK):
            async with through(pair, cut_at=place) as (_, address):
                with contextlib.suppress(PeerFault):  # the last is never reached
                    await pair.push(mine, address)
            assert content(*await pair.fetch()) == content(*mine)


@networked
@pytest.mark.parametrize("newer", [1, 2, 5])
@on_a_loop
async def test_stalled_transfers_cannot_write_into_what_came_after_them(kind, newer):
    """Guarantee 6: senders froze in the middle; the slot holds a newer, complete snapshot when they thaw."""
    async with Pair(kind) as pair, Pair(kind) as successor, through(pair, gate=asyncio.Event()) as (proxy, address):
        stalled = []
        for generation in range(5, 5 + 2 * newer, 2):
            stalled.append(asyncio.ensure_future(pair.push(snapshot(generation=generation), address)))
            begun = len(stalled) * OFFER_BYTES
            await soon(lambda wanted=begun: proxy.passed["control"] >= wanted)
        new = snapshot(generation=5 + 2 * newer)
        await successor.push(new, pair.address)
        proxy.gate.set()
        for push in stalled:
            with contextlib.suppress(PeerFault):
                await push
        assert content(*await pair.fetch(generation=5 + 2 * newer)) == content(*new)
        assert pair.store.generations() == {3: (5 + 2 * newer,)}


@networked
@on_a_loop
async def test_a_pipelined_push_of_an_owner_that_dies_leaves_the_older_replica(kind):
    async with Pair(kind) as pair, through(pair) as (proxy, address):
        old = await pair_with_an_old_replica(pair)
        copy = Copy(snapshot())
        copy.place(PAYLOAD_BYTES // 2)
        push = asyncio.ensure_future(pair.owner.push(address, copy.outgoing))
        await soon(lambda: proxy.passed["stream"] > PAYLOAD_BYTES // 2)
        await proxy.stop()
        with pytest.raises(PeerFault):
            await push
        await soon(lambda: not pair.holder._server._receiving)
        assert pair.store.generations() == {3: (6,)}
        assert content(*await pair.fetch(generation=6)) == content(*old)
