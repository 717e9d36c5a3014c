"""What an agent and its worker tell each other over their socket pair: the coordinator's messages, and these.

A SOCK_SEQPACKET socket keeps message borders, and carries the descriptors of shared memory along.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from typing import Annotated, Any

import msgspec

from ..codec import decoder
from ..control import messages as m
from ..errors import Malformed
from ..snapshot.slots import OWN_SLOTS

#: What memory a slot can have at all; more is noise, and no size is negative.
_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 44)]
_Slot = Annotated[int, msgspec.Meta(ge=0, lt=OWN_SLOTS)]


class _Local(msgspec.Struct, frozen=True, tag=True):
    pass


class Given(_Local, frozen=True):
    """Agent: you are this rank. `fake` says: build against groups that never communicate, a plan follows. `loaded`: the job begins from
    what lies in your slots, a plan follows that says what."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    version: int
    store: str
    fake: bool
    loaded: bool = False


class NeedSlots(_Local, frozen=True):
    """Worker: my model is built and this is my layout."""

    layout_hash: bytes
    metadata_room_bytes: _Size
    payload_bytes: _Size
    peers: tuple[int, ...] = ()  # ranks whose payload is the same as this one's, bit for bit


class SlotsGiven(_Local, frozen=True):
    """Agent: here they are (one descriptor comes along)."""

    slot_bytes: int
    count: int


class NoSlots(_Local, frozen=True):
    """Agent: there is no room, or the layout is not the one that the fetched snapshot has."""

    reason: str


class Plan(_Local, frozen=True):
    """Agent: go on from `generation`; its snapshot is in your slots."""

    version: int
    generation: int
    store: str
    redo_sections: bool
    fetched_bytes: int
    slot: int | None  # where it lies, if this process has not put it there itself
    replaced: tuple[int, ...] = ()  # ranks whose process is new


class Copying(_Local, frozen=True):
    """Worker: the copy of this generation into this slot has begun; COPIED says when it is complete.

    `keep` is the newest generation that is committed, as far as this rank knows: what holders must not overwrite. -1: none.
    """

    generation: int
    slot: _Slot
    keep: int


class Strike(_Local, frozen=True):
    """Worker: the moment of an armed injection has come; agent, do it."""

    injection: m.Injection


FromWorker = (
    NeedSlots
    | Copying
    | Strike
    | m.WorkerReady
    | m.StepDone
    | m.Acknowledged
    | m.WorkerError
    | m.HaltReport
    | m.Restored
    | m.Skipped
    | m.CopyDamaged
    | m.FirstStep
    | m.Finished
    | m.Note
)
FromAgent = Given | SlotsGiven | NoSlots | Plan | m.Halt | m.Arm | m.Stop

_ENCODER = msgspec.msgpack.Encoder()
_MESSAGE_BYTES_MAX = 1 << 20


class Link:
    """One end of the socket pair."""

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        self.sock = sock
        self._decode = decoder(receives)

    def send(self, message: FromWorker | FromAgent, fds: tuple[int, ...] = ()) -> None:
        """Send one message; descriptors are duplicated into the other process."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.sock.sendmsg([_ENCODER.encode(message)], ancillary)

    def receive(self) -> tuple[Any, tuple[int, ...]]:
        """Receive one message and its descriptors.

        Raises:
            EOFError: the other end is gone.
            Malformed: what came is no message, or is longer than any. Its descriptors are closed.
        """
        data, fds, flags, _ = socket.recv_fds(self.sock, _MESSAGE_BYTES_MAX, 4)
        if not data and not fds:
            raise EOFError("the other end of the link is gone")
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise Malformed(f"a message came that has more than {_MESSAGE_BYTES_MAX} bytes, or more than 4 descriptors")
            return self._decode(data), tuple(fds)
        except Malformed:
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)
            raise


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends, the second inheritable by a child."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.set_inheritable(True)
    return ours, theirs
