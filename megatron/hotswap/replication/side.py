"""A disposable process that alone loads a communication library, seen from its agent.

MPI and its kind abort, hang or crash when a peer dies, and cannot be put right afterwards. So the agent never loads them: each
end of a link is a *side process* which maps the agent's slots, moves chunks, and is killed and replaced when anything goes wrong.
It is also what makes a slot safe to use again after a transfer that was given up: no late write can come from a process, or
through its network card's registrations, once it is dead.

The two talk over a SOCK_SEQPACKET pair in the messages below; the other end is side_loop.py. A side process dies with its agent
(PR_SET_PDEATHSIG, and the end of the pair).
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from ..codec import decoder
from ..errors import Malformed, PeerFault
from ..processes import end_in_words
from ..snapshot.slots import Slots

#: How much of what a dead side process wrote last is quoted.
_LAST_WORDS_BYTES = 600
MESSAGE_BYTES_MAX = 1 << 16


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class Begin(_Message, frozen=True):
    """Agent: you are end 0 or 1 of a link."""

    end: int


class Meet(_Message, frozen=True):
    """Agent: this is what the other end's Hello said."""

    blob: bytes


class Map(_Message, frozen=True):
    """Agent: map this memory (its descriptor comes along) and register it with the library."""

    memory: int
    length_bytes: int


class Unmap(_Message, frozen=True):
    """Agent: the memory is not used any more."""

    memory: int


class Offer(_Message, frozen=True):
    """Agent: the other end will take these bytes under this tag."""

    memory: int
    offset: int
    length_bytes: int
    tag: int


class Take(_Message, frozen=True):
    """Agent: bring what the other end offered under this tag; `ticket` is what its library said of it."""

    memory: int
    offset: int
    length_bytes: int
    tag: int
    ticket: bytes


class Ready(_Message, frozen=True):
    """Side: the library is loaded; this is its name and version."""

    version: str


class Hello(_Message, frozen=True):
    """Side: what the other end must know of me to reach me."""

    blob: bytes


class Linked(_Message, frozen=True):
    """Side: the two ends can exchange data."""


class Offered(_Message, frozen=True):
    """Side: the bytes of this tag can be taken with this ticket."""

    tag: int
    ticket: bytes


class Taken(_Message, frozen=True):
    """Side: the bytes of this tag are here."""

    tag: int


class Failed(_Message, frozen=True):
    """Side: the library failed; I end."""

    reason: str


#: Sends this end's bytes to the other end and returns what that sent.
Exchange = Callable[[bytes], Awaitable[bytes]]

FromAgent = Begin | Meet | Map | Unmap | Offer | Take
FromSide = Ready | Hello | Linked | Offered | Taken | Failed

encode = msgspec.msgpack.Encoder().encode
_decode = decoder(FromSide)


class SideProcess:
    """One side process. Every wait on it ends with PeerFault when the process does."""

    def __init__(self, module: str, environment: Mapping[str, str], descriptors: tuple[int, ...] = ()) -> None:
        """Start `python -m module`. `descriptors` are inherited under their own numbers."""
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[tuple[type, int], asyncio.Future[Any]] = {}
        self._memories: weakref.WeakKeyDictionary[Slots, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._version: str | None = None
        self._reaping: asyncio.Future[int] | None = None
        self.failure: PeerFault | None = None
        self.on_failure: Callable[[PeerFault], None] | None = None
        self._log = os.memfd_create("deadpool-side-log")
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=dict(environment),
                pass_fds=(theirs.fileno(), *descriptors),
            )
        finally:
            theirs.close()
        self._loop.add_reader(self._sock, self._receive)

    async def ready(self) -> str:
        """The library's name and version, once it is loaded."""
        if self._version is None:
            message: Ready = await self._answer(Ready)
            self._version = message.version
        return self._version

    async def join(self, end: int, exchange: Exchange) -> None:
        """Link with the other end's side process; `exchange` carries what the two libraries must know of each other."""
        self._send(Begin(end))
        hello: Hello = await self._answer(Hello)
        self._send(Meet(await exchange(hello.blob)))
        await self._answer(Linked)

    async def offer(self, slots: Slots, offset: int, length_bytes: int, tag: int) -> bytes:
        """Let the other end take bytes of the slots' memory (`offset` counts from its first slot); returns the ticket."""
        self._send(Offer(self._memory(slots), offset, length_bytes, tag))
        message: Offered = await self._answer(Offered, tag)
        return message.ticket

    async def take(self, slots: Slots, offset: int, length_bytes: int, tag: int, ticket: bytes) -> None:
        """Bring what the other end offered into the slots' memory; returns when it is there."""
        self._send(Take(self._memory(slots), offset, length_bytes, tag, ticket))
        await self._answer(Taken, tag)

    def fail(self, failure: PeerFault) -> None:
        """End the process, at once; whoever waits for it, now or later, gets `failure`. Only the first call counts."""
        if self.failure is not None:
            return
        self.failure = failure
        self._loop.remove_reader(self._sock)
        self._sock.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self._reaping = self._loop.run_in_executor(None, self.process.wait)
        self._reaping.add_done_callback(lambda _: os.close(self._log))
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(failure)
        if self.on_failure is not None:
            self.on_failure(failure)

    async def dead(self) -> None:
        """Wait until the process that `fail` ended is gone: from then on it touches no memory."""
        if self._reaping is not None:
            await asyncio.shield(self._reaping)

    # ---- the pair

    async def _answer(self, kind: type, tag: int = 0) -> Any:
        if self.failure is not None:
            raise self.failure
        future = self._future(kind, tag)
        try:
            return await future
        finally:
            self._waiting.pop((kind, tag), None)

    def _future(self, kind: type, tag: int) -> asyncio.Future[Any]:
        return self._waiting.setdefault((kind, tag), self._loop.create_future())

    def _send(self, message: FromAgent, descriptors: tuple[int, ...] = ()) -> None:
        if self.failure is not None:
            raise self.failure
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            self._sock.sendmsg([encode(message)], ancillary)
        except OSError as broken:  # dead, or (BlockingIOError) it stopped reading: of no use either way
            self._ended(f"it takes no more orders: {broken}")
            assert self.failure is not None
            raise self.failure from broken

    def _receive(self) -> None:
        try:
            data = self._sock.recv(MESSAGE_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError as broken:
            self._ended(str(broken))
            return
        if not data:
            self._ended("")
            return
        try:
            message = _decode(data)
        except Malformed as noise:
            self._ended(f"it sent what is no message: {noise}")
            return
        if isinstance(message, Failed):
            self.fail(PeerFault(f"the side process failed: {message.reason}"))
            return
        future = self._future(type(message), getattr(message, "tag", 0))
        if not future.done():
            future.set_result(message)

    def _ended(self, why: str) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.05)  # the pair closes a moment before the process can be waited for
        status = self.process.poll()
        how = (why or "it closed its link") if status is None else end_in_words(status)
        last = os.pread(self._log, _LAST_WORDS_BYTES, max(0, os.fstat(self._log).st_size - _LAST_WORDS_BYTES))
        words = " ".join(last.decode(errors="replace").split())
        self.fail(PeerFault(f"the side process is gone: {how}" + (f"; its last words: {words}" if words else "")))

    # ---- memory

    def _memory(self, slots: Slots) -> int:
        """The number under which the process has these slots mapped. They are given back with the Slots object."""
        if slots not in self._memories:
            number = self._memories[slots] = next(self._numbers)
            self._send(Map(number, slots.slot_bytes * slots.count), (slots.fd,))
            weakref.finalize(slots, _unmap_soon, weakref.ref(self), number)
        return self._memories[slots]

    def _unmap(self, number: int) -> None:
        if self.failure is None:
            with contextlib.suppress(PeerFault):
                self._send(Unmap(number))


def _unmap_soon(side: weakref.ref[SideProcess], number: int) -> None:
    """Slots may be collected on any thread, and after the loop is closed."""
    alive = side()
    if alive is not None and alive.failure is None:
        with contextlib.suppress(RuntimeError):
            alive._loop.call_soon_threadsafe(alive._unmap, number)
