"""Noise at a listening H2H server, in clear and over TLS: from strangers, and from a peer that knows the token and has lost its mind.

What it costs is the connection. The same server, on the same loop, serves a real push after each; its memory does not grow, and it
is asked again and again in one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import socket
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_pair import CHUNK_BYTES, RUN, TOKEN, Pair, encrypted_tcp, in_side_processes, job_tls, on_a_loop, snapshot, soon

from megatron.hotswap.errors import PeerFault
from megatron.hotswap.replication import link, wire
from megatron.hotswap.replication.tcp import TcpTransport
from megatron.hotswap.replication.tcp_stream import Offer
from megatron.hotswap.security import authority, files
from megatron.hotswap.security.tls import PeerTls
from megatron.hotswap.snapshot.layout import Header

KINDS = pytest.mark.parametrize(("kind", "tls"), [(TcpTransport, lambda: None), (encrypted_tcp, job_tls)], ids=["in clear", "over TLS"])
EXAMPLES = settings(max_examples=40, deadline=None)
VERBS = (b"PUSH", b"FETC", b"JOIN", b"GOON", b"NOPE", b"\x00\x00\x00\x00")

pytestmark = pytest.mark.timeout(120)


def offer(payload_bytes=500_000, slot_bytes=600_000):
    return Offer(Header(RUN, 3, 7, bytes(32), 0, payload_bytes, 0), 0, -1, slot_bytes, CHUNK_BYTES, 1, False, bytes(16)).pack()


@st.composite
def talk(draw):
    """Verbs and frames, some of them right, with bytes changed."""
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        frame = draw(st.sampled_from([b"", bytes(16), os.urandom(64), offer(), offer(1 << 60, 1 << 61)]))
        body = bytearray(draw(st.sampled_from(VERBS)) + frame)
        for _ in range(draw(st.integers(0, 2))):
            body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
        parts.append(bytes(body[: draw(st.integers(1, len(body)))] if draw(st.booleans()) else body))
    return b"".join(parts)


class Served:
    """A pair whose holder listens through many examples."""

    def __init__(self, kind):
        self.loop = asyncio.new_event_loop()
        self.pair = Pair(kind)
        self.run(self.pair.__aenter__())
        self._generation = 100

    def run(self, work):
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    async def serves_others(self):
        self._generation += 1
        await self.pair.push(snapshot(rank=1, generation=self._generation, payload_bytes=70_000))
        assert self.pair.store.generations()[1][-1] == self._generation

    def close(self):
        self.run(self.pair.__aexit__())
        self.loop.close()


@pytest.fixture
def served(kind):
    server = Served(kind)
    yield server
    server.close()


@KINDS
def test_a_stranger_gets_nowhere(served, tls):
    async def scene(noise):
        host, port = served.pair.address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(OSError):
            writer.write(noise)
            writer.write_eof()
            assert len(await reader.read()) <= 4096  # a nonce, or an alert
        writer.close()
        await served.serves_others()
        assert set(served.pair.store.generations()) == {1}

    @EXAMPLES
    @given(st.one_of(st.binary(max_size=200), st.just(os.urandom(100_000)), talk()))
    def check(noise):
        served.run(scene(noise))

    check()


@KINDS
def test_a_peer_that_has_lost_its_mind_costs_its_connection(served, tls):
    async def scene(noise):
        with contextlib.suppress(PeerFault, OSError, TimeoutError):
            async with asyncio.timeout(5):
                stream = await wire.connect(served.pair.address, "127.0.0.1", TOKEN, tls=tls())
                try:
                    await stream.write(noise)
                    stream.sock.shutdown(socket.SHUT_WR)
                    while True:
                        await stream.read(1)
                finally:
                    await stream.close()
        await served.serves_others()
        assert served.pair.store.generations().get(3) is None

    @EXAMPLES
    @given(talk())
    def check(noise):
        served.run(scene(noise))

    served.run(served.serves_others())
    tracemalloc.start()
    try:
        check()
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20 and now < 8 << 20
    held = served.pair.holder._server
    served.run(soon(lambda: not held._receiving and not held._transfers))


@KINDS
@on_a_loop
async def test_of_too_many_strangers_the_oldest_go(kind, tls, monkeypatch):
    """A thousand connections that say nothing leave descriptors for those that do, and no agent waits for them."""
    async with Pair(kind) as pair:
        pair.holder._server._strangers = wire.Strangers(most=8)
        host, port = pair.address.rsplit(":", 1)
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(40)]
        await pair.push(snapshot())
        assert len(pair.holder._server._strangers._serving) <= 8
        oldest, _ = silent[0]
        assert len(await oldest.read()) <= 32  # the end
        for _, writer in silent:
            writer.close()


@on_a_loop
async def test_a_listener_that_is_out_of_descriptors_listens_on(monkeypatch):
    async with Pair(TcpTransport) as pair:
        real, failures = asyncio.get_running_loop().sock_accept, iter([OSError(24, "Too many open files")] * 3)

        async def accept(listener):
            for failure in failures:
                raise failure
            return await real(listener)

        monkeypatch.setattr(asyncio.get_running_loop(), "sock_accept", accept)
        await pair.push(snapshot(generation=6))  # the accept that was under way already
        await pair.push(snapshot(generation=7))
        assert pair.store.generations() == {3: (6, 7)}


@in_side_processes
@on_a_loop
async def test_a_peer_that_never_stops_talking_does_not_fill_this_ones_memory(kind):
    async with Pair(kind) as pair:
        stream = await wire.connect(pair.address, "127.0.0.1", TOKEN)
        kept = []
        with pytest.raises((PeerFault, OSError)):  # it hangs up
            for _ in range(10_000):
                await wire.write_message(stream, link._encode(link.Got()))
                await asyncio.sleep(0)
                kept += [serving._inbox.qsize() for serving in pair.holder._serving]
            while True:
                await stream.read(1)
        assert 0 < max(kept) <= link._UNHEARD_MAX + 1
        await stream.close()
        await pair.push(snapshot())
        assert pair.store.generations() == {3: (7,)}


# ---- encrypted: who is refused, in which words


async def refused(owner_kind, holder_kind):
    async with Pair(owner_kind) as owner, Pair(holder_kind) as holder:
        with pytest.raises(PeerFault) as failure:
            await owner.push(snapshot(), holder.address)
        await holder.push(snapshot(rank=1))  # others are served
        assert holder.store.generations() == {1: (7,)}
        return str(failure.value)


def kind_of(folder):
    tls = PeerTls(files.read(folder, "agent", RUN))
    return lambda token, interface: TcpTransport(token, interface, chunk_bytes=CHUNK_BYTES, tls=tls)


@on_a_loop
async def test_an_agent_of_another_job_is_refused(tmp_path):
    authority.issue(tmp_path, RUN)
    assert "its certificate is not of this job, but of another one" in await refused(kind_of(tmp_path), encrypted_tcp)


@on_a_loop
async def test_a_certificate_of_another_authority_is_refused(tmp_path, monkeypatch):
    """It believes the holder, but cannot show what the holder believes."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for folder in (mine, theirs):
        folder.mkdir()
        authority.issue(folder, RUN)
    holder = kind_of(theirs)
    (mine / files.FOLDER / files.AUTHORITY_FILE).write_bytes((theirs / files.FOLDER / files.AUTHORITY_FILE).read_bytes())
    assert "the certificate shown to it is not of this job" in await refused(kind_of(mine), holder)


@on_a_loop
async def test_a_certificate_that_has_expired_is_refused(tmp_path, monkeypatch):
    key = authority.ec.generate_private_key(authority.ec.SECP256R1())
    monkeypatch.setattr(authority.ec, "generate_private_key", lambda curve: key)  # the same authority signs both
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for folder, valid_for in ((mine, datetime.timedelta(seconds=-5)), (theirs, authority.VALID_FOR)):
        folder.mkdir()
        authority.issue(folder, RUN, valid_for)
    holder = kind_of(theirs)
    (mine / files.FOLDER / files.AUTHORITY_FILE).write_bytes((theirs / files.FOLDER / files.AUTHORITY_FILE).read_bytes())
    assert "the certificate shown to it has expired" in await refused(kind_of(mine), holder)


@on_a_loop
async def test_a_certificate_without_the_token_is_not_enough():
    async with Pair(encrypted_tcp, owner_token="guess") as stranger, Pair(encrypted_tcp) as pair:
        with pytest.raises(PeerFault, match="it does not accept this job's token"):
            await stranger.push(snapshot(), pair.address)
        assert pair.store.generations() == {}


@on_a_loop
async def test_who_encrypts_does_not_talk_to_who_does_not():
    words = "it does not speak TLS, so it is no part of this job, or was started without encryption"
    assert words in await refused(encrypted_tcp, TcpTransport)


@KINDS
@on_a_loop
async def test_what_a_listener_on_the_wire_can_read(kind, tls):
    """The token is never on the wire, and over TLS neither is a snapshot; in clear it is, which is why the flag exists."""
    heard = bytearray()

    async def relay(reader, writer):
        host, port = pair.address.rsplit(":", 1)
        there_reader, there_writer = await asyncio.open_connection(host, int(port))

        async def copy(source, to):
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    heard.extend(data)
                    to.write(data)
            to.close()

        await asyncio.gather(copy(reader, there_writer), copy(there_reader, writer))

    async with Pair(kind) as pair:
        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        slots, slot, header = snapshot()
        secret = bytes(slots.view(slot)[-64:])
        await pair.push((slots, slot, header), f"{host}:{port}")
        server.close()
        assert TOKEN.encode() not in heard
        assert (secret in heard) == (tls() is None)
