"""H2H over TCP: one connection a holder, bytes straight out of and into the slots.

A frame is  verb (4 bytes), header (layout.HEADER_BYTES), slot size (8 bytes), metadata, payload.  PUSH is answered by OKAY or NOPE
with a text; FETC (whose frame ends after the slot size) is answered by GIVE with a frame's rest, or NOPE. A connection begins
with a proof of the job's token. Nothing that arrives is unpickled, and every length is bounded before memory is taken for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import socket
import struct

from ..errors import HotSwapError, PeerFault, SnapshotMismatch
from ..snapshot.layout import HEADER_BYTES, Header
from ..snapshot.slots import Slots
from .transfer import ReplicaStore, Reserve, Transport, checksum

_SIZE = struct.Struct("<Q")
_FRAME_BYTES = 4 + HEADER_BYTES + _SIZE.size
_NONCE_BYTES = 32
_TEXT_BYTES_MAX = 4096
_SLOT_BYTES_MAX = 1 << 44  # 16 TiB: a length above this is not a slot but noise
_CONNECT_TIMEOUT_S = 5.0
#: Large enough to keep a 100 Gbit/s link busy over a 0.5 ms round trip.
_SOCKET_BUFFER_BYTES = 4 << 20


def _proof(token: str, nonce: bytes) -> bytes:
    return hmac.new(token.encode(), nonce, hashlib.sha256).digest()


class _Stream:
    """A non-blocking socket on the running loop, reading and writing whole amounts."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._loop = asyncio.get_running_loop()

    async def write(self, data: bytes | memoryview) -> None:
        await self._loop.sock_sendall(self.sock, data)

    async def read_into(self, view: memoryview) -> None:
        while view:
            count = await self._loop.sock_recv_into(self.sock, view)
            if count == 0:
                raise PeerFault("the peer closed the connection in the middle of a transfer")
            view = view[count:]

    async def read(self, length: int) -> bytes:
        buffer = bytearray(length)
        await self.read_into(memoryview(buffer))
        return bytes(buffer)

    async def write_text(self, verb: bytes, text: str) -> None:
        raw = text.encode()[:_TEXT_BYTES_MAX]
        await self.write(verb + _SIZE.pack(len(raw)) + raw)

    async def read_text(self) -> str:
        (length,) = _SIZE.unpack(await self.read(_SIZE.size))
        if length > _TEXT_BYTES_MAX:
            raise PeerFault(f"a text of {length} bytes was announced; at most {_TEXT_BYTES_MAX} are allowed")
        return (await self.read(length)).decode(errors="replace")

    def close(self) -> None:
        self.sock.close()


class TcpTransport(Transport):
    """See the module docstring."""

    def __init__(self, token: str, interface: str) -> None:
        self._token = token
        self._interface = interface
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._outgoing: dict[str, _Stream] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._receiving: dict[tuple[int, int], asyncio.Task[None] | None] = {}  # (rank, slot) -> who writes into it
        self.bytes_sent = 0
        self.bytes_received = 0

    async def serve(self, replicas: ReplicaStore) -> str:
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.bind((self._interface, 0))
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._spawn(self._accept(replicas))
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    async def push(self, address: str, slots: Slots, slot: int, header: Header) -> None:
        async with self._locks.setdefault(address, asyncio.Lock()):
            try:
                stream = self._outgoing.get(address) or await self._connect(address)
                self._outgoing[address] = stream
                await self._send_slot(stream, b"PUSH", slots, slot, header)
                verb = await stream.read(4)
                text = await stream.read_text()
            except BaseException as broken:  # cancellation too leaves a half-sent frame: the connection is of no more use
                self._drop(address)
                if isinstance(broken, OSError):
                    raise PeerFault(f"the holder at {address} is gone: {broken}") from broken
                raise
        if verb != b"OKAY":
            self._drop(address)  # whoever refuses closes: the body that it did not read is still in the connection
            raise PeerFault(f"the holder at {address} refused rank {header.rank}, generation {header.generation}: {text}")

    async def fetch(self, address: str, run_id: str, rank: int, generation: int, reserve: Reserve) -> tuple[Slots, int, Header]:
        asked = Header(run_id, rank, generation, bytes(32), 0, 0, 0)
        stream = await self._connect(address)
        try:
            await stream.write(b"FETC" + asked.pack() + _SIZE.pack(0))
            verb = await stream.read(4)
            if verb != b"GIVE":
                raise PeerFault(f"the holder at {address} has nothing: {await stream.read_text()}")
            header, slot_bytes = await self._read_head(stream)
            header.require(run_id=run_id, rank=rank, generation=generation)
            slots, slot = reserve(header, slot_bytes)
            await self._read_body(stream, slots, slot, header)
            slots.write_header(slot, header)
            return slots, slot, header
        except OSError as broken:
            raise PeerFault(f"the holder at {address} is gone: {broken}") from broken
        finally:
            stream.close()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for address in list(self._outgoing):
            self._drop(address)
        if self._listener is not None:
            self._listener.close()

    # ---- outgoing

    async def _connect(self, address: str) -> _Stream:
        host, port = address.rsplit(":", 1)
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        sock.bind((self._interface, 0))
        stream = _Stream(sock)
        try:
            await asyncio.wait_for(asyncio.get_running_loop().sock_connect(sock, (host, int(port))), _CONNECT_TIMEOUT_S)
            nonce = await asyncio.wait_for(stream.read(_NONCE_BYTES), _CONNECT_TIMEOUT_S)
            await stream.write(_proof(self._token, nonce))
        except (OSError, TimeoutError) as broken:
            stream.close()
            raise PeerFault(f"no connection to {address}: {broken}") from broken
        return stream

    def _drop(self, address: str) -> None:
        stream = self._outgoing.pop(address, None)
        if stream is not None:
            stream.close()

    async def _send_slot(self, stream: _Stream, verb: bytes, slots: Slots, slot: int, header: Header) -> None:
        view = slots.view(slot)
        await stream.write(verb + header.pack() + _SIZE.pack(slots.slot_bytes))
        await stream.write(view[HEADER_BYTES : HEADER_BYTES + header.metadata_bytes])
        await stream.write(view[slots.slot_bytes - header.payload_bytes :])
        self.bytes_sent += header.metadata_bytes + header.payload_bytes

    # ---- incoming

    def _spawn(self, coroutine: object) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, replicas: ReplicaStore) -> None:
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(self._listener)
            self._spawn(self._serve_one(_Stream(sock), replicas))

    async def _serve_one(self, stream: _Stream, replicas: ReplicaStore) -> None:
        try:
            nonce = os.urandom(_NONCE_BYTES)
            await stream.write(nonce)
            if not hmac.compare_digest(await stream.read(_NONCE_BYTES), _proof(self._token, nonce)):
                return
            while True:
                verb = await stream.read(4)
                if verb == b"PUSH":
                    await self._take(stream, replicas)
                elif verb == b"FETC":
                    await self._give(stream, replicas)
                else:
                    return
        except (OSError, HotSwapError):
            return  # a peer that goes away or talks nonsense costs its connection and nothing else
        finally:
            stream.close()

    async def _take(self, stream: _Stream, replicas: ReplicaStore) -> None:
        header, slot_bytes = await self._read_head(stream)
        if replicas.holds(header) and not replicas.frozen:
            await self._drain(stream, header.metadata_bytes + header.payload_bytes)
            await stream.write_text(b"OKAY", "")
            return
        try:
            slots, slot = replicas.reserve(header, slot_bytes)
        except HotSwapError as refused:
            await stream.write_text(b"NOPE", str(refused))
            raise
        earlier = self._receiving.get((header.rank, slot))
        if earlier is not None and earlier is not asyncio.current_task():
            earlier.cancel()  # a sender that stalled must not write into what comes now
        self._receiving[header.rank, slot] = asyncio.current_task()
        try:
            await self._read_body(stream, slots, slot, header)
        except SnapshotMismatch as damaged:
            await stream.write_text(b"NOPE", str(damaged))
            return
        finally:
            if self._receiving.get((header.rank, slot)) is asyncio.current_task():
                del self._receiving[header.rank, slot]
        try:
            replicas.complete(header, slot)
        except PeerFault as late:
            await stream.write_text(b"NOPE", str(late))
            return
        await stream.write_text(b"OKAY", "")

    async def _drain(self, stream: _Stream, length: int) -> None:
        scratch = memoryview(bytearray(min(length, _SOCKET_BUFFER_BYTES)))
        while length:
            part = scratch[: min(length, len(scratch))]
            await stream.read_into(part)
            length -= len(part)

    async def _give(self, stream: _Stream, replicas: ReplicaStore) -> None:
        asked, _ = await self._read_head(stream)
        try:
            slots, slot = replicas.find(asked.rank, asked.generation)
        except SnapshotMismatch as missing:
            await stream.write_text(b"NOPE", str(missing))
            return
        await self._send_slot(stream, b"GIVE", slots, slot, slots.header(slot))

    async def _read_head(self, stream: _Stream) -> tuple[Header, int]:
        raw = await stream.read(_FRAME_BYTES - 4)
        header = Header.unpack(raw[:HEADER_BYTES])
        (slot_bytes,) = _SIZE.unpack(raw[HEADER_BYTES:])
        if slot_bytes and not HEADER_BYTES + header.metadata_bytes + header.payload_bytes <= slot_bytes <= _SLOT_BYTES_MAX:
            raise SnapshotMismatch(
                f"a slot of {slot_bytes} bytes cannot hold {header.metadata_bytes} + {header.payload_bytes} bytes and a header"
            )
        return header, slot_bytes

    async def _read_body(self, stream: _Stream, slots: Slots, slot: int, header: Header) -> None:
        view = slots.view(slot)
        await stream.read_into(view[HEADER_BYTES : HEADER_BYTES + header.metadata_bytes])
        await stream.read_into(view[slots.slot_bytes - header.payload_bytes :])
        self.bytes_received += header.metadata_bytes + header.payload_bytes
        found = await checksum(slots, slot, header)
        if found != header.crc32c:
            raise SnapshotMismatch(
                f"rank {header.rank}, generation {header.generation}: the checksum is {found:08x} on arrival, "
                f"{header.crc32c:08x} at the sender"
            )
