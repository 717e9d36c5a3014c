"""Moves the snapshots of an agent's ranks to their holders behind the workers' backs, and back into a worker that has none.

A push begins when the worker's copy begins and sends each chunk once it is in place (replication/outgoing.py). Where the holders
have a rank's payload themselves, since the optimizer's state is not sharded, only an envelope goes (replication/envelope.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

import deadpool_ext

from ..control import messages as m
from ..errors import PeerFault, SnapshotMismatch
from ..replication import envelope
from ..replication.outgoing import Outgoing
from ..replication.transfer import ReplicaStore, Reserve, Transport
from ..snapshot.layout import HEADER_BYTES, Header
from ..snapshot.slots import OWN_SLOTS, Slots, Word, next_slot
from . import own_snapshot
from .worker_process import WorkerProcess

_PUSH_RETRY_S = 0.05
_PUSH_FAILURES_SAID = 20  # a second of failing is worth a line; a holder that is a moment late to resume is not
#: An envelope beyond its metadata: the header inside and the names of fields, and for each peer a number of up to 9 bytes.
_ENVELOPE_BYTES, _PEER_BYTES = 8192, 9

#: How often it is looked whether a copy is complete, to time it.
_COPY_POLL_S = 0.001

Guard = Callable[[Awaitable[None]], Coroutine[Any, Any, None]]


class _Push(NamedTuple):
    worker: WorkerProcess
    outgoing: Outgoing
    task: asyncio.Task[None]


class Moved(NamedTuple):
    """What one snapshot of a rank took on its way: device to host (nothing, if it was there already), then to the holders."""

    d2h_s: float | None
    d2h_bytes: int
    h2h_s: float
    h2h_bytes: int


class Replicator:
    """One per agent. `before_push(worker, generation)` is called when the first byte is about to leave, for faults on purpose."""

    def __init__(
        self,
        run_id: str,
        replicas: ReplicaStore,
        transport: Transport,
        say: Callable[[m.FromAgent], None],
        guard: Guard,
        before_push: Callable[[WorkerProcess, int], None],
    ) -> None:
        self._run_id = run_id
        self._replicas = replicas
        self._transport = transport
        self._say = say
        self._guard = guard
        self._before_push = before_push
        self._pushes: dict[int, _Push] = {}  # by worker
        self._stopping: set[asyncio.Task[None]] = set()  # pushes that may still read their slots
        self._seals: dict[asyncio.Task[None], _Push] = {}
        self.on_sealed: Callable[[int, int], None] = lambda rank, generation: None  # an own snapshot is complete, and has its header
        self.on_moved: Callable[[Moved], None] = lambda moved: None  # all holders have it
        self.whole = False  # send payloads even to holders that should have them: they were seen to differ

    # ---- out

    def begin(self, worker: WorkerProcess, membership: m.Membership, generation: int, keep: int) -> None:
        """Send the worker's generation to its holders; `keep` is what they must not overwrite."""
        outgoing = own_snapshot.on_its_way(worker, self._run_id, generation, membership.version, keep)
        task = asyncio.get_running_loop().create_task(self._guard(self._replicate(worker, membership, outgoing)))
        self._pushes[worker.index] = _Push(worker, outgoing, task)
        task.add_done_callback(lambda done: self._forget(worker.index, done))

    def _forget(self, index: int, done: asyncio.Task[None]) -> None:
        if index in self._pushes and self._pushes[index].task is done:
            del self._pushes[index]

    def halt(self) -> None:
        """Nothing is sent any more. Snapshots that are complete get their headers all the same: they may be restored from."""
        for push in self._pushes.values():
            self._stop(push.task)
            if push.outgoing.promised is not None:
                continue
            seal = asyncio.get_running_loop().create_task(self._guard(own_snapshot.seal(push.worker, push.outgoing)))
            self._seals[seal] = push
            seal.add_done_callback(self._seals.pop)
        self._pushes.clear()

    async def sealed(self, worker: WorkerProcess) -> None:
        """The worker's process is gone, and stock was taken of its slots: until those that are complete have their headers. Seals that
        wait for the rest of a torn copy are given up."""
        mine = {seal: push.outgoing for seal, push in self._seals.items() if push.worker is worker}
        for seal, outgoing in mine.items():
            if worker.generations.get(outgoing.slot) != outgoing.generation:
                seal.cancel()
        if mine:
            await asyncio.wait(mine)

    async def void(self, generation: int) -> None:
        """A generation that will never be committed need not travel. Returns when nothing reads its slot any more."""
        for push in self._pushes.values():
            if push.outgoing.generation == generation:
                self._stop(push.task)
        await self.settled()

    async def settled(self) -> None:
        """Until the pushes that were stopped have let go of their slots, which may be written from then on."""
        if self._stopping:
            await asyncio.wait(set(self._stopping))

    def _stop(self, task: asyncio.Task[None]) -> None:
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)
        task.cancel()

    def close(self) -> None:
        """Stop everything."""
        for task in [*(push.task for push in self._pushes.values()), *self._seals]:
            task.cancel()

    async def _replicate(self, worker: WorkerProcess, membership: m.Membership, outgoing: Outgoing) -> None:
        loop = asyncio.get_running_loop()
        begun, generation, copies = loop.time(), outgoing.generation, outgoing.promised is None
        copied = loop.create_task(self._copied_at(worker, generation))
        try:
            self._before_push(worker, generation)
            payload_crc, peers, goes = None, self.peers_in_place_of_payload(worker, membership), outgoing
            if peers:
                await own_snapshot.seal(worker, outgoing)
                goes, payload_crc = await self._envelope(worker, outgoing, peers)
            sent = await asyncio.gather(*(self._push(worker, goes, holder) for holder in membership.holders_of(outgoing.rank)))
            await own_snapshot.seal(worker, outgoing)
            self.on_sealed(outgoing.rank, generation)
            worker.control.set(Word.ACKNOWLEDGED, generation + 1)
            d2h_s = (await copied) - begun
            h2h_s = loop.time() - begun - d2h_s
            copied_bytes = outgoing.metadata_bytes + outgoing.payload_bytes if copies else 0
            self.on_moved(Moved(d2h_s if copies else None, copied_bytes, max(0.0, h2h_s), sum(sent)))
            self._say(m.Acknowledged(outgoing.rank, generation, membership.version, d2h_s, h2h_s, payload_crc, peers))
        finally:
            copied.cancel()

    async def _copied_at(self, worker: WorkerProcess, generation: int) -> float:
        while worker.control.get(Word.COPIED) < generation + 1:
            await asyncio.sleep(_COPY_POLL_S)
        return asyncio.get_running_loop().time()

    async def _push(self, worker: WorkerProcess, outgoing: Outgoing, holder: m.Member) -> int:
        """Until the holder has it; returns how many bytes have travelled for it.

        Every membership asks anew, since a holder may have gone back behind it for a plan that this agent has not heard, or not carried
        out. One that has it says so, and nothing travels.
        """
        rank, generation, failures = outgoing.rank, outgoing.generation, 0
        while True:
            try:
                travelled = await self._transport.push(holder.h2h, outgoing)
                break
            except PeerFault as failure:
                _go_on_unless_stopped()
                # The holder is dying (a halt will cancel this), has not resumed yet, or refused a damaged transfer: it is sent again,
                # and if the copy was complete then every byte of the slot is checked again.
                failures += 1
                if failures == _PUSH_FAILURES_SAID and not self._replicas.frozen:
                    self._say(m.Note("push-failed", f"rank {rank}, generation {generation}: {failure}"))
                await asyncio.sleep(_PUSH_RETRY_S)
                if outgoing.promised is None and worker.control.get(Word.COPIED) >= generation + 1:
                    await own_snapshot.seal(worker, outgoing)
                    outgoing = own_snapshot.on_its_way(worker, self._run_id, generation, outgoing.version, outgoing.keep)
        return outgoing.metadata_bytes + outgoing.payload_bytes if travelled else 0

    # ---- payloads that the holders have themselves

    def peers_in_place_of_payload(self, worker: WorkerProcess, membership: m.Membership) -> tuple[int, ...]:
        """The ranks that have the worker's payload, if all its holders' are among them; else none: the payload is sent."""
        assert worker.rank is not None
        if self.whole or not set(membership.holders[worker.rank]) <= set(worker.peers):
            return ()
        return worker.peers

    async def _envelope(self, worker: WorkerProcess, outgoing: Outgoing, peers: tuple[int, ...]) -> tuple[Outgoing, int]:
        """The envelope of a complete snapshot, and the checksum of the payload that it leaves out."""
        loop = asyncio.get_running_loop()
        inner, slots = await outgoing.header(), outgoing.slots
        metadata = bytes(slots.view(outgoing.slot)[HEADER_BYTES : HEADER_BYTES + inner.metadata_bytes])
        raw = envelope.pack(inner, metadata, peers)
        if worker.envelopes is None:
            room = worker.metadata_room_bytes + _ENVELOPE_BYTES + _PEER_BYTES * len(peers)
            worker.envelopes = Slots.create(HEADER_BYTES + room, OWN_SLOTS)
        into, slot = worker.envelopes, outgoing.slot
        into.view(slot)[HEADER_BYTES : HEADER_BYTES + len(raw)] = raw
        header = Header(self._run_id, inner.rank, inner.generation, inner.layout_hash, len(raw), 0, into.checksum(slot, len(raw), 0))
        into.write_header(slot, header)
        begin = slots.address(outgoing.slot) + slots.slot_bytes - inner.payload_bytes
        payload_crc = await loop.run_in_executor(None, deadpool_ext.crc32c, begin, inner.payload_bytes)
        return Outgoing.of_slot(into, slot, header, version=outgoing.version, keep=outgoing.keep), payload_crc

    def replicas(self, workers: list[WorkerProcess]) -> dict[int, tuple[int, ...]]:
        """What can be restored from here, for the report at a halt: rank -> generations. An envelope counts with its payload only."""
        return {
            rank: usable
            for rank, generations in self._replicas.generations().items()
            if (usable := tuple(g for g in generations if self._restorable(rank, g, workers)))
        }

    def _restorable(self, rank: int, generation: int, workers: list[WorkerProcess]) -> bool:
        slots, slot = self._replicas.find(rank, generation)
        header = slots.header(slot)
        if not envelope.is_envelope(header):
            return True
        peers = envelope.unpack(bytes(slots.view(slot)[HEADER_BYTES : HEADER_BYTES + header.metadata_bytes])).peers
        have = [w.rank for w in workers if generation in w.generations.values() and w.control.get(Word.COPIED) >= generation + 1]
        return any(rank in peers for rank in have)

    # ---- in

    async def fetch(self, worker: WorkerProcess, plan: m.Resume, reserve: Reserve) -> tuple[int, Header] | None:
        """Bring the rank's snapshot from the first source that has it undamaged (guarantee 6); returns its slot and header. None: there
        was none, which is said."""
        rank, version, unreachable = worker.rank, plan.membership.version, []
        assert rank is not None
        for source in plan.sources[rank]:
            try:
                return await self._fetch_from(source, rank, plan, reserve)
            except SnapshotMismatch as damaged:
                _go_on_unless_stopped()
                self._say(m.CopyDamaged(rank, plan.generation, version, source.incarnation, str(damaged)))
            except PeerFault as gone:  # the coordinator finds out whether it is
                _go_on_unless_stopped()
                unreachable.append(f"{source.incarnation}: {gone}")
        if unreachable:
            text = f"generation {plan.generation} could not be fetched: {'; '.join(unreachable)}"
            self._say(m.WorkerError(rank, version, 0, True, text))
        return None

    async def _fetch_from(self, source: m.Source, rank: int, plan: m.Resume, reserve: Reserve) -> tuple[int, Header]:
        def reserve_either(header: Header, slot_bytes: int) -> tuple[Slots, int]:
            return (Slots.create(slot_bytes, 1), 0) if envelope.is_envelope(header) else reserve(header, slot_bytes)

        slots, slot, header = await self._transport.fetch(source.h2h, self._run_id, rank, plan.generation, reserve_either)
        if not envelope.is_envelope(header):
            return slot, header
        found = envelope.unpack(bytes(slots.view(slot)[HEADER_BYTES : HEADER_BYTES + header.metadata_bytes]))
        slots.close()
        there = [r for r, x in enumerate(plan.membership.members) if x.incarnation == source.incarnation and r in found.peers]
        if not there:
            raise SnapshotMismatch(f"{source.incarnation} has the metadata of rank {rank}, but no rank of {found.peers} with its payload")
        inner = found.inner
        slots, slot, peer = await self._transport.fetch(source.h2h, self._run_id, there[0], plan.generation, reserve)
        inner.require(run_id=self._run_id, rank=rank, generation=plan.generation, layout_hash=peer.layout_hash)
        slots.invalidate(slot)
        slots.view(slot)[HEADER_BYTES : HEADER_BYTES + len(found.metadata)] = found.metadata
        slots.write_header(slot, inner)
        try:
            await asyncio.get_running_loop().run_in_executor(None, slots.verify, slot)
        except SnapshotMismatch as differs:
            slots.invalidate(slot)
            raise SnapshotMismatch(f"with the payload of rank {there[0]}: {differs}") from differs
        return slot, inner


def own_slot_of(workers: list[WorkerProcess], rank: int, generation: int) -> tuple[Slots, int] | None:
    """A worker's own snapshot, for a peer that shares its payload."""
    for worker in workers:
        if worker.rank == rank and worker.slots is not None and generation in worker.generations.values():
            return worker.slots, worker.slot_of(generation)
    return None


def free_slot(worker: WorkerProcess, generation: int) -> int:
    """The slot to fetch a generation into: that of the same generation (a damaged one), else the oldest."""
    same = [slot for slot, there in worker.generations.items() if there == generation]
    return same[0] if same else next_slot(worker.generations, keep=-1)


def _go_on_unless_stopped() -> None:
    """Raise CancelledError in a task that was cancelled although it got another exception.

    A holder that dies in the very moment in which its halt cancels a transfer can make asyncio.gather raise the holder's error in the
    place of the cancellation. Who then tries again would do so for ever, and a recovery waits until pushes have ended.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
