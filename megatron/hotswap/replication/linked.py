"""Transports whose bytes are moved by a library in side processes (mpi.py, nixl.py): everything but the library.

Agents have one link for each peer that they send to, made when it is first needed and kept. Over its control connection go the
snapshot's description, each chunk's place and checksum, and the verdict; the chunks go from slot to slot, side process to side
process, several under way at a time. A link on which a transfer was given up is never used again: both its side processes are
killed, and the slot is only given to another transfer when this end's is gone.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Coroutine

import deadpool_ext

from ..errors import HotSwapError, PeerFault, SnapshotMismatch, UsageError
from ..snapshot.layout import Header
from ..snapshot.slots import Slots
from . import wire
from .chunks import Chunks
from .incoming import Incoming
from .link import Chunk, Fetch, Finish, Give, Go, Got, Have, Link, Push, Refusal, Stored
from .outgoing import Outgoing
from .side import Exchange, SideProcess
from .tcp_stream import Stream
from .transfer import ReplicaStore, Reserve, Transport

#: Chunks offered and not yet acknowledged. Eight of 8 MiB keep a 400 Gbit/s link busy for 1.3 ms, several times a round trip.
_WINDOW = 8
_TAGS = 1 << 15  # the least number of tags that an MPI has
#: From the connection to the first byte: a side process is started and its library loaded where none is warm.
_LINK_TIMEOUT_S = 30.0
_CHECK_TIMEOUT_S = 60.0
_CHECK_BYTES = 1 << 20


class LinkedTransport(Transport):
    """See the module docstring. A subclass says how a side process is started."""

    #: The flag's value, for messages.
    name: str

    def __init__(self, token: str, interface: str) -> None:
        self._token = token
        self._interface = interface
        self._strangers = wire.Strangers()
        self._warm: SideProcess | None = None
        self._links: dict[str, Link] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._serving: set[Link] = set()
        self._receiving: dict[tuple[int, int], tuple[Link, int]] = {}  # (rank, slot) -> the link that writes into it, its generation
        self._tasks: set[asyncio.Task[None]] = set()
        self._tag = 0
        self.bytes_sent = 0
        self.bytes_received = 0

    @abc.abstractmethod
    def start_side(self) -> SideProcess:
        """Start a side process."""

    @abc.abstractmethod
    def explain(self) -> str:
        """What the user can do about a library that does not work on this node."""

    # ---- the interface

    async def serve(self, replicas: ReplicaStore) -> str:
        listener = wire.listen(self._interface)
        self._spawn(self._accept(listener, replicas))
        self._warm = self.start_side()
        host, port = listener.getsockname()
        return f"{host}:{port}"

    async def check(self) -> str:
        """Move bytes between two side processes on this node; returns the library's name and version.

        Raises:
            UsageError: the library is missing, or does not work here.
        """
        sides = (self.start_side(), self.start_side())
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                version, _ = await asyncio.gather(*(side.ready() for side in sides))
                await _link_here(*sides)
                await _move_here(*sides)
        except (PeerFault, TimeoutError) as failure:
            what = str(failure) or f"two processes on this node were not linked within {_CHECK_TIMEOUT_S:.0f} s"
            raise UsageError(f"--hot-swap-transport {self.name} does not work on this node: {what}. {self.explain()}") from failure
        finally:
            for side in sides:
                side.fail(PeerFault("the check is over"))
            await asyncio.gather(*(side.dead() for side in sides))
        return version

    async def push(self, address: str, outgoing: Outgoing) -> bool:
        async with self._link_to(address) as link:
            try:
                await link.send(_push_of(outgoing, outgoing.identity, known=outgoing.promised is not None))
                answer = await link.receive(Go, Have)
                if isinstance(answer, Have):
                    header = await link.unless_failed(outgoing.header())
                    if header.crc32c == answer.crc32c:
                        return False
                    await link.send(_push_of(outgoing, header, known=True))  # the same step, run again with other bytes
                    await link.receive(Go)
                await self._send(link, outgoing)
                await link.receive(Stored)
            except Refusal as refused:
                what = f"rank {outgoing.rank}, generation {outgoing.generation}"
                raise refused.saying(f"the holder at {address} refused {what}") from refused
            return True

    async def fetch(self, address: str, run_id: str, rank: int, generation: int, reserve: Reserve) -> tuple[Slots, int, Header]:
        async with self._link_to(address) as link:
            try:
                await link.send(Fetch(rank, generation))
                given: Give = await link.receive(Give)
                identity = Header.unpack(given.header)
                identity.require(run_id=run_id, rank=rank, generation=generation)
                Chunks(given.slot_bytes, identity.metadata_bytes, identity.payload_bytes, given.chunk_bytes)
                slots, slot = reserve(identity, given.slot_bytes)
                await link.send(Go())
                incoming = Incoming(slots, slot, identity, given.chunk_bytes)
                header = await self._receive(link, incoming)
                await _finish(incoming, header)
            except Refusal as refused:
                if refused.mismatch:
                    raise SnapshotMismatch(f"the holder at {address} does not give it: {refused}") from refused
                raise refused.saying(f"the holder at {address} has nothing") from refused
        slots.write_header(slot, header)
        return slots, slot, header

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        links = [*self._links.values(), *self._serving]
        over = PeerFault("this agent's transport is closed")
        for link in links:
            link.fail(over)
        if self._warm is not None:
            self._warm.fail(over)
            await self._warm.dead()
        await asyncio.gather(*(link.gone() for link in links))
        self._links.clear()
    # ---- links

    @contextlib.asynccontextmanager
    async def _link_to(self, address: str) -> AsyncIterator[Link]:
        """The link to a peer, for one transfer. Whatever breaks the transfer off, cancellation too, ends the link, and with it
        every access to the slot's memory."""
        async with self._locks.setdefault(address, asyncio.Lock()):
            link = self._links.get(address)
            try:
                if link is None or link.failure is not None:
                    stream = await wire.connect(address, self._interface, self._token)
                    link = self._links[address] = Link(stream, self._take_side())
                    await self._join(link, 0)
                yield link
            except BaseException as broken:
                if link is not None and not (isinstance(broken, Refusal) and broken.in_order):
                    self._links.pop(address, None)
                    link.fail(PeerFault(f"a transfer to or from {address} was broken off"))
                    await link.gone()
                raise

    async def _join(self, link: Link, end: int) -> None:
        try:
            async with asyncio.timeout(_LINK_TIMEOUT_S):
                await link.join(end)
        except TimeoutError as late:
            raise PeerFault(f"the two ends' libraries were not linked within {_LINK_TIMEOUT_S:.0f} s") from late
        if self._warm is None:  # only now, so that the start of the next one does not slow this one
            self._warm = self.start_side()

    def _take_side(self) -> SideProcess:
        """A side process: the warm one, or where it is in use or dead another."""
        side, self._warm = self._warm, None
        return side if side is not None and side.failure is None else self.start_side()

    # ---- one snapshot, on either end

    async def _send(self, link: Link, outgoing: Outgoing) -> None:
        """Offer every chunk, several at a time; returns when the other end has them all."""
        under_way = 0
        try:
            for index in range(len(outgoing.chunks)):
                offset, length, crc = await link.unless_failed(outgoing.chunk(index))
                if under_way == _WINDOW:
                    await link.receive(Got)
                    under_way -= 1
                tag = self._tag = (self._tag + 1) % _TAGS
                begin = outgoing.base - outgoing.slots.address(0) + offset
                ticket = await link.side.offer(outgoing.slots, begin, length, tag)
                await link.send(Chunk(index, length, crc, tag, ticket))
                under_way += 1
                self.bytes_sent += length
            for _ in range(under_way):
                await link.receive(Got)
        except Refusal as refused:
            refused.in_order = False  # chunks are under way that nobody takes any more
            raise
        await link.send(Finish((await link.unless_failed(outgoing.header())).pack()))

    async def _receive(self, link: Link, incoming: Incoming) -> Header:
        """Take every chunk, several at a time; returns the header that came after them."""
        try:
            async with asyncio.TaskGroup() as group:
                while isinstance(message := await link.receive(Chunk, Finish), Chunk):
                    group.create_task(self._receive_chunk(link, incoming, message))
        except ExceptionGroup as several:
            raise several.exceptions[0] from None
        return Header.unpack(message.header)

    async def _receive_chunk(self, link: Link, incoming: Incoming, chunk: Chunk) -> None:
        address = incoming.place(chunk.index, chunk.length_bytes)
        begin = address - incoming.slots.address(0)
        await link.side.take(incoming.slots, begin, chunk.length_bytes, chunk.tag, chunk.ticket)
        loop = asyncio.get_running_loop()
        incoming.arrived(chunk.index, await loop.run_in_executor(None, deadpool_ext.crc32c, address, chunk.length_bytes), chunk.crc32c)
        self.bytes_received += chunk.length_bytes
        await link.send(Got())

    # ---- incoming links

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket, replicas: ReplicaStore) -> None:
        with listener:
            while True:
                self._spawn(self._serve_one(Stream(await wire.accept(listener)), replicas))

    async def _serve_one(self, stream: Stream, replicas: ReplicaStore) -> None:
        try:
            await self._strangers.prove(stream, self._token)
        except BaseException as stranger:
            await stream.close()
            if isinstance(stranger, OSError | PeerFault):
                return
            raise
        link = Link(stream, self._take_side())
        self._serving.add(link)
        try:
            await self._join(link, 1)
            while True:
                message = await link.receive(Push, Fetch)
                if isinstance(message, Push):
                    await self._take(link, message, replicas)
                else:
                    await self._give(link, message, replicas)
        except HotSwapError:
            pass  # a peer that goes away or talks nonsense costs its link and nothing else
        finally:
            link.fail(PeerFault("the link is over"))
            await link.gone()
            self._serving.discard(link)

    async def _take(self, link: Link, push: Push, replicas: ReplicaStore) -> None:
        identity = Header.unpack(push.header)
        try:
            Chunks(push.slot_bytes, identity.metadata_bytes, identity.payload_bytes, push.chunk_bytes)
            replicas.admit(identity, push.version)
            held = replicas.held_as(identity)
            if held is not None and (not push.known or held == identity):
                await link.send(Have(held.crc32c))
                return
            await self._stop_earlier(identity)
            slots, slot = replicas.reserve(identity, push.slot_bytes, push.version, push.keep)
        except HotSwapError as refused:
            await link.refuse(refused)
            return
        place = self._receiving[identity.rank, slot] = (link, identity.generation)
        incoming = Incoming(slots, slot, identity, push.chunk_bytes)
        try:
            await link.send(Go())
            try:
                header = await self._receive(link, incoming)
            except HotSwapError as damaged:
                await link.refuse(damaged)
                raise
            try:
                await _finish(incoming, header)
                replicas.complete(header, slot, push.version, slots)
            except HotSwapError as late:
                await link.refuse(late)
                return
            await link.send(Stored())
        except BaseException as broken:
            link.fail(PeerFault(f"the transfer was broken off: {broken}"))
            await link.gone()
            raise
        finally:
            if self._receiving.get((identity.rank, slot)) is place:
                del self._receiving[identity.rank, slot]

    async def _stop_earlier(self, identity: Header) -> None:
        """A sender that stalled must not write into what comes now: its side process goes before the slot is given again."""
        while key := next((key for key in self._receiving if key[0] == identity.rank), None):
            earlier = link, generation = self._receiving[key]
            if generation > identity.generation:
                older = f"generation {identity.generation} of rank {identity.rank}"
                raise PeerFault(f"{older} is older than generation {generation}, which is under way here")
            link.fail(PeerFault(f"generation {identity.generation} of rank {identity.rank} came while {generation} was under way"))
            await link.gone()
            if self._receiving.get(key) == earlier:
                del self._receiving[key]

    async def _give(self, link: Link, asked: Fetch, replicas: ReplicaStore) -> None:
        try:
            slots, slot = replicas.find(asked.rank, asked.generation)
            outgoing = Outgoing.of_slot(slots, slot, slots.header(slot))
        except SnapshotMismatch as missing:
            await link.refuse(PeerFault(str(missing)))
            return
        await link.send(Give(outgoing.identity.pack(), outgoing.chunks.slot_bytes, outgoing.chunks.chunk_bytes))
        await link.receive(Go)
        try:
            await self._send(link, outgoing)
        except SnapshotMismatch as damaged:
            await link.refuse(damaged)


async def _finish(incoming: Incoming, header: Header) -> None:
    await asyncio.get_running_loop().run_in_executor(None, incoming.finish, header)


def _push_of(outgoing: Outgoing, header: Header, *, known: bool) -> Push:
    return Push(header.pack(), known, outgoing.version, outgoing.keep, outgoing.chunks.slot_bytes, outgoing.chunks.chunk_bytes)


async def _link_here(*sides: SideProcess) -> None:
    """Link two side processes of this agent."""
    said: tuple[asyncio.Queue[bytes], asyncio.Queue[bytes]] = (asyncio.Queue(), asyncio.Queue())

    def exchange(end: int) -> Exchange:
        async def swap(blob: bytes) -> bytes:
            said[end].put_nowait(blob)
            return await said[1 - end].get()

        return swap

    await asyncio.gather(*(side.join(end, exchange(end)) for end, side in enumerate(sides)))


async def _move_here(one: SideProcess, other: SideProcess) -> None:
    """Move a megabyte from one side process to the other.

    Raises:
        PeerFault: what arrived is not what was sent.
    """
    source, target = Slots.create(_CHECK_BYTES, 1), Slots.create(_CHECK_BYTES, 1)
    try:
        source.view(0)[:] = os.urandom(_CHECK_BYTES)
        await other.take(target, 0, _CHECK_BYTES, 1, await one.offer(source, 0, _CHECK_BYTES, 1))
        if target.view(0) != source.view(0):
            raise PeerFault("what one process sent is not what the other received")
    finally:
        source.close()
        target.close()
