"""agent/replicator.py with the real transport and slots between two agents of one process: what is sent, and put together again."""

import asyncio
import os
from types import SimpleNamespace

import pytest

from megatron.hotswap.agent.replicator import Replicator, own_slot_of
from megatron.hotswap.control import messages as m
from megatron.hotswap.errors import PeerFault
from megatron.hotswap.replication.tcp import TcpTransport
from megatron.hotswap.replication.transfer import ReplicaStore
from megatron.hotswap.snapshot.layout import HEADER_BYTES
from megatron.hotswap.snapshot.slots import ControlBlock, Slots, Word

RUN, ROOM, PAYLOAD = "run-1", 8192, 3 << 20
SLOT = HEADER_BYTES + ROOM + PAYLOAD


class Side:
    """One agent with one rank: real slots, control block, store and transport; no process."""

    def __init__(self, rank, peers=()):
        self.said, self.calls = [], []
        self.store = ReplicaStore(RUN, lambda wanted: None)
        self.transport = TcpTransport("token", "127.0.0.1")
        self.worker = SimpleNamespace(
            index=0,
            rank=rank,
            control=ControlBlock.create(),
            slots=Slots.create(SLOT, 2),
            layout_hash=bytes(32),
            metadata_room_bytes=ROOM,
            generations={},
            peers=peers,
            envelopes=None,
            slot_of=lambda generation: next(s for s, g in self.worker.generations.items() if g == generation),
        )
        self.store.own = lambda rank, generation: own_slot_of([self.worker], rank, generation)
        self.replicator = Replicator(
            RUN, self.store, self.transport, self.said.append, self._guard, lambda worker, generation: self.calls.append(generation)
        )

    @staticmethod
    async def _guard(work):
        await work

    def take(self, generation, payload, metadata, copied=True):
        """A generation in slot 0, its copy complete or in progress."""
        slots, control = self.worker.slots, self.worker.control
        slots.invalidate(0)
        slots.view(0)[HEADER_BYTES : HEADER_BYTES + len(metadata)] = metadata
        slots.view(0)[SLOT - PAYLOAD :] = payload
        control.set(Word.METADATA_BYTES_0, len(metadata))
        control.set(Word.COPIED_BYTES_0, 0)
        self.worker.generations[0] = generation
        if copied:
            control.set(Word.COPIED, generation + 1)

    async def push_and_halt(self, membership, copied=True):
        """Generation 5 is on its way when the membership ends."""
        self.take(5, os.urandom(PAYLOAD), b"m", copied)
        self.replicator.begin(self.worker, membership, 5, keep=-1)
        await asyncio.sleep(0.02)
        self.replicator.halt()

    async def replicated(self, generation):
        while self.worker.control.get(Word.ACKNOWLEDGED) < generation + 1:
            await asyncio.sleep(0.002)


async def pair(peers=False):
    owner, holder = Side(0, (1,) if peers else ()), Side(1, (0,) if peers else ())
    addresses = [await side.transport.serve(side.store) for side in (owner, holder)]
    members = tuple(m.Member(f"n{r}", f"n{r}-life", 0, address) for r, address in enumerate(addresses))
    return owner, holder, m.Membership(3, members, ((1,), (0,)))


def run(test):
    asyncio.run(asyncio.wait_for(test(), 30))


def plan_for(membership, generation):
    member = membership.members[1]
    return m.Resume(membership, generation, "store", {0: (m.Source(member.incarnation, member.h2h),)}, True)


def test_a_push_begins_before_the_copy_is_complete_and_the_header_is_written_in_the_end():
    async def test():
        owner, holder, membership = await pair()
        payload, metadata = os.urandom(PAYLOAD), b"metadata of rank 0"
        owner.take(5, payload, metadata, copied=False)
        owner.replicator.begin(owner.worker, membership, 5, keep=-1)
        await asyncio.sleep(0.05)
        assert holder.store.generations() == {} and owner.calls == [5]
        owner.worker.control.set(Word.COPIED, 6)
        await owner.replicated(5)
        assert holder.store.generations() == {0: (5,)}
        assert owner.worker.slots.verify(0).generation == 5
        said = owner.said[-1]
        assert (said.rank, said.generation, said.version, said.payload_crc) == (0, 5, 3, None) and said.d2h_s > 0.03
        await owner.transport.close(), await holder.transport.close()

    run(test)


def test_only_an_envelope_goes_to_a_holder_with_the_same_payload_and_it_is_put_together_again():
    async def test():
        owner, holder, membership = await pair(peers=True)
        payload, metadata = os.urandom(PAYLOAD), b"metadata of rank 0"
        owner.take(5, payload, metadata)
        holder.take(5, payload, b"that of rank 1")
        for side in (owner, holder):
            side.replicator.begin(side.worker, membership, 5, keep=-1)
        await asyncio.gather(owner.replicated(5), holder.replicated(5))
        slots, slot = holder.store.find(0, 5)
        assert slots.slot_bytes < 200_000 and slots.header(slot).payload_bytes == 0
        assert owner.said[-1].payload_crc == holder.said[-1].payload_crc is not None
        assert holder.replicator.replicas([holder.worker]) == {0: (5,)}
        spare, into = Side(0), Slots.create(SLOT, 2)
        await spare.transport.serve(spare.store)
        slot, header = await spare.replicator.fetch(spare.worker, plan_for(membership, 5), lambda h, size: (into, 0))
        assert slot == 0 and header.rank == 0 and into.verify(0) == header
        assert bytes(into.view(0)[HEADER_BYTES : HEADER_BYTES + header.metadata_bytes]) == metadata
        assert bytes(into.view(0)[SLOT - PAYLOAD :]) == payload
        for side in (owner, holder, spare):
            await side.transport.close()

    run(test)


def test_a_peers_payload_that_is_not_the_ranks_own_is_refused_and_said():
    """Guarantee 6: the envelope has the checksum of what the rank really had."""

    async def test():
        owner, holder, membership = await pair(peers=True)
        payload = bytearray(os.urandom(PAYLOAD))
        owner.take(5, payload, b"m")
        payload[100] ^= 1
        holder.take(5, payload, b"m")
        for side in (owner, holder):
            side.replicator.begin(side.worker, membership, 5, keep=-1)
        await asyncio.gather(owner.replicated(5), holder.replicated(5))
        assert owner.said[-1].payload_crc != holder.said[-1].payload_crc
        spare, into = Side(0), Slots.create(SLOT, 2)
        await spare.transport.serve(spare.store)
        assert await spare.replicator.fetch(spare.worker, plan_for(membership, 5), lambda h, size: (into, 0)) is None
        said = spare.said[-1]
        assert isinstance(said, m.CopyDamaged) and said.incarnation == "n1-life" and "with the payload of rank 1" in said.text
        for side in (owner, holder, spare):
            await side.transport.close()

    run(test)


def test_an_envelope_counts_only_where_its_payload_is():
    async def test():
        owner, holder, membership = await pair(peers=True)
        owner.take(5, bytes(PAYLOAD), b"m")
        owner.replicator.begin(owner.worker, membership, 5, keep=-1)
        await owner.replicated(5)
        assert holder.store.generations() == {0: (5,)}
        assert holder.replicator.replicas([holder.worker]) == {}
        await owner.transport.close(), await holder.transport.close()

    run(test)


def test_payloads_are_sent_once_they_were_seen_to_differ():
    async def test():
        owner, holder, membership = await pair(peers=True)
        owner.replicator.whole = True
        owner.take(5, bytes(PAYLOAD), b"m")
        owner.replicator.begin(owner.worker, membership, 5, keep=-1)
        await owner.replicated(5)
        slots, slot = holder.store.find(0, 5)
        assert slots.header(slot).payload_bytes == PAYLOAD
        await owner.transport.close(), await holder.transport.close()

    run(test)


def test_after_a_halt_the_header_is_written_all_the_same():
    """A survivor may have to go back to a generation whose push was broken off."""

    async def test():
        owner, holder, membership = await pair()
        holder.store.frozen = True
        await owner.push_and_halt(membership, copied=False)
        owner.worker.control.set(Word.COPIED, 6)
        for _ in range(1000):
            await asyncio.sleep(0.005)
            if bytes(owner.worker.slots.view(0)[:8]) == b"DEADPOOL":
                break
        assert owner.worker.slots.verify(0).generation == 5
        assert owner.worker.control.get(Word.ACKNOWLEDGED) == 0
        await owner.transport.close(), await holder.transport.close()

    run(test)


async def dies_as_it_is_stopped(*_):
    """A transfer whose holder dies in the very moment in which it is cancelled: asyncio.gather then raises what the holder's end raised."""
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        raise PeerFault("the holder is gone") from None


def test_a_push_whose_holder_dies_as_the_halt_stops_it_is_not_tried_again():
    """Else it was tried for ever, and the recovery waited for it as long."""

    async def test():
        owner, holder, membership = await pair()
        owner.transport.push = dies_as_it_is_stopped
        await owner.push_and_halt(membership)
        await asyncio.wait_for(owner.replicator.settled(), 5)
        await owner.transport.close(), await holder.transport.close()

    run(test)


def test_a_fetch_that_was_stopped_reports_nothing():
    async def test():
        owner, holder, membership = await pair()
        owner.transport.fetch = dies_as_it_is_stopped
        fetching = asyncio.create_task(owner.replicator.fetch(owner.worker, plan_for(membership, 5), lambda header, size: None))
        await asyncio.sleep(0.02)
        fetching.cancel()
        await asyncio.wait([fetching])
        assert fetching.cancelled() and not owner.said
        await owner.transport.close(), await holder.transport.close()

    run(test)


@pytest.mark.parametrize("torn", [False, True])
def test_when_the_worker_is_gone_a_complete_copy_gets_its_header_and_a_torn_one_is_not_waited_for(torn):
    async def test():
        owner, holder, membership = await pair()
        holder.store.frozen = True
        owner.take(5, os.urandom(PAYLOAD), b"m", copied=False)
        owner.replicator.begin(owner.worker, membership, 5, keep=-1)
        await asyncio.sleep(0.02)
        if torn:
            owner.worker.generations.clear()
        else:
            owner.worker.control.set(Word.COPIED, 6)
        owner.replicator.halt()
        await asyncio.sleep(0.02)
        await owner.replicator.sealed(owner.worker)
        assert (bytes(owner.worker.slots.view(0)[:8]) == b"DEADPOOL") == (not torn)
        await owner.transport.close(), await holder.transport.close()

    run(test)


def test_every_membership_asks_the_holder_whether_it_has_what_it_had():
    """It may have gone back behind it meanwhile. One that has it still is not written to again (tests/conformance)."""

    async def test():
        owner, holder, membership = await pair()
        owner.take(5, bytes(PAYLOAD), b"m")
        for holder_forgets in (False, True, False):
            if holder_forgets:
                holder.store.drop(frozenset())
            owner.worker.control.set(Word.ACKNOWLEDGED, 0)
            owner.replicator.begin(owner.worker, membership, 5, keep=-1)
            await owner.replicated(5)
            assert holder.store.generations() == {0: (5,)}
        await owner.transport.close(), await holder.transport.close()

    run(test)
