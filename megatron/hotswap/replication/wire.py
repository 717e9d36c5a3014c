"""Connections between agents, whatever moves the bytes: listening, connecting with a proof of the job's token (tcp_stream.py), and
messages with their length before them."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable

from ..errors import PeerFault
from .tcp_stream import Stream

CONNECT_TIMEOUT_S = 5.0
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


async def connect(address: str, interface: str, token: str, prepare: Prepare = lambda sock: None) -> Stream:
    """Connect from one interface to `address`, and prove the token to each other. `prepare` sets what must be set before.

    Raises:
        PeerFault: nobody is there, or no agent of this job.
    """
    host, port = address.rsplit(":", 1)
    stream = Stream(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
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
