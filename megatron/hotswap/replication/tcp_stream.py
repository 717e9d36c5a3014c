"""One TCP connection between two agents: the proof of the job's token, frames, and chunks on a thread of their own. In clear; over
TLS it is the same (tls_stream.py).

Every fixed part ends with a CRC32C of itself, and every length is bounded before memory is taken for it. Nothing that arrives is
unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import itertools
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

import deadpool_ext

from ..errors import PeerFault, SnapshotMismatch
from ..snapshot.layout import HEADER_BYTES, Header
from .chunks import Chunks
from .incoming import Incoming
from .outgoing import Outgoing

_NONCE_BYTES = 32
_PROOF_BYTES = 32
_TEXT_BYTES_MAX = 4096
_CHECK = struct.Struct("<I")
#: verb, membership version, checksum of the whole (HAVE), length of the text
_ANSWER = struct.Struct("<4sQII")
#: membership version, generation to keep, slot bytes, chunk bytes, streams, whether the header's checksum is known yet, name
_OFFER = struct.Struct("<QqQIHH16s")
#: index, length, CRC32C of the chunk *before* on this stream (0 at first): a chunk is summed while it is sent, in one pass over memory
_CHUNK = struct.Struct("<QII")
_CHUNK_HEAD_BYTES = _CHUNK.size + _CHECK.size
_NO_MORE = (1 << 64) - 1
STREAMS_MAX = 64

#: A machine that went away without a word (power, cable) is noticed after 10 + 3 · 5 s of silence where nothing is on its way;
#: long before that the coordinator knows by its lease. Without it a dead sender's connection would stay for good.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


def sealed(body: bytes) -> bytes:
    """The bytes, then their checksum."""
    raw = np.frombuffer(body, dtype=np.uint8)
    return body + _CHECK.pack(deadpool_ext.crc32c(raw.ctypes.data, len(body)))


def unsealed(raw: bytes, what: str) -> bytes:
    """The bytes without their checksum.

    Raises:
        SnapshotMismatch: it does not match.
    """
    body = raw[: -_CHECK.size]
    if sealed(body) != raw:
        raise SnapshotMismatch(f"{what} was damaged on its way: its own checksum does not match")
    return body


@dataclass(frozen=True)
class Offer:
    """The frame that begins a transfer: what will come, and over how many streams."""

    header: Header
    version: int
    keep: int  # newest generation that the owner knows to be committed: it must not be overwritten; -1: none
    slot_bytes: int
    chunk_bytes: int
    streams: int
    known: bool  # whether the header's checksum is that of the content; else it comes last
    name: bytes  # 16 random bytes by which the streams find their transfer

    BYTES = HEADER_BYTES + _OFFER.size + _CHECK.size

    def pack(self) -> bytes:
        """BYTES bytes."""
        rest = _OFFER.pack(self.version, self.keep, self.slot_bytes, self.chunk_bytes, self.streams, self.known, self.name)
        return sealed(self.header.pack() + rest)

    def require_sane(self) -> None:
        """Check the lengths against each other, before memory is taken for them.

        Raises:
            SnapshotMismatch: they cannot be those of a snapshot.
        """
        Chunks(self.slot_bytes, self.header.metadata_bytes, self.header.payload_bytes, self.chunk_bytes)

    @classmethod
    def unpack(cls, raw: bytes) -> Offer:
        """Read one.

        Raises:
            SnapshotMismatch: it is damaged, or a number in it is out of its bounds.
        """
        body = unsealed(raw, "the frame that begins a transfer")
        version, keep, slot_bytes, chunk_bytes, streams, known, name = _OFFER.unpack_from(body, HEADER_BYTES)
        if not 1 <= streams <= STREAMS_MAX:
            raise SnapshotMismatch(f"a transfer has 1 to {STREAMS_MAX} streams, {streams} were announced")
        return cls(Header.unpack(body[:HEADER_BYTES]), version, keep, slot_bytes, chunk_bytes, streams, bool(known), name)


@dataclass(frozen=True)
class Answer:
    """What the other side says to a frame."""

    verb: bytes
    version: int  # newest membership that it knows
    crc32c: int
    text: str


class Pipe(Protocol):
    """Bytes straight out of and into memory, by a thread that may be held. All raise OSError when the connection breaks."""

    def send(self, address: int, length: int, head: bytes) -> None:
        """The head, then the bytes at the address."""

    def send_summed(self, address: int, length: int, head: bytes) -> int:
        """The same; returns the CRC32C of the bytes at the address."""
        ...

    def receive(self, address: int, length: int) -> int:
        """So many bytes to the address; returns their CRC32C."""
        ...


class _Plain(Pipe):
    """In clear: the engine's calls, each pass over memory without Python's lock."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def send(self, address: int, length: int, head: bytes) -> None:
        deadpool_ext.send_all(self._fd, address, length, head)

    def send_summed(self, address: int, length: int, head: bytes) -> int:
        return deadpool_ext.send_summed(self._fd, address, length, head)

    def receive(self, address: int, length: int) -> int:
        return deadpool_ext.recv_all(self._fd, address, length)


class Stream:
    """A connected socket on the running loop: frames are awaited here, chunks go through a thread without Python's lock."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, seconds)
        self.sock = sock
        self._loop = asyncio.get_running_loop()
        self._thread: asyncio.Future[None] | None = None

    # ---- frames

    async def write(self, data: bytes) -> None:
        """All of it."""
        self._require_no_thread()
        await self._loop.sock_sendall(self.sock, data)

    async def read(self, length: int) -> bytes:
        """Exactly so many bytes.

        Raises:
            PeerFault: the peer closed before the last one.
        """
        self._require_no_thread()
        buffer = bytearray(length)
        view = memoryview(buffer)
        while view:
            count = await self._receive_into(view)
            if count == 0:
                raise PeerFault("the peer closed the connection in the middle of a transfer")
            view = view[count:]
        return bytes(buffer)

    async def _receive_into(self, view: memoryview) -> int:
        """Some bytes; 0 where the peer has closed."""
        return await self._loop.sock_recv_into(self.sock, view)

    async def answer(self, verb: bytes, version: int, text: str = "", crc32c: int = 0) -> None:
        """Say something to a frame."""
        raw = text.encode()[:_TEXT_BYTES_MAX]
        await self.write(sealed(_ANSWER.pack(verb, version, crc32c, len(raw)) + raw))

    async def read_answer(self) -> Answer:
        """Hear it.

        Raises:
            PeerFault: it is damaged or of absurd length.
        """
        head = await self.read(_ANSWER.size)
        verb, version, crc32c, length = _ANSWER.unpack(head)
        if length > _TEXT_BYTES_MAX:
            raise PeerFault(f"a text of {length} bytes was announced; at most {_TEXT_BYTES_MAX} are allowed")
        rest = await self.read(length + _CHECK.size)
        try:
            text = unsealed(head + rest, "an answer")[_ANSWER.size :]
        except SnapshotMismatch as damaged:
            raise PeerFault(str(damaged)) from damaged
        return Answer(verb, version, crc32c, text.decode(errors="replace"))

    # ---- the proof

    async def prove_as_client(self, token: str) -> None:
        """Both sides show that they know the token, and neither learns it from the other.

        Raises:
            PeerFault: the other side does not know it, or thinks so of this one.
        """
        theirs = await self.read(_NONCE_BYTES)
        mine = os.urandom(_NONCE_BYTES)
        await self.write(mine + _proof(token, b"client", theirs, mine))
        try:
            proof = await self.read(_PROOF_BYTES)
        except PeerFault as closed:
            raise PeerFault("it does not accept this job's token") from closed
        if not hmac.compare_digest(proof, _proof(token, b"server", theirs, mine)):
            raise PeerFault("it does not know this job's token, so it is no agent of this job")

    async def prove_as_server(self, token: str) -> None:
        """The other half of `prove_as_client`. The client has to show its knowledge first."""
        mine = os.urandom(_NONCE_BYTES)
        await self.write(mine)
        said = await self.read(_NONCE_BYTES + _PROOF_BYTES)
        theirs = said[:_NONCE_BYTES]
        if not hmac.compare_digest(said[_NONCE_BYTES:], _proof(token, b"client", mine, theirs)):
            raise PeerFault("a stranger")
        await self.write(_proof(token, b"server", mine, theirs))

    # ---- chunks

    def in_thread(self, work: Callable[..., None], *arguments: Any) -> asyncio.Future[None]:
        """Run `work(pipe, *arguments)` on a thread of its own, so that no number of stalled peers can use up a pool.

        Meanwhile the socket blocks, so that the kernel waits in the call (polling costs a tenth of the bandwidth), and no frame
        is read or written: that would stop the loop.
        """
        done: asyncio.Future[None] = self._loop.create_future()
        done.add_done_callback(lambda f: f.cancelled() or f.exception())  # looked at by who waits, else of no interest
        ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = ended

        def settle(error: BaseException | None) -> None:
            self.sock.setblocking(False)
            ended.set_result(None)
            if not done.cancelled():
                done.set_result(None) if error is None else done.set_exception(error)

        def run() -> None:
            error: BaseException | None = None
            try:
                work(self._pipe(), *arguments)
            except BaseException as broken:
                error = broken
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(settle, error)

        self.sock.setblocking(True)
        threading.Thread(target=run, name="deadpool-h2h", daemon=True).start()
        return done

    def _pipe(self) -> Pipe:
        return _Plain(self.sock.fileno())

    def _require_no_thread(self) -> None:
        if self._thread is not None and not self._thread.done():
            raise PeerFault("a frame was due on a connection whose thread still moves chunks; the connection is given up")

    def cut(self) -> None:
        """End whatever uses the socket, at once."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    @property
    def worn_out(self) -> bool:
        """Whether nothing more should be begun on this connection."""
        return False

    def peer_is_there(self) -> bool:
        """Whether an idle connection, on which nothing is due, is still good."""
        try:
            self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # it has closed, or talks out of turn

    async def thread_ended(self) -> None:
        """Wait until no thread uses the socket or the slot that it was given."""
        if self._thread is not None:
            await asyncio.wait([self._thread])

    async def close(self) -> None:
        """Cut, and give the descriptor back once no thread has it."""
        self.cut()
        await self.thread_ended()
        self.sock.close()


def _proof(token: str, side: bytes, of_server: bytes, of_client: bytes) -> bytes:
    """The side is part of it, else a server could answer with what a client said to it."""
    return hmac.new(token.encode(), side + of_server + of_client, hashlib.sha256).digest()


def send_chunks(pipe: Pipe, outgoing: Outgoing, deal: Iterator[int], stop: threading.Event) -> None:
    """Thread of a stream that sends: the next chunk that no other stream has, until there are none."""
    chunks, base, before = len(outgoing.chunks), outgoing.base, 0
    while (index := next(deal)) < chunks and not stop.is_set():
        offset, length = outgoing.await_bytes(index, stop)
        head = sealed(_CHUNK.pack(index, length, before))
        known = outgoing.known(index)
        if known is None:
            before = pipe.send_summed(base + offset, length, head)
            outgoing.learn(index, before)
        else:
            pipe.send(base + offset, length, head)
            before = known
    pipe.send(0, 0, sealed(_CHUNK.pack(_NO_MORE, 0, before)))


def receive_chunks(pipe: Pipe, incoming: Incoming) -> None:
    """Thread of a stream that receives: straight into the slot, until the other side says that no more come."""
    buffer = np.zeros(_CHUNK_HEAD_BYTES, dtype=np.uint8)
    before: tuple[int, int] | None = None  # index and checksum of the chunk that the next head speaks of
    while True:
        pipe.receive(buffer.ctypes.data, _CHUNK_HEAD_BYTES)
        index, length, promised = _CHUNK.unpack(unsealed(buffer.tobytes(), "the head of a chunk"))
        if before is not None:
            incoming.arrived(*before, promised)
        if index == _NO_MORE:
            return
        before = index, pipe.receive(incoming.place(index, length), length)


def deal() -> Iterator[int]:
    """0, 1, 2, … for several threads: each number goes to one of them (count.__next__ is atomic)."""
    return itertools.count()
