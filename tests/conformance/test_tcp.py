"""What strangers can do to the TCP transport: noise, absurd lengths, and nothing else. Only here the frame is known."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct

import numpy as np
import pytest
from transport_pair import CHUNK_BYTES, RUN, TOKEN, Pair, content, on_a_loop, outgoing, snapshot, soon

import deadpool_ext
from megatron.hotswap.errors import PeerFault
from megatron.hotswap.replication.tcp import TcpTransport
from megatron.hotswap.replication.tcp_stream import STREAMS_MAX, Offer, Stream, _proof, sealed
from megatron.hotswap.snapshot.layout import HEADER_BYTES, Header


async def tcp_client(address, token=TOKEN):
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    theirs, mine = await reader.readexactly(32), bytes(32)
    writer.write(mine + _proof(token, b"client", theirs, mine))
    if token == TOKEN:
        assert await reader.readexactly(32) == _proof(token, b"server", theirs, mine)
    return reader, writer


@contextlib.asynccontextmanager
async def impostor(answer):
    """A server that is no holder; yields its address."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        server.close()


def offer(header, slot_bytes, chunk_bytes=CHUNK_BYTES, streams=1):
    return b"PUSH" + Offer(header, 0, slot_bytes, chunk_bytes, streams, False, bytes(16)).pack()


@on_a_loop
async def test_a_stranger_is_cut_off_before_anything_is_read():
    async with Pair(TcpTransport) as pair:
        reader, writer = await tcp_client(pair.address, token="guess")
        assert await reader.read() == b""
        writer.close()


@on_a_loop
async def test_who_asks_for_the_proof_must_give_it_too():
    """Else whoever takes over a holder's address gets the snapshots."""
    heard = []

    async def answer(reader, writer):
        writer.write(bytes(32))
        heard.append(await reader.readexactly(64))
        writer.write(heard[0][32:])  # the client's own proof, sent back
        heard.append(await reader.read())
        writer.close()

    async with impostor(answer) as address, Pair(TcpTransport) as pair:
        with pytest.raises(PeerFault, match="does not know this job's token"):
            await pair.push(snapshot(), address)
        await soon(lambda: b"" in heard)
        assert not any(len(said) > 64 for said in heard)


@pytest.mark.parametrize(
    ("payload_bytes", "slot_bytes", "chunk_bytes", "streams"),
    [
        (1 << 60, (1 << 60) + HEADER_BYTES, CHUNK_BYTES, 1),
        ((1 << 64) - 1, (1 << 64) - 1, CHUNK_BYTES, 1),
        (1 << 20, 1 << 20, CHUNK_BYTES, 1),
        (1 << 20, 1 << 21, 1, 1),
        (1 << 20, 1 << 21, (1 << 32) - 1, 1),
        (1 << 20, 1 << 21, CHUNK_BYTES, 0),
        (1 << 20, 1 << 21, CHUNK_BYTES, STREAMS_MAX + 1),
    ],
    ids=str,
)
@on_a_loop
async def test_an_offer_of_absurd_numbers_costs_no_memory(payload_bytes, slot_bytes, chunk_bytes, streams):
    async with Pair(TcpTransport) as pair:
        reader, writer = await tcp_client(pair.address)
        writer.write(offer(Header(RUN, 3, 7, bytes(32), 0, payload_bytes, 0), slot_bytes, chunk_bytes, streams))
        assert (await reader.readexactly(4)) == b"NOPE"
        assert pair.store._slots == {}
        writer.close()
        await pair.push(snapshot())  # and others are served


@pytest.mark.parametrize(
    ("index", "length", "says"),
    [
        (17, 100, b"none such"),
        (1 << 40, 100, b"none such"),
        (0, 101, b"none such"),
        (0, (1 << 32) - 1, b"none such"),
        (1, 100, b"came twice"),
    ],
    ids=str,
)
@on_a_loop
async def test_a_chunk_that_the_snapshot_does_not_have_is_written_nowhere(index, length, says):
    async with Pair(TcpTransport) as pair:
        reader, writer = await tcp_client(pair.address)
        writer.write(offer(Header(RUN, 3, 7, bytes(32), 0, 500_000, 0), 600_000))
        assert (await reader.readexactly(4)) == b"GOON"
        await reader.readexactly(16 + 4)
        _, stream = await tcp_client(pair.address)
        chunk = bytes(CHUNK_BYTES)
        good = sealed(struct.pack("<QII", 1, CHUNK_BYTES, 0)) + chunk
        bad_length = CHUNK_BYTES if index == 1 else length
        stream.write(b"JOIN" + bytes(16) + good + sealed(struct.pack("<QII", index, bad_length, crc(chunk))) + bytes(100))
        said = await reader.readexactly(4 + 16)
        assert said.startswith(b"NOPE")
        assert says in await reader.readexactly(int.from_bytes(said[-4:], "little"))
        assert pair.store.generations() == {}
        for each in (stream, writer):
            each.close()


def crc(data):
    return deadpool_ext.crc32c(np.frombuffer(data, dtype=np.uint8).ctypes.data, len(data))


@on_a_loop
async def test_a_stream_that_joins_nothing_is_cut_off():
    async with Pair(TcpTransport) as pair:
        reader, writer = await tcp_client(pair.address)
        writer.write(b"JOIN" + os.urandom(16))
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("noise", [b"", b"QUIT", b"PUSH" + bytes(5000), os.urandom(9000)], ids=["hangs up", "verb", "zeros", "noise"])
@on_a_loop
async def test_nonsense_costs_its_connection_and_nothing_else(noise):
    async with Pair(TcpTransport) as pair:
        _, writer = await tcp_client(pair.address)
        with contextlib.suppress(OSError):
            writer.write(noise)
            await writer.drain()
        writer.close()
        await pair.push(snapshot())
        assert pair.store.generations() == {3: (7,)}


@on_a_loop
async def test_an_answer_of_absurd_length_is_refused():
    """The other direction: an agent that has lost its mind."""

    async def answer(reader, writer):
        mine = bytes(32)
        writer.write(mine)
        said = await reader.readexactly(64)
        writer.write(_proof(TOKEN, b"server", mine, said[:32]))
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readexactly(4 + Offer.BYTES)
            writer.write(b"NOPE" + struct.pack("<QII", 0, 0, 1 << 31))
            await reader.read()
        writer.close()

    async with impostor(answer) as address, Pair(TcpTransport) as pair:
        with pytest.raises(PeerFault, match="at most 4096 are allowed"):
            await pair.push(snapshot(), address)


@on_a_loop
async def test_chunks_that_were_summed_for_one_holder_are_not_summed_for_the_next(monkeypatch):
    summed = []
    real = deadpool_ext.send_summed

    def counting(fd, address, length, head):
        summed.append(address)
        return real(fd, address, length, head)

    monkeypatch.setattr(deadpool_ext, "send_summed", counting)
    async with Pair(TcpTransport) as pair, Pair(TcpTransport) as other:
        part = snapshot()
        out = outgoing(part)
        for p in (pair, other):
            await pair.owner.push(p.address, out)
        assert len(summed) == len(set(summed)) == len(out.chunks) == 17
        assert content(*await other.fetch()) == content(*part)


@on_a_loop
async def test_the_connections_of_a_push_serve_the_next_one(monkeypatch):
    opened = []
    real = Stream.prove_as_client

    async def counting(self, token):
        opened.append(self)
        await real(self, token)

    monkeypatch.setattr(Stream, "prove_as_client", counting)
    async with Pair(TcpTransport) as pair:
        for generation in range(5, 9):
            await pair.push(snapshot(generation=generation))
        assert len(opened) == 1 + pair.owner._streams


@on_a_loop
async def test_closing_leaves_no_socket_and_no_task():
    """Guarantee 8."""
    before = len([f for f in os.listdir("/proc/self/fd") if _is_socket(f)])
    async with Pair(TcpTransport) as pair:
        await pair.push(snapshot())
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
