"""Connections between agents, whatever moves the bytes: listening, connecting with a proof of the job's token (tcp_stream.py), and
messages with their length before them."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any

from ..errors import PeerFault
from ..security.tls import PeerTls
from .tcp_stream import Stream
from .tls_stream import open_stream

CONNECT_TIMEOUT_S = 5.0
#: A node's peers come with five connections each, and a few peers at a time.
STRANGERS_MAX = 256
_ACCEPT_PAUSE_S = 0.05
_LENGTH = struct.Struct("<I")
_MESSAGE_BYTES_MAX = 1 << 18
Prepare = Callable[[socket.socket], None]


def listen(interface: str, prepare: Prepare = lambda sock: None) -> socket.socket:
    """A listening socket on one interface, at any free port. `prepare` sets what connections inherit."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    prepare(listener)
    listener.bind((interface, 0))
    listener.listen(128)
    listener.setblocking(False)
    return listener


async def accept(listener: socket.socket) -> socket.socket:
    """The next connection. A machine that is out of descriptors for a while, or a peer that has gone again, does not end the listening."""
    while True:
        try:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            return sock
        except OSError:
            if listener.fileno() < 0:
                raise
            await asyncio.sleep(_ACCEPT_PAUSE_S)


class Strangers:
    """Connections that have proved nothing yet. Of too many the oldest is ended: an agent proves the token at once, so what has waited
    longest is not one; and agents that come now find descriptors and memory left."""

    def __init__(self, most: int = STRANGERS_MAX) -> None:
        self._most = most
        self._serving: dict[asyncio.Task[Any] | None, None] = {}

    async def prove(self, stream: Stream, token: str) -> None:
        """Have the stream's peer prove that it knows the token. The task that serves it is cancelled if there are too many like it.

        Raises:
            PeerFault: it does not know it.
            TimeoutError: it took too long.
        """
        me = asyncio.current_task()
        self._serving[me] = None
        if len(self._serving) > self._most and (oldest := next(iter(self._serving))) is not None:
            oldest.cancel()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await stream.prove_as_server(token)
        finally:
            del self._serving[me]


async def connect(
    address: str, interface: str, token: str, prepare: Prepare = lambda sock: None, tls: PeerTls | None = None
) -> Stream:
    """Connect from one interface to `address`, and prove the token to each other, over TLS if it is given. `prepare` sets what must be
    set before.

    Raises:
        PeerFault: nobody is there, or no agent of this job.
    """
    host, port = address.rsplit(":", 1)
    stream = open_stream(socket.socket(socket.AF_INET, socket.SOCK_STREAM), tls, server=False)
    try:
        prepare(stream.sock)
        stream.sock.bind((interface, 0))
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await asyncio.get_running_loop().sock_connect(stream.sock, (host, int(port)))
            await stream.prove_as_client(token)
    except BaseException as broken:
        await stream.close()
        if isinstance(broken, OSError | PeerFault):  # TimeoutError is an OSError
            raise PeerFault(f"no connection to {address}: {str(broken) or 'no answer in time'}") from broken
        raise
    return stream


async def write_message(stream: Stream, data: bytes) -> None:
    """Send one message."""
    await stream.write(_LENGTH.pack(len(data)) + data)


async def read_message(stream: Stream) -> bytes:
    """Read one message.

    Raises:
        PeerFault: the peer is gone, or announced a message longer than any is.
    """
    (length,) = _LENGTH.unpack(await stream.read(_LENGTH.size))
    if length > _MESSAGE_BYTES_MAX:
        raise PeerFault(f"a message of {length} bytes was announced; at most {_MESSAGE_BYTES_MAX} are allowed")
    return await stream.read(length)
