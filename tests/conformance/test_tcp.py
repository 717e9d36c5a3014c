"""What strangers can do to the TCP transport: noise, absurd lengths, and nothing else. Only here the frame is known."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct

import pytest
from transport_pair import PREAMBLE_BYTES, RUN, TOKEN, Pair, on_a_loop, snapshot, soon

from megatron.hotswap.errors import PeerFault
from megatron.hotswap.replication.tcp import TcpTransport, _proof
from megatron.hotswap.snapshot.layout import HEADER_BYTES, Header


async def tcp_client(address, token=TOKEN):
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(_proof(token, await reader.readexactly(32)))
    return reader, writer


@on_a_loop
async def test_a_stranger_is_cut_off_before_anything_is_read():
    async with Pair(TcpTransport) as pair:
        reader, writer = await tcp_client(pair.address, token="guess")
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("payload_bytes", [1 << 60, (1 << 64) - 1])
@on_a_loop
async def test_a_header_that_announces_an_absurd_length_costs_no_memory(payload_bytes):
    async with Pair(TcpTransport) as pair:
        reader, writer = await tcp_client(pair.address)
        header = Header(RUN, 3, 7, bytes(32), 0, payload_bytes, 0)
        writer.write(b"PUSH" + header.pack() + struct.pack("<Q", min(payload_bytes + HEADER_BYTES, (1 << 64) - 1)))
        answer = await reader.read()
        assert answer == b"" or answer.startswith(b"NOPE")
        assert pair.store._slots == {}
        writer.close()
        await pair.owner.push(pair.address, *snapshot())  # and others are served


@pytest.mark.parametrize("noise", [b"", b"QUIT", b"PUSH" + bytes(5000), os.urandom(9000)], ids=["hangs up", "verb", "zeros", "noise"])
@on_a_loop
async def test_nonsense_costs_its_connection_and_nothing_else(noise):
    async with Pair(TcpTransport) as pair:
        _, writer = await tcp_client(pair.address)
        with contextlib.suppress(OSError):
            writer.write(noise)
            await writer.drain()
        writer.close()
        await pair.owner.push(pair.address, *snapshot())
        assert pair.store.generations() == {3: (7,)}


@on_a_loop
async def test_an_answer_of_absurd_length_is_refused():
    """The other direction: a holder that is not one."""

    async def answer(reader, writer):
        writer.write(bytes(32))
        await reader.readexactly(PREAMBLE_BYTES)
        writer.write(b"NOPE" + struct.pack("<Q", 1 << 60))

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with Pair(TcpTransport) as pair:
        with pytest.raises(PeerFault, match="at most 4096 are allowed"):
            await pair.owner.push(f"{host}:{port}", *snapshot())
    server.close()


@on_a_loop
async def test_closing_leaves_no_socket_and_no_task():
    """Guarantee 8."""
    before = len([f for f in os.listdir("/proc/self/fd") if _is_socket(f)])
    async with Pair(TcpTransport) as pair:
        await pair.owner.push(pair.address, *snapshot())
        await pair.fetch()
    await soon(lambda: len([f for f in os.listdir("/proc/self/fd") if _is_socket(f)]) <= before)
    assert len(asyncio.all_tasks()) == 1


def _is_socket(fd):
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return False


@on_a_loop
async def test_it_listens_only_on_the_interface_it_was_given():
    """Recovery traffic must not take a network card that nobody chose."""
    async with Pair(TcpTransport) as pair:
        _, port = pair.address.rsplit(":", 1)
        assert pair.address.startswith("127.0.0.1:")
        with socket.socket() as other:
            other.settimeout(1.0)
            assert other.connect_ex(("127.0.0.2", int(port))) != 0
