"""What runs in a side process (see side.py): one loop that takes the agent's orders and polls the library's requests.

The library is polled in bursts with short sleeps between, since its own waits burn a whole core and cannot be interrupted. The
process is never left in an orderly way: a library's finalization may wait for a peer that is dead.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import mmap
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable

import msgspec
import numpy as np

from ..processes import die_with_parent, leave
from .side import (
    MESSAGE_BYTES_MAX,
    Begin,
    Failed,
    FromAgent,
    FromSide,
    Hello,
    Linked,
    Map,
    Meet,
    Offer,
    Offered,
    Ready,
    Take,
    Taken,
    Unmap,
    encode,
)

#: Each poll moves the library on by a few kilobytes where the network needs the processor's help (TCP), so a burst of them costs
#: less than the sleep. Measured: 64 MiB over loopback TCP in 0.25 s with single polls, 0.10 s with bursts.
_POLLS_A_BURST = 32
_SLEEP_S = 0.0001
_PR_SET_TIMERSLACK = 29
_TIMER_SLACK_NS = 1000  # the default, 50 µs, would add half as much again to every sleep
_MAX_DESCRIPTORS = 1
_REASON_CHARS_MAX = 4000

#: Asked again and again until it says that a request is complete; raises when it has failed.
Request = Callable[[], bool]


class Library(abc.ABC):
    """A communication library that moves bytes between the two ends of one link."""

    @abc.abstractmethod
    def load(self) -> str:
        """Import it; returns its name and version."""

    @abc.abstractmethod
    def begin(self, end: int) -> bytes | None:
        """Be this end (0 or 1). Returns what the other end must know, or None where the two are linked already."""

    @abc.abstractmethod
    def meet(self, blob: bytes) -> None:
        """Take what the other end's `begin` returned."""

    @abc.abstractmethod
    def register(self, address: int, length_bytes: int) -> object:
        """Make memory known; returns what `deregister` needs."""

    @abc.abstractmethod
    def deregister(self, registration: object) -> None:
        """Forget memory."""

    @abc.abstractmethod
    def offer(self, address: int, length_bytes: int, tag: int) -> tuple[bytes, Request | None]:
        """Let the other end take these bytes; returns the ticket for it, and a request to poll where one is needed."""

    @abc.abstractmethod
    def take(self, address: int, length_bytes: int, tag: int, ticket: bytes) -> Request:
        """Begin to bring what was offered."""


class _Side:
    def __init__(self, library: Library, sock: socket.socket) -> None:
        self._library = library
        self._sock = sock
        self._decode = msgspec.msgpack.Decoder(FromAgent).decode
        self._memories: dict[int, tuple[mmap.mmap, int, object]] = {}
        self._requests: dict[int, tuple[Request, FromSide | None]] = {}
        self._keys = 0

    def run(self) -> None:
        """Until the agent closes the pair."""
        self._say(Ready(self._library.load()))
        while True:
            wait_s = _SLEEP_S if self._requests else None
            if select.select([self._sock], [], [], wait_s)[0] and not self._obey():
                return
            self._poll()

    def _say(self, message: FromSide) -> None:
        self._sock.send(encode(message))

    def _obey(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._sock, MESSAGE_BYTES_MAX, _MAX_DESCRIPTORS)
        if not data:
            return False
        message = self._decode(data)
        if isinstance(message, Begin):
            blob = self._library.begin(message.end)
            self._say(Linked() if blob is None else Hello(blob))
        elif isinstance(message, Meet):
            self._library.meet(message.blob)
            self._say(Linked())
        elif isinstance(message, Map):
            self._map(message, descriptors[0])
        elif isinstance(message, Unmap):
            mapped, _, registration = self._memories.pop(message.memory)
            self._library.deregister(registration)
            del mapped
        elif isinstance(message, Offer):
            ticket, request = self._library.offer(self._address(message), message.length_bytes, message.tag)
            self._say(Offered(message.tag, ticket))
            if request is not None:
                self._add(request, None)
        else:
            request = self._library.take(self._address(message), message.length_bytes, message.tag, message.ticket)
            self._add(request, Taken(message.tag))
        return True

    def _map(self, message: Map, descriptor: int) -> None:
        mapped = mmap.mmap(descriptor, message.length_bytes)
        os.close(descriptor)
        address = int(np.frombuffer(mapped, dtype=np.uint8).ctypes.data)
        self._memories[message.memory] = (mapped, address, self._library.register(address, message.length_bytes))

    def _address(self, message: Offer | Take) -> int:
        mapped, address, _ = self._memories[message.memory]
        if not 0 <= message.offset <= message.offset + message.length_bytes <= len(mapped):
            asked = f"{message.length_bytes} bytes at {message.offset}"
            raise ValueError(f"{asked} are not inside the {len(mapped)} bytes of memory {message.memory}")
        return address + message.offset

    def _add(self, request: Request, answer: FromSide | None) -> None:
        self._keys += 1
        self._requests[self._keys] = (request, answer)

    def _poll(self) -> None:
        for _ in range(_POLLS_A_BURST):
            if not self._requests:
                return
            for key, (request, answer) in list(self._requests.items()):
                if request():
                    del self._requests[key]
                    if answer is not None:
                        self._say(answer)


def run(library: Library) -> None:
    """The main function of a side process. Does not return."""
    die_with_parent()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the agent decides what follows
    sock = socket.socket(fileno=int(sys.argv[1]))
    code = 0
    try:
        _Side(library, sock).run()
    except BaseException as failure:
        code = 1
        traceback.print_exc()
        with contextlib.suppress(OSError):
            sock.send(encode(Failed(f"{type(failure).__name__}: {failure}"[:_REASON_CHARS_MAX])))
    leave(code)
