"""H2H over TCP: a control connection and several streams a transfer, bytes straight out of and into the slots.

```
 control   PUSH offer ──▶ ◀── GOON                            header ──▶ ◀── OKAY
 streams              JOIN name, chunk, chunk, … no more ──▶
```

The owner deals the chunks over the streams, each to the one that is free; the holder answers NOPE with a text at any time, or HAVE
with a checksum where this snapshot seems to be there already. A fetch begins with FETC, answered by GIVE and an offer; then the
streams run the other way, and the holder ends with OKAY and the header, or DMGD where its replica is damaged. Each connection
begins with a mutual proof of the job's token (tcp_stream.py), inside TLS if that is asked for (tls_stream.py).
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import PeerFault, SnapshotMismatch
from ..security.tls import PeerTls
from ..snapshot.layout import HEADER_BYTES, Header
from ..snapshot.slots import Slots
from . import wire
from .chunks import CHUNK_BYTES
from .incoming import Incoming
from .outgoing import Outgoing
from .tcp_serve import Server
from .tcp_stream import Answer, Offer, Stream, deal, receive_chunks, send_chunks
from .transfer import ReplicaStore, Reserve, Transport

#: One stream fills a core with copying and summing at 3 to 5 GB/s on either side, and one flow of a bonded or multi-path fabric
#: takes one path. Four reach 100 Gbit/s (12.5 GB/s) with room, on a tenth of a training node's cores.
STREAMS = 4
#: What must be on its way to keep the link busy: bandwidth x round trip of a 100 Gbit/s fabric with 0.5 ms (an idle one has a
#: tenth of that; the rest is for queues), divided over the streams. The kernel finds the product by itself and keeps buffers as
#: small as that allows, which spares caches, up to a limit of the system; only where that is lower are buffers set by hand.
_LINK_BYTES_PER_S, _ROUND_TRIP_S = 12.5e9, 0.5e-3
#: How long the reason for a broken stream is waited for on the control connection.
_REASON_TIMEOUT_S = 2.0


def _tuned_up_to(limit: str) -> int:
    """Bytes to which the kernel's own tuning lets a socket's buffer grow."""
    try:
        return int(Path("/proc/sys/net/ipv4", limit).read_text().split()[2])
    except (OSError, IndexError, ValueError):
        return 0


class _Bundle:
    """The connections of one transfer at a time to one peer."""

    def __init__(self, control: Stream, streams: list[Stream]) -> None:
        self.control = control
        self.streams = streams
        self.stop = threading.Event()

    def peer_is_there(self) -> bool:
        """Whether all the idle connections are still good."""
        return all(stream.peer_is_there() for stream in (self.control, *self.streams))

    def worn_out(self) -> bool:
        """Whether it should not be used for another transfer."""
        return any(stream.worn_out for stream in (self.control, *self.streams))

    async def close(self) -> None:
        """Returns when no thread uses the transfer's memory any more."""
        self.stop.set()
        for stream in [self.control, *self.streams]:
            stream.cut()
        for stream in [self.control, *self.streams]:
            await stream.close()

    async def answer_or_break(self, answering: asyncio.Future[Answer]) -> None:
        """Until the answer is there. Nothing comes on a stream that was sent on, unless it breaks.

        Raises:
            ConnectionResetError: it broke, perhaps before the holder knew which transfer it belongs to.
        """
        watches = [asyncio.ensure_future(stream.read(1)) for stream in self.streams]
        try:
            both: set[asyncio.Future[Any]] = {answering, *watches}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise ConnectionResetError("a stream broke after the last byte was sent")
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def join(self, offer: Offer, work: Callable[..., None], *arguments: Any) -> None:
        """Every stream enters the transfer and runs `work`; returns when all are through."""
        for stream in self.streams:
            await stream.write(b"JOIN" + offer.name)
        await asyncio.gather(*(stream.in_thread(work, *arguments) for stream in self.streams))


class TcpTransport(Transport):
    """See the module docstring.

    `tls` encrypts; without it whoever can read the network between the nodes can read the snapshots.
    `streams` and `chunk_bytes` are those of transfers that begin here; a fetch runs over as many streams as who fetches wants.
    """

    def __init__(
        self, token: str, interface: str, *, streams: int = STREAMS, chunk_bytes: int = CHUNK_BYTES, tls: PeerTls | None = None
    ) -> None:
        self._token = token
        self._tls = tls
        self._interface = interface
        self._streams = streams
        self._chunk_bytes = chunk_bytes
        self._buffer_bytes = int(_LINK_BYTES_PER_S * _ROUND_TRIP_S / streams)
        self._server: Server | None = None
        self._idle: dict[str, list[_Bundle]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._memory_version = lambda: 0

    async def serve(self, replicas: ReplicaStore) -> str:
        self._memory_version = lambda: replicas.version
        self._server = Server(self._token, replicas, self._chunk_bytes, self._tls)
        return self._server.begin(wire.listen(self._interface, self._size_buffers))

    async def push(self, address: str, outgoing: Outgoing) -> bool:
        bundle = await self._bundle(address)
        try:
            answer, travelled = await self._push(bundle, outgoing)
            if answer.verb != b"OKAY":
                what = f"rank {outgoing.rank}, generation {outgoing.generation}"
                raise PeerFault(f"the holder at {address} refused {what}: {answer.text}")
            if answer.version > outgoing.version:
                raise PeerFault(
                    f"the holder at {address} is in membership {answer.version} and took a snapshot of membership {outgoing.version}, "
                    "which is over"
                )
        except BaseException as broken:  # cancellation too leaves half a transfer: the connections are of no more use
            await self._close(bundle)
            if isinstance(broken, OSError):
                raise PeerFault(f"the holder at {address} is gone: {broken}") from broken
            raise
        if bundle.worn_out():
            await self._close(bundle)
        else:
            self._idle.setdefault(address, []).append(bundle)
        return travelled

    async def fetch(self, address: str, run_id: str, rank: int, generation: int, reserve: Reserve) -> tuple[Slots, int, Header]:
        bundle = await self._connect(address)
        try:
            return await self._fetch(bundle, address, Header(run_id, rank, generation, bytes(32), 0, 0, 0), reserve)
        except OSError as broken:
            raise PeerFault(f"the holder at {address} is gone: {broken}") from broken
        finally:
            await self._close(bundle)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
        for bundle in [b for idle in self._idle.values() for b in idle]:
            await bundle.close()
        self._idle.clear()
        if self._closing:
            await asyncio.wait(self._closing)

    # ---- connections

    def _size_buffers(self, sock: socket.socket) -> None:
        for option, limit in ((socket.SO_SNDBUF, "tcp_wmem"), (socket.SO_RCVBUF, "tcp_rmem")):
            if _tuned_up_to(limit) < self._buffer_bytes:  # before connecting: the window's scale is agreed on then
                sock.setsockopt(socket.SOL_SOCKET, option, self._buffer_bytes)

    async def _bundle(self, address: str) -> _Bundle:
        idle = [(peer, bundle) for peer, bundles in self._idle.items() for bundle in bundles]
        gone = [bundle for _, bundle in idle if not bundle.peer_is_there()]
        self._idle = {}
        for peer, bundle in idle:
            if bundle not in gone:
                self._idle.setdefault(peer, []).append(bundle)
        ready = self._idle.get(address)
        chosen = ready.pop() if ready else None
        for bundle in gone:  # to holders that were replaced: nobody pushes to them again
            self._begin_close(bundle)
        return chosen or await self._connect(address)

    async def _connect(self, address: str) -> _Bundle:
        opening = [
            asyncio.ensure_future(wire.connect(address, self._interface, self._token, self._size_buffers, self._tls))
            for _ in range(self._streams + 1)
        ]
        try:
            control, *streams = await asyncio.gather(*opening)
        except BaseException:
            for task in opening:
                task.cancel()
            for opened in await asyncio.gather(*opening, return_exceptions=True):
                if isinstance(opened, Stream):
                    await opened.close()
            raise
        return _Bundle(control, streams)

    async def _close(self, bundle: _Bundle) -> None:
        """To its end, even where the caller is cancelled again meanwhile."""
        await asyncio.shield(self._begin_close(bundle))

    def _begin_close(self, bundle: _Bundle) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(bundle.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    # ---- transfers

    def _offer(self, outgoing: Outgoing) -> Offer:
        known = outgoing.promised is not None
        name = os.urandom(16)
        return Offer(
            outgoing.identity,
            outgoing.version,
            outgoing.keep,
            outgoing.slots.slot_bytes,
            outgoing.chunks.chunk_bytes,
            self._streams,
            known,
            name,
        )

    async def _push(self, bundle: _Bundle, outgoing: Outgoing) -> tuple[Answer, bool]:
        """The holder's answer, and whether bytes travelled for it."""
        offer = self._offer(outgoing)
        await bundle.control.write(b"PUSH" + offer.pack())
        answer = await bundle.control.read_answer()
        if answer.verb == b"HAVE":
            header = await outgoing.header()
            if header.crc32c == answer.crc32c:
                return replace(answer, verb=b"OKAY"), False
            offer = replace(offer, header=header, known=True)  # the same step, run again with other bytes: they replace the old
            await bundle.control.write(b"PUSH" + offer.pack())
            answer = await bundle.control.read_answer()
        if answer.verb != b"GOON":
            return answer, False
        moving = asyncio.ensure_future(bundle.join(offer, send_chunks, outgoing, deal(), bundle.stop))
        answering = asyncio.ensure_future(bundle.control.read_answer())
        try:
            await asyncio.wait({moving, answering}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                if answering.result().verb == b"OKAY":
                    raise PeerFault("the holder acknowledged a snapshot that it has not got yet")
                return answering.result(), True
            try:
                await moving
                await bundle.control.write((await outgoing.header()).pack())
                await bundle.answer_or_break(answering)
            except OSError:  # the holder has cut the streams: it says why, if it still can
                await asyncio.wait({answering}, timeout=_REASON_TIMEOUT_S)
                if not answering.done():
                    raise
            return await answering, True
        finally:
            for task in (moving, answering):
                task.cancel()
            await asyncio.gather(moving, answering, return_exceptions=True)

    async def _fetch(self, bundle: _Bundle, address: str, asked: Header, reserve: Reserve) -> tuple[Slots, int, Header]:
        control = bundle.control
        name = os.urandom(16)
        await control.write(b"FETC" + Offer(asked, self._memory_version(), -1, 0, 0, self._streams, False, name).pack())
        answer = await control.read_answer()
        if answer.verb != b"GIVE":
            raise PeerFault(f"the holder at {address} has nothing: {answer.text}")
        offer = Offer.unpack(await control.read(Offer.BYTES))
        offer.header.require(run_id=asked.run_id, rank=asked.rank, generation=asked.generation)
        offer.require_sane()
        slots, slot = reserve(offer.header, offer.slot_bytes)
        incoming = Incoming(slots, slot, offer.header, offer.chunk_bytes)
        try:
            await bundle.join(offer, receive_chunks, incoming)
            answer = await control.read_answer()
            if answer.verb != b"OKAY":
                raise SnapshotMismatch(f"the replica at {address} is not to be used: {answer.text}")
            header = Header.unpack(await control.read(HEADER_BYTES))
            await asyncio.get_running_loop().run_in_executor(None, incoming.finish, header)
        except BaseException:
            await self._close(bundle)  # before the slot is given back
            raise
        slots.write_header(slot, header)
        return slots, slot, header
