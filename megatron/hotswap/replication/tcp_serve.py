"""The serving half of H2H over TCP: an agent that takes snapshots into its replica store and gives them back."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

from ..errors import HotSwapError, PeerFault, SnapshotMismatch
from ..security.tls import PeerTls
from ..snapshot.layout import HEADER_BYTES, Header
from . import wire
from .incoming import Incoming
from .outgoing import Outgoing
from .tcp_stream import Offer, Stream, deal, receive_chunks, send_chunks
from .tls_stream import open_stream
from .transfer import ReplicaStore


class _Transfer:
    """One transfer under way: the streams that have joined it run `work` on their threads."""

    def __init__(self, streams: int, work: Callable[..., None], *arguments: Any) -> None:
        self._expected = streams
        self._work = work
        self._arguments = arguments
        self._joined: list[Stream] = []
        self._through = 0
        self._stopped = False
        self.result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.result.add_done_callback(lambda f: f.cancelled() or f.exception())
        self.task = asyncio.current_task()
        self.offer: Offer | None = None  # of one that writes into a slot here
        self.earlier: _Transfer | None = None  # what wrote into the same slot before
        self.gone = asyncio.Event()  # nothing of it touches the slot any more

    async def join(self, stream: Stream) -> None:
        """A stream's part, to its end."""
        if self._stopped or len(self._joined) == self._expected:
            raise PeerFault("the transfer is over, or has all its streams")
        self._joined.append(stream)
        try:
            await stream.in_thread(self._work, *self._arguments)
        except (OSError, HotSwapError) as broken:
            if not self.result.done():
                self.result.set_exception(broken)
            raise
        self._through += 1
        if self._through == self._expected and not self.result.done():
            self.result.set_result(None)

    async def stop(self) -> None:
        """Cut the streams that are still at work; returns when their threads have ended."""
        self._stopped = True
        if self._through < len(self._joined):
            for stream in self._joined:
                stream.cut()
        for stream in self._joined:
            await stream.thread_ended()
        if self.earlier is not None:
            await self.earlier.gone.wait()
            self.earlier = None
        self.gone.set()


class Server:
    """Serves one agent's replica store."""

    def __init__(self, token: str, replicas: ReplicaStore, chunk_bytes: int, tls: PeerTls | None) -> None:
        self._token = token
        self._tls = tls
        self._strangers = wire.Strangers()
        self._replicas = replicas
        self._chunk_bytes = chunk_bytes
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._transfers: dict[bytes, _Transfer] = {}
        self._receiving: dict[tuple[int, int], _Transfer] = {}  # (rank, slot) -> what writes into it

    def begin(self, listener: socket.socket) -> str:
        """Begin to serve on a listening socket; returns its address."""
        self._listener = listener
        self._spawn(self._accept(listener))
        host, port = listener.getsockname()
        return f"{host}:{port}"

    async def close(self) -> None:
        """End every connection, and wait until no thread of one is left."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            self._spawn(self._serve_one(open_stream(await wire.accept(listener), self._tls, server=True)))

    async def _serve_one(self, stream: Stream) -> None:
        try:
            await self._strangers.prove(stream, self._token)
            while True:
                verb = await stream.read(4)
                if verb == b"JOIN":
                    transfer = self._transfers.get(await stream.read(16))
                    if transfer is None:
                        return
                    await transfer.join(stream)
                elif verb == b"PUSH":
                    await self._take(stream)
                elif verb == b"FETC":
                    await self._give(stream)
                else:
                    return
        except (OSError, TimeoutError, HotSwapError):
            return  # a peer that goes away or talks nonsense costs its connection and nothing else
        finally:
            await asyncio.shield(asyncio.ensure_future(stream.close()))

    # ---- taking

    async def _take(self, stream: Stream) -> None:
        replicas = self._replicas
        try:
            offer = Offer.unpack(await stream.read(Offer.BYTES))
            offer.require_sane()
            replicas.admit(offer.header, offer.version)
            held = replicas.held_as(offer.header)
            if held is not None and (not offer.known or held == offer.header):
                await stream.answer(b"HAVE", replicas.version, crc32c=held.crc32c)
                return
            self._refuse_what_is_late(offer)
            slots, slot = replicas.reserve(offer.header, offer.slot_bytes, offer.version, offer.keep)
        except HotSwapError as refused:
            await stream.answer(b"NOPE", replicas.version, str(refused))
            return
        incoming = Incoming(slots, slot, offer.header, offer.chunk_bytes)
        transfer = _Transfer(offer.streams, receive_chunks, incoming)
        transfer.offer = offer
        place = offer.header.rank, slot
        transfer.earlier, self._receiving[place] = self._receiving.get(place), transfer
        self._transfers[offer.name] = transfer
        try:
            if transfer.earlier is not None:  # a sender that stalled must not write into what comes now
                assert transfer.earlier.task is not None
                transfer.earlier.task.cancel()
                await transfer.earlier.gone.wait()
            await stream.answer(b"GOON", replicas.version)
            header = await self._receive(stream, transfer, incoming)
            replicas.complete(header, slot, offer.version, slots)
        except HotSwapError as refused:
            incoming.refuse(str(refused))
            await transfer.stop()
            await stream.answer(b"NOPE", replicas.version, str(refused))
            return
        finally:
            incoming.refuse("this transfer was given up")
            self._transfers.pop(offer.name, None)
            await asyncio.shield(asyncio.ensure_future(transfer.stop()))
            if self._receiving.get(place) is transfer:
                del self._receiving[place]
        await stream.answer(b"OKAY", replicas.version)

    def _refuse_what_is_late(self, offer: Offer) -> None:
        """A sender that lags behind must not end the transfer of what came after it in the same slot."""
        generation = offer.header.generation
        for (rank, _), under_way in self._receiving.items():
            other = under_way.offer
            if rank == offer.header.rank and other is not None and (offer.version, generation) < (other.version, other.header.generation):
                raise PeerFault(
                    f"generation {generation} of rank {rank} (membership {offer.version}) is older than generation "
                    f"{other.header.generation} (membership {other.version}), which is on its way to the same place"
                )

    async def _receive(self, control: Stream, transfer: _Transfer, incoming: Incoming) -> Header:
        """Until every chunk and the header behind them are here and right."""
        last = asyncio.ensure_future(control.read(HEADER_BYTES))
        try:
            either: set[asyncio.Future[Any]] = {transfer.result, last}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if last.done():
                last.result()  # raises if the sender hung up
                await self._unless_hung_up(control, transfer)
            try:
                await transfer.result
            except OSError as broken:
                raise PeerFault(f"a stream broke: {broken}") from broken
            header = Header.unpack(await last)
        finally:
            last.cancel()
            await asyncio.gather(last, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(None, incoming.finish, header)
        return header

    async def _unless_hung_up(self, control: Stream, transfer: _Transfer) -> None:
        """Until the streams are through. The peer has nothing to say meanwhile, so whatever comes on control ends it."""
        hung_up = asyncio.ensure_future(control.read(1))
        try:
            either: set[asyncio.Future[Any]] = {transfer.result, hung_up}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not transfer.result.done():
                raise PeerFault("the peer has gone, or talks out of turn")
        finally:
            hung_up.cancel()
            await asyncio.gather(hung_up, return_exceptions=True)

    # ---- giving

    async def _give(self, stream: Stream) -> None:
        asked = Offer.unpack(await stream.read(Offer.BYTES))
        version = self._replicas.version
        try:
            slots, slot = self._replicas.find(asked.header.rank, asked.header.generation)
            header = slots.header(slot)
        except SnapshotMismatch as missing:
            await stream.answer(b"NOPE", version, str(missing))
            return
        outgoing = Outgoing.of_slot(slots, slot, header, version=version, chunk_bytes=self._chunk_bytes)
        stop = threading.Event()
        transfer = self._transfers[asked.name] = _Transfer(asked.streams, send_chunks, outgoing, deal(), stop)
        try:
            offer = Offer(header, version, -1, slots.slot_bytes, self._chunk_bytes, asked.streams, True, asked.name)
            await stream.answer(b"GIVE", version)
            await stream.write(offer.pack())
            await self._unless_hung_up(stream, transfer)
            await transfer.result
            try:
                whole = await outgoing.header()
            except SnapshotMismatch as damaged:
                await stream.answer(b"DMGD", version, str(damaged))
                return
            await stream.answer(b"OKAY", version)
            await stream.write(whole.pack())
        finally:
            stop.set()
            self._transfers.pop(asked.name, None)
            await asyncio.shield(asyncio.ensure_future(transfer.stop()))
