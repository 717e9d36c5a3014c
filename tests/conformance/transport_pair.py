"""An owner and a holder of snapshots, on any Transport, for the conformance suite."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from memory_transport import MemoryTransport

from megatron.hotswap.errors import PeerFault
from megatron.hotswap.replication import mpi, nixl
from megatron.hotswap.replication.mpi import MpiTransport
from megatron.hotswap.replication.nixl import NixlTransport
from megatron.hotswap.replication.outgoing import Outgoing
from megatron.hotswap.replication.side_nixl import DISTRIBUTIONS
from megatron.hotswap.replication.tcp import TcpTransport
from megatron.hotswap.replication.transfer import ReplicaStore
from megatron.hotswap.security import authority, files
from megatron.hotswap.security.tls import PeerTls
from megatron.hotswap.snapshot.layout import HEADER_BYTES, Header
from megatron.hotswap.snapshot.slots import Slots

RUN, TOKEN = "run-1", "token"
METADATA_ROOM, PAYLOAD_BYTES = 4096, 1 << 20
SLOT_BYTES = HEADER_BYTES + METADATA_ROOM + PAYLOAD_BYTES
METADATA_BYTES = 1000
#: Small, so that a snapshot has one chunk of metadata and 16 of payload.
CHUNK_BYTES = 64 << 10



@functools.cache
def job_tls():
    """What the agents of one job show each other."""
    with tempfile.TemporaryDirectory() as run_dir:
        authority.issue(Path(run_dir), RUN)
        return PeerTls(files.read(Path(run_dir), "agent", RUN))


def encrypted_tcp(token, interface):
    """TcpTransport as --hot-swap-encrypt makes it."""
    return TcpTransport(token, interface, chunk_bytes=CHUNK_BYTES, tls=job_tls())


TRANSPORTS = {"tcp": functools.partial(TcpTransport, chunk_bytes=CHUNK_BYTES), "tcp-1-stream": functools.partial(TcpTransport, streams=1)}
ENCRYPTED = {"tcp-encrypted": encrypted_tcp}
NETWORKED = dict(TRANSPORTS)
TRANSPORTS["memory"] = MemoryTransport
#: Those whose library lives in side processes, with the reason where it cannot be had here.
SIDE = {"mpi": MpiTransport, "nixl": NixlTransport}
MISSING = {
    "mpi": None if find_spec("mpi4py") else f"mpi4py is not installed: {mpi.INSTALL}",
    "nixl": None if any(find_spec(name) for name in DISTRIBUTIONS) else f"NIXL (241 MB) is not installed: {nixl.INSTALL}",
}


def on_a_loop(test):
    """Run an async test, at most 120 s: a test with side processes starts several on a machine that may be busy."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 120.0))

    return run


def snapshot(rank=3, generation=7, run=RUN, seed=0, payload_bytes=PAYLOAD_BYTES):
    """Own slots with one snapshot of random bytes, as an agent has them before it pushes."""
    slot_bytes = SLOT_BYTES - PAYLOAD_BYTES + payload_bytes
    slots = Slots.create(slot_bytes, 2)
    slot = generation % 2
    view = slots.view(slot)
    view[HEADER_BYTES : HEADER_BYTES + METADATA_BYTES] = os.urandom(METADATA_BYTES)
    view[slot_bytes - payload_bytes :] = os.urandom(payload_bytes)
    crc = slots.checksum(slot, METADATA_BYTES, payload_bytes)
    header = Header(run, rank, generation, bytes([seed] * 32), METADATA_BYTES, payload_bytes, crc)
    slots.write_header(slot, header)
    return slots, slot, header


def outgoing(part, **options):
    """A complete snapshot on its way out."""
    return Outgoing.of_slot(*part, chunk_bytes=CHUNK_BYTES, **options)


class Copy:
    """The same bytes, as if a device were still copying them: `place` says how much of the payload is there."""

    def __init__(self, part, version=0):
        slots, slot, header = part
        self.header, self._bytes = header, bytes(slots.view(slot)[SLOT_BYTES - PAYLOAD_BYTES :])
        self._view = slots.view(slot)
        self._view[SLOT_BYTES - PAYLOAD_BYTES :] = bytes(PAYLOAD_BYTES)
        slots.invalidate(slot)
        self._placed = 0
        self.outgoing = Outgoing.of_copy(
            slots,
            slot,
            lambda: self._placed,
            run_id=header.run_id,
            rank=header.rank,
            generation=header.generation,
            layout_hash=header.layout_hash,
            metadata_bytes=header.metadata_bytes,
            payload_bytes=header.payload_bytes,
            version=version,
            chunk_bytes=CHUNK_BYTES,
        )

    def place(self, upto):
        begin = SLOT_BYTES - PAYLOAD_BYTES
        self._view[begin + self._placed : begin + upto] = self._bytes[self._placed : upto]
        self._placed = upto

    def complete(self):
        """All of it at once."""
        self.place(PAYLOAD_BYTES)
        return self.outgoing


def content(slots, slot, header):
    view = slots.view(slot)
    return bytes(view[HEADER_BYTES : HEADER_BYTES + header.metadata_bytes]), bytes(view[slots.slot_bytes - header.payload_bytes :])


class Pair:
    """An owner and a holder."""

    def __init__(self, kind, owner_token=TOKEN):
        self.owner, self.holder = kind(owner_token, "127.0.0.1"), kind(TOKEN, "127.0.0.1")
        self.store = ReplicaStore(RUN, lambda wanted: None)
        self.address = ""

    async def __aenter__(self):
        await self.owner.serve(ReplicaStore(RUN, lambda wanted: None))
        self.address = await self.holder.serve(self.store)
        return self

    async def __aexit__(self, *error):
        await self.owner.close()
        await self.holder.close()

    async def push(self, part, address=None, **options):
        return await self.owner.push(address or self.address, outgoing(part, **options))

    async def fetch(self, rank=3, generation=7, run=RUN, address=None):
        into = Slots.create(SLOT_BYTES, 2)
        return await self.owner.fetch(address or self.address, run, rank, generation, lambda header, size: (into, header.generation % 2))


async def soon(condition, within_s=30.0):
    """Wait for what happens on the other side."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.005)


async def push_as_agents_do(pair, part):
    """Once more after a fault: a holder that has refused may have closed the connection."""
    with contextlib.suppress(PeerFault):
        await pair.push(part)
        return
    await pair.push(part)


def _params(kinds):
    return [
        pytest.param(kind, id=name, marks=pytest.mark.skipif(bool(MISSING.get(name)), reason=str(MISSING.get(name))))
        for name, kind in kinds.items()
    ]


every = pytest.mark.parametrize("kind", _params(TRANSPORTS | ENCRYPTED | SIDE))
in_side_processes = pytest.mark.parametrize("kind", _params(SIDE))
networked = pytest.mark.parametrize("kind", NETWORKED.values(), ids=NETWORKED.keys())
