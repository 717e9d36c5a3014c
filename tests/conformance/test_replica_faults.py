"""Faults in the memory of a holder, on every transport: what is fetched is right, or there is a named error (guarantee 6).

What happens on the wire is in test_transport.py; here the replica itself is damaged, another one, or slow to be checked.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import resource

import pytest
from transport_pair import PAYLOAD_BYTES, SLOT_BYTES, Pair, content, every, on_a_loop, push_as_agents_do, snapshot

from megatron.hotswap.errors import HotSwapError, PeerFault, SnapshotMismatch
from megatron.hotswap.replication.transfer import ReplicaStore
from megatron.hotswap.snapshot.layout import HEADER_BYTES
from megatron.hotswap.snapshot.slots import Slots

#: The header's fields and the offset of each.
FIELDS = {
    "magic": 0,
    "format": 8,
    "rank": 12,
    "generation": 16,
    "metadata_bytes": 24,
    "payload_bytes": 32,
    "crc32c": 40,
    "run_id": 44,
    "layout_hash": 76,
    "own check": 108,
}


async def fetch_into(pair, generation=7):
    """As an agent fetches; returns the error."""
    into = Slots.create(SLOT_BYTES, 2)
    with pytest.raises(HotSwapError) as refused:
        await pair.owner.fetch(pair.address, "run-1", 3, generation, lambda header, size: (into, 0))
    with pytest.raises(SnapshotMismatch):  # nothing is there that could be taken for a snapshot
        into.verify(0)
    into.close()
    return refused.value


@every
@pytest.mark.parametrize("field", FIELDS)
@on_a_loop
async def test_a_flipped_bit_in_a_replicas_header_is_never_loaded(kind, field):
    """And the other generation is still given: the better source."""
    async with Pair(kind) as pair:
        older = snapshot(generation=6)
        await pair.push(older)
        await pair.push(snapshot())
        slots, slot = pair.store.find(3, 7)
        slots.view(slot)[FIELDS[field]] ^= 0x10
        assert isinstance(await fetch_into(pair), PeerFault | SnapshotMismatch)
        assert content(*await pair.fetch(generation=6)) == content(*older)


@every
@pytest.mark.parametrize(
    "changes",
    [{"run_id": "run-0"}, {"rank": 4}, {"generation": 5}, {"metadata_bytes": 999}, {"payload_bytes": PAYLOAD_BYTES - 64}, {"crc32c": 1}],
    ids=lambda changes: next(iter(changes)),
)
@on_a_loop
async def test_a_whole_header_of_another_snapshot_is_never_loaded(kind, changes):
    """The slot of a run that is over, another rank's, an older one, or lengths and checksum that are not the content's."""
    async with Pair(kind) as pair:
        await pair.push(snapshot())
        slots, slot = pair.store.find(3, 7)
        slots.write_header(slot, dataclasses.replace(slots.header(slot), **changes))
        assert isinstance(await fetch_into(pair), PeerFault | SnapshotMismatch)


@every
@on_a_loop
async def test_a_replica_with_a_damaged_header_is_replaced_when_it_is_sent_again(kind):
    """The holder does not believe that it has it, so redundancy comes back."""
    async with Pair(kind) as pair:
        mine = snapshot()
        await pair.push(mine)
        slots, slot = pair.store.find(3, 7)
        slots.view(slot)[FIELDS["crc32c"]] ^= 0x10
        await push_as_agents_do(pair, mine)
        assert content(*await pair.fetch()) == content(*mine)


@every
@on_a_loop
async def test_a_holder_that_the_system_refuses_memory_says_so_and_keeps_what_it_has(kind):
    """By a limit that really refuses: asking for too much memory would have the kernel kill somebody."""
    async with Pair(kind) as pair:
        older, newer = snapshot(rank=4), snapshot()
        await pair.push(older)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SLOT_BYTES, limits[1]))
        try:
            with pytest.raises(PeerFault, match=f"the system refuses {2 * SLOT_BYTES} bytes of shared memory"):
                await pair.push(newer)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert pair.store.generations() == {4: (7,)}
        assert content(*await pair.fetch(rank=4)) == content(*older)
        await push_as_agents_do(pair, newer)  # memory is there again
        assert pair.store.generations() == {3: (7,), 4: (7,)}


def test_a_slow_holder_counts_nothing_before_it_is_checked():
    """However long the transfer and its check take: neither held nor given meanwhile, and not kept if the membership ends first."""
    store = ReplicaStore("run-1", lambda wanted: None)
    own, own_slot, header = snapshot()
    slots, slot = store.reserve(header, SLOT_BYTES)
    slots.view(slot)[HEADER_BYTES:] = own.view(own_slot)[HEADER_BYTES:]  # all bytes are here, unchecked
    assert store.generations() == {}
    with pytest.raises(SnapshotMismatch, match="no replica of rank 3, generation 7 is here"):
        store.find(3, 7)
    store.frozen = True
    with pytest.raises(PeerFault, match="the membership ended while this snapshot was under way"):
        store.complete(header, slot)
    assert store.generations() == {}
    store.frozen = False
    store.complete(header, slot)
    assert store.generations() == {3: (7,)} and slots.verify(slot) == header


def test_memory_of_replicas_that_are_dropped_or_change_their_size_is_given_back():
    """Guarantee 8: neither descriptors nor the account of host memory grow with the swaps of a long job."""

    def take(rank, generation, slot_bytes):
        header = dataclasses.replace(any_header, rank=rank, generation=generation)
        slots, slot = store.reserve(header, slot_bytes)
        store.complete(header, slot)
        return slots

    store, (_, _, any_header) = ReplicaStore("run-1", lambda wanted: None), snapshot()
    take(3, 6, SLOT_BYTES)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for generation in range(7, 27):
        take(3, generation, SLOT_BYTES + 4096 * (generation % 2))
        take(4, generation, SLOT_BYTES)
        assert store.held_bytes == 2 * (SLOT_BYTES + 4096 * (generation % 2)) + 2 * SLOT_BYTES
        assert store.generations()[3] == (generation,)
        store.drop(keep=frozenset({3}))
        assert store.held_bytes == 2 * (SLOT_BYTES + 4096 * (generation % 2))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
