"""The control connection between two agents, which every transport shares: TCP, opened by a proof of the job's token.

Whoever accepts sends a nonce, whoever connects answers with its HMAC. Nothing that arrives is unpickled, and every length is
bounded before memory is taken for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import socket
import struct

from ..errors import PeerFault

NONCE_BYTES = 32
CONNECT_TIMEOUT_S = 5.0
#: A peer whose node is cut off answers no probe; its connection breaks this long after the last sign of it.
_SILENCE_IDLE_S, _PROBE_INTERVAL_S, _PROBES = 2, 1, 3
_LENGTH = struct.Struct("<I")
FRAME_BYTES_MAX = 1 << 18


def proof(token: str, nonce: bytes) -> bytes:
    """What shows that the token is known, without saying it."""
    return hmac.new(token.encode(), nonce, hashlib.sha256).digest()


class Stream:
    """A non-blocking socket on the running loop, reading and writing whole amounts."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (_SILENCE_IDLE_S + _PROBE_INTERVAL_S * _PROBES))
        self.sock = sock
        self._loop = asyncio.get_running_loop()

    async def write(self, data: bytes | memoryview) -> None:
        """Send all of it."""
        await self._loop.sock_sendall(self.sock, data)

    async def read_into(self, view: memoryview) -> None:
        """Fill the view.

        Raises:
            PeerFault: the peer closed the connection first.
        """
        while view:
            count = await self._loop.sock_recv_into(self.sock, view)
            if count == 0:
                raise PeerFault("the peer closed the connection in the middle of a transfer")
            view = view[count:]

    async def read(self, length: int) -> bytes:
        """Read exactly so many bytes."""
        buffer = bytearray(length)
        await self.read_into(memoryview(buffer))
        return bytes(buffer)

    async def write_frame(self, data: bytes) -> None:
        """Send one message with its length before it."""
        await self.write(_LENGTH.pack(len(data)) + data)

    async def read_frame(self) -> bytes:
        """Read one message.

        Raises:
            PeerFault: the peer is gone, or announced a message longer than any is.
        """
        (length,) = _LENGTH.unpack(await self.read(_LENGTH.size))
        if length > FRAME_BYTES_MAX:
            raise PeerFault(f"a message of {length} bytes was announced; at most {FRAME_BYTES_MAX} are allowed")
        return await self.read(length)

    def shutdown(self) -> None:
        """End both directions; whoever waits for the connection wakes up."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was not connected any more

    def close(self) -> None:
        """Give the descriptor back. Nobody may be waiting for it."""
        self.sock.close()


def listen(interface: str) -> socket.socket:
    """A listening socket on one interface, at any free port."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((interface, 0))
    listener.listen(128)
    listener.setblocking(False)
    return listener


async def connect(address: str, interface: str, token: str) -> Stream:
    """Connect from one interface to `address` and prove the token.

    Raises:
        PeerFault: nobody is there.
    """
    host, port = address.rsplit(":", 1)
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.bind((interface, 0))
        stream = Stream(sock)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
            await stream.write(proof(token, await stream.read(NONCE_BYTES)))
        return stream
    except BaseException as broken:
        sock.close()
        if isinstance(broken, OSError | TimeoutError):
            raise PeerFault(f"no connection to {address}: {broken}") from broken
        raise


async def admit(stream: Stream, token: str) -> bool:
    """Ask whoever connected for the proof; False for a stranger."""
    nonce = os.urandom(NONCE_BYTES)
    await stream.write(nonce)
    return hmac.compare_digest(await stream.read(NONCE_BYTES), proof(token, nonce))
