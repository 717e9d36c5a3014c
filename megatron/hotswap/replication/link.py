"""One link between two agents for a library that lives in side processes: the control connection, and the side process at this end.

What one end loses, the other loses too: if the side process dies the connection is closed, and if the connection breaks the side
process is killed. So a library that never notices its peer's death does not have to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec

from ..codec import decoder
from ..errors import Malformed, PeerFault, SnapshotMismatch
from .side import SideProcess
from .tcp_stream import Stream
from .wire import read_message, write_message


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class Open(_Message, frozen=True):
    """First message of both ends: the library that moves the bytes. It must be the same."""

    library: str


class Exchange(_Message, frozen=True):
    """What this end's library has to tell the other's before they are linked."""

    blob: bytes


class Up(_Message, frozen=True):
    """This end's library is linked."""


class Push(_Message, frozen=True):
    """I have a snapshot for you, in chunks of this size. Unless `known`, its header's checksum is right only in Finish."""

    header: bytes
    known: bool
    version: int
    keep: int  # newest generation that the owner knows to be committed: it must not be overwritten; -1: none
    slot_bytes: int
    chunk_bytes: int


class Fetch(_Message, frozen=True):
    """Give me the replica of this rank."""

    rank: int
    generation: int


class Go(_Message, frozen=True):
    """The slot is reserved; send the chunks."""


class Chunk(_Message, frozen=True):
    """This chunk is offered under this tag."""

    index: int
    length_bytes: int
    crc32c: int
    tag: int
    ticket: bytes


class Got(_Message, frozen=True):
    """One more chunk is here, and is what was sent."""


class Finish(_Message, frozen=True):
    """Every chunk was offered; this is the header."""

    header: bytes


class Give(_Message, frozen=True):
    """Here is what you asked for; the chunks follow your Go."""

    header: bytes
    slot_bytes: int
    chunk_bytes: int


class Have(_Message, frozen=True):
    """This snapshot seems to be here already, with this checksum. If yours is another, push it as known."""

    crc32c: int


class Stored(_Message, frozen=True):
    """The snapshot is here and checked."""


class Refused(_Message, frozen=True):
    """No, and why. `mismatch`: the snapshot is not what it should be (SnapshotMismatch)."""

    reason: str
    mismatch: bool = False


Message = Open | Exchange | Up | Push | Fetch | Go | Have | Chunk | Got | Finish | Give | Stored | Refused

_encode = msgspec.msgpack.Encoder().encode
_decode = decoder(Message)
_REASON_CHARS_MAX = 4000
#: Messages that wait to be heard; several times what can be under way in a transfer (linked.py).
_UNHEARD_MAX = 64


class Refusal(PeerFault):
    """The other end said no. `in_order`: nothing is under way, so the link can be used again."""

    def __init__(self, reason: str, mismatch: bool, in_order: bool = True) -> None:
        super().__init__(reason)
        self.mismatch = mismatch
        self.in_order = in_order

    def saying(self, who: str) -> Refusal:
        """The same, saying who refused what."""
        return Refusal(f"{who}: {self}", self.mismatch, self.in_order)


class Link:
    """See the module docstring. Whoever waits on a link gets PeerFault when either end of it fails."""

    def __init__(self, stream: Stream, side: SideProcess) -> None:
        self.side = side
        self.failure: PeerFault | None = None
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stream = stream
        self._refused: Refused | None = None  # said by the other end and not yet heard here
        self._writing = asyncio.Lock()
        self._inbox: asyncio.Queue[Message | None] = asyncio.Queue()
        self._reader = asyncio.get_running_loop().create_task(self._read())
        side.on_failure = self.fail
        if side.failure is not None:
            self.fail(side.failure)

    async def join(self, end: int) -> None:
        """Link the two side processes.

        Raises:
            PeerFault: an end failed, or the other end runs another library.
        """
        library = await self.side.ready()
        await self.send(Open(library))
        theirs = await self.receive(Open)
        if theirs.library != library:
            raise PeerFault(f"the other end moves snapshots with {theirs.library}, this one with {library}: install the same on every node")
        await self.side.join(end, self._exchange)
        await self.send(Up())
        await self.receive(Up)

    async def send(self, message: Message) -> None:
        """Send one message."""
        if self.failure is not None:
            raise self.failure
        try:
            async with self._writing:
                await write_message(self._stream, _encode(message))
        except OSError as broken:
            self.fail(PeerFault(f"the link broke: {broken}"))
            assert self.failure is not None
            raise self.failure from broken

    async def refuse(self, why: Exception) -> None:
        """Say no."""
        await self.send(Refused(str(why)[:_REASON_CHARS_MAX], isinstance(why, SnapshotMismatch)))

    async def receive(self, *kinds: type) -> Any:
        """The next message, which must be one of these kinds.

        Raises:
            Refusal: the other end said no.
            PeerFault: the link failed, or the message is of no such kind.
        """
        message = await self._inbox.get()
        if message is None:
            self._inbox.put_nowait(None)  # for the next one who asks
            assert self.failure is not None
            raise self.failure
        if isinstance(message, kinds):
            return message
        if isinstance(message, Refused):
            self._refused = None
            raise Refusal(message.reason, message.mismatch)
        raise PeerFault(f"the other end sent {type(message).__name__} where {' or '.join(k.__name__ for k in kinds)} was due")

    async def unless_failed[T](self, work: Coroutine[None, None, T]) -> T:
        """The result of work that knows nothing of this link; PeerFault if the link fails first."""
        task = asyncio.ensure_future(work)
        try:
            either: set[asyncio.Future[Any]] = {task, self._failed}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            task.cancel()
        assert self.failure is not None
        raise self.failure

    def fail(self, failure: PeerFault) -> None:
        """End the link: the connection is closed, the side process killed. Only the first call counts."""
        if self.failure is not None:
            return
        self.failure = failure
        self._failed.set_result(None)
        self._stream.cut()
        self._inbox.put_nowait(None)
        self.side.fail(failure)

    async def gone(self) -> None:
        """Wait until nothing of a failed link is left: its side process can write into no slot any more."""
        await self.side.dead()
        await asyncio.shield(self._reader)

    async def _exchange(self, blob: bytes) -> bytes:
        await self.send(Exchange(blob))
        theirs: Exchange = await self.receive(Exchange)
        return theirs.blob

    async def _read(self) -> None:
        try:
            while True:
                message = _decode(await read_message(self._stream))
                if self._inbox.qsize() >= _UNHEARD_MAX:
                    raise PeerFault(f"it sent {_UNHEARD_MAX} messages more than were due")
                self._inbox.put_nowait(message)
                if isinstance(message, Refused):
                    self._refused = message
        except Malformed as noise:
            self.fail(PeerFault(f"the other end sent what is no message: {noise}"))
        except (OSError, PeerFault) as broken:
            if self._refused is not None:  # whoever waits for something else is to hear why
                self.fail(Refusal(self._refused.reason, self._refused.mismatch, in_order=False))
            self.fail(PeerFault(f"the other end of the link is gone: {broken}"))
        finally:
            async with self._writing:  # closing under a write would leave the loop with a dead descriptor
                await self._stream.close()
