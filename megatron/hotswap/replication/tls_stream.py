"""A connection between two agents over TLS 1.3: what tcp_stream.py does in clear, with the job's certificates shown on both sides first.

OpenSSL moves no bytes here: it turns plain ones into sealed ones in memory and back (ssl.MemoryBIO), without Python's lock, and the
socket stays an ordinary one, which the loop reads while frames are due and a thread while chunks are. The proof of the token follows
inside, so a certificate alone lets nobody in.
"""

from __future__ import annotations

import ctypes
import socket
import ssl

import deadpool_ext

from ..errors import PeerFault
from ..security.tls import PeerTls, in_words
from .tcp_stream import Pipe, Stream

#: Sealed and sent, or received and opened, at a time: small enough to stay in a core's cache between the steps (checksum, cipher,
#: copies), large enough that a system call and a turn of a Python loop (20 us) are a tenth of what the cipher takes.
_PIECE_BYTES = 512 << 10
#: A key of AES-GCM must not seal more than 2^24.5 records of 16 KiB (RFC 8446, section 5.5), and OpenSSL does not change it by itself.
#: Connections are made anew after a third of that, so the snapshot under way then still fits in.
_WORN_OUT_BYTES = 1 << 37


class TlsStream(Stream):
    """See the module docstring."""

    def __init__(self, sock: socket.socket, tls: PeerTls, *, server: bool) -> None:
        super().__init__(sock)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = tls.wrap(self._incoming, self._outgoing, server=server)
        self._moved_bytes = 0

    async def prove_as_client(self, token: str) -> None:
        await self._shake_hands()
        await super().prove_as_client(token)

    async def prove_as_server(self, token: str) -> None:
        await self._shake_hands()
        await super().prove_as_server(token)

    async def _shake_hands(self) -> None:
        try:
            while True:
                try:
                    self._tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    await self._flush()
                    if not await self._feed():
                        raise PeerFault("it closed the connection in the middle of the TLS handshake") from None
        except ssl.SSLError as failure:
            await self._flush()  # the alert that says why
            raise PeerFault(in_words(failure)) from failure
        await self._flush()

    async def write(self, data: bytes) -> None:
        self._require_no_thread()
        self._tls.write(data)
        await self._flush()

    async def _receive_into(self, view: memoryview) -> int:
        while True:
            try:
                return self._tls.read(len(view), view)
            except ssl.SSLWantReadError:
                if not await self._feed():
                    return 0
            except ssl.SSLZeroReturnError:
                return 0
            except ssl.SSLError as failure:
                raise PeerFault(in_words(failure)) from failure

    async def _flush(self) -> None:
        if sealed := self._outgoing.read():
            self._moved_bytes += len(sealed)
            await self._loop.sock_sendall(self.sock, sealed)

    async def _feed(self) -> bool:
        """Wait for bytes from the socket; False where the peer has closed."""
        sealed = await self._loop.sock_recv(self.sock, _PIECE_BYTES)
        self._incoming.write(sealed)
        return bool(sealed)

    def _pipe(self) -> Pipe:
        return _Sealed(self)

    @property
    def worn_out(self) -> bool:
        return self._moved_bytes > _WORN_OUT_BYTES

    def peer_is_there(self) -> bool:
        return not self._incoming.pending and not self._tls.pending() and super().peer_is_there()


class _Sealed(Pipe):
    """The thread's side of a TlsStream."""

    def __init__(self, stream: TlsStream) -> None:
        self._stream = stream
        self._sock, self._tls = stream.sock, stream._tls
        self._incoming, self._outgoing = stream._incoming, stream._outgoing
        self._buffer = memoryview(bytearray(_PIECE_BYTES))

    def send(self, address: int, length: int, head: bytes) -> None:
        self._send(address, length, head, summed=False)

    def send_summed(self, address: int, length: int, head: bytes) -> int:
        return self._send(address, length, head, summed=True)

    def _send(self, address: int, length: int, head: bytes, summed: bool) -> int:
        self._tls.write(head)
        data, crc = _memory(address, length), 0
        for begin in range(0, length, _PIECE_BYTES):
            piece = data[begin : begin + _PIECE_BYTES]
            if summed:
                crc = deadpool_ext.crc32c(address + begin, len(piece), crc)
            self._tls.write(piece)
            self._flush()
        self._flush()
        return crc

    def receive(self, address: int, length: int) -> int:
        data, done, summed, crc = _memory(address, length), 0, 0, 0
        while done < length:
            try:
                done += self._tls.read(length - done, data[done:])
                continue
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLZeroReturnError:
                raise ConnectionResetError(f"the peer closed the connection after {done} of {length} bytes") from None
            crc = deadpool_ext.crc32c(address + summed, done - summed, crc)
            summed = done
            count = self._sock.recv_into(self._buffer)
            if not count:
                raise ConnectionResetError(f"the peer closed the connection after {done} of {length} bytes")
            self._stream._moved_bytes += count
            self._incoming.write(self._buffer[:count])
        return deadpool_ext.crc32c(address + summed, done - summed, crc)

    def _flush(self) -> None:
        if sealed := self._outgoing.read():
            self._stream._moved_bytes += len(sealed)
            self._sock.sendall(sealed)


def _memory(address: int, length: int) -> memoryview:
    """Memory of a slot, which outlives the transfer."""
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B") if length else memoryview(b"")


def open_stream(sock: socket.socket, tls: PeerTls | None, *, server: bool) -> Stream:
    """A connection that is, or is about to be, connected: encrypted where there is something to encrypt it with."""
    return Stream(sock) if tls is None else TlsStream(sock, tls, server=server)
