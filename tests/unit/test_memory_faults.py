"""Faults in a rank's own memory: each ends in a named error, and no tensor is touched (guarantee 6); and a slow holder.

The agent's part (header with checksum) is done here by hand; engine, slots and fence are the real ones.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from megatron.hotswap.agent import local
from megatron.hotswap.environment import WorkerEnvironment
from megatron.hotswap.errors import Halted, SnapshotMismatch
from megatron.hotswap.snapshot import engine as engine_module
from megatron.hotswap.snapshot.engine import SnapshotEngine, layout_of
from megatron.hotswap.snapshot.layout import _HEADER, HEADER_BYTES, Header
from megatron.hotswap.snapshot.slots import ControlBlock, Slots, Word
from megatron.hotswap.worker import session as session_module
from megatron.hotswap.worker.session import Session

ROOT = Path(__file__).resolve().parents[2]
RUN, RANK, GENERATION = "run-1", 3, 7
NOTHING = -1
METADATA = b"iteration 7, and the random states"
#: The header's fields and the offset of each (the struct's own, without padding).
FIELDS = dict(
    zip(
        ("magic", "format", "rank", "generation", "metadata_bytes", "payload_bytes", "crc32c", "run_id", "layout_hash", "own check"),
        (0, 8, 12, 16, 24, 32, 40, 44, 76, 108),
        strict=True,
    )
)


class Rank:
    """A rank whose generation 7 is in its slot, and whose live state has changed since."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tensors = [(f"t{i}", torch.randn(50 + i, generator=generator)) for i in range(3)]
        self.snapshot = [t.clone() for _, t in self.tensors]
        layout = layout_of(self.tensors, len(METADATA))
        self.slots = Slots.create(layout.slot_bytes, 2)
        self.engine = SnapshotEngine(layout, self.slots, ControlBlock.create(), RUN, RANK)
        self.slot = self.engine.begin(GENERATION, self.tensors, METADATA, keep=NOTHING)
        assert self.engine.complete() == (GENERATION,)
        crc = self.slots.checksum(self.slot, len(METADATA), layout.payload_bytes)
        self.header = Header(RUN, RANK, GENERATION, layout.hash, len(METADATA), layout.payload_bytes, crc)
        self.slots.write_header(self.slot, self.header)
        for _, tensor in self.tensors:
            tensor.fill_(-1.0)

    def flip(self, at: int) -> None:
        self.slots.view(self.slot)[at] ^= 0x10

    def refuses(self, says: str) -> None:
        """Whoever reads it is told why, and the live state is as it was."""
        with pytest.raises(SnapshotMismatch, match=says):
            self.engine.verified_metadata(GENERATION)
        assert all(bool((tensor == -1.0).all()) for _, tensor in self.tensors)


@pytest.fixture
def rank(monkeypatch):
    monkeypatch.setattr(engine_module, "_HEADER_WAIT_S", 0.02)
    made = Rank()
    yield made
    made.slots.close()


def test_what_is_whole_comes_back_in_equal_bits(rank):
    assert rank.engine.verified_metadata(GENERATION) == METADATA
    assert rank.engine.restore(GENERATION, rank.tensors) == sum(t.numel() * 4 for t in rank.snapshot)
    assert all(torch.equal(t, want) for (_, t), want in zip(rank.tensors, rank.snapshot, strict=True))


def test_the_fields_are_all_there_are():
    assert _HEADER.size == FIELDS["own check"]


@pytest.mark.parametrize("field", FIELDS)
def test_a_flipped_bit_in_a_header_field_is_refused(rank, field):
    rank.flip(FIELDS[field])
    rank.refuses("the slot is empty or not a slot" if field == "magic" else "the snapshot header is damaged")


@pytest.mark.parametrize("place", ["metadata", "payload", "last byte"])
def test_a_flipped_bit_in_the_content_is_refused(rank, place):
    payload_at = rank.slots.slot_bytes - rank.header.payload_bytes
    rank.flip({"metadata": HEADER_BYTES + 3, "payload": payload_at, "last byte": rank.slots.slot_bytes - 1}[place])
    rank.refuses("the content was damaged")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"run_id": "run-0"}, "run is 'run-0', asked for 'run-1'"),
        ({"rank": 4}, "rank is 4, asked for 3"),
        ({"generation": 5}, "generation is 5, asked for 7"),
        ({"layout_hash": bytes(32)}, "layout is '000000000000'"),
        ({"metadata_bytes": 1}, "the content was damaged"),
        ({"metadata_bytes": 1 << 40}, "cannot hold"),
        ({"payload_bytes": 64}, "the content was damaged"),
        ({"payload_bytes": 1 << 62}, "cannot hold"),
        ({"crc32c": 1}, "the content was damaged"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_whole_snapshot_of_something_else_is_refused(rank, changes, says):
    """A stale slot of another run, another rank's, an older one: intact, but not what was asked for."""
    rank.slots.write_header(rank.slot, dataclasses.replace(rank.header, **changes))
    rank.refuses(says)


def test_a_copy_that_has_begun_makes_the_older_snapshot_of_its_slot_unreadable(rank):
    """And what the slot then holds has no header until the agent has checked it: half a copy is never read."""
    rank.engine.begin(GENERATION + 1, rank.tensors, METADATA, keep=GENERATION)
    assert rank.engine.verified_metadata(GENERATION) == METADATA
    assert rank.engine.begin(GENERATION + 2, rank.tensors, METADATA, keep=GENERATION + 1) == rank.slot
    assert rank.engine.complete() == (GENERATION + 1, GENERATION + 2)
    rank.refuses("has no snapshot of generation 7; it has")
    for generation in (GENERATION + 1, GENERATION + 2):
        with pytest.raises(SnapshotMismatch, match="the slot is empty"):
            rank.engine.verified_metadata(generation)


@pytest.mark.parametrize("limit", ["RLIMIT_FSIZE", "RLIMIT_AS"])
def test_memory_that_the_system_refuses_is_a_named_error_in_either_place(limit):
    """In a process of its own, with limits that really refuse: of file sizes, and of the address space. (Not a full /dev/shm:
    slots are memory without a file system, so its size does not bound them.) The replicas that are there stay whole."""
    program = f"""
import resource
from megatron.hotswap.errors import UsageError
from megatron.hotswap.replication.transfer import ReplicaStore
from megatron.hotswap.snapshot.layout import Header
from megatron.hotswap.snapshot.slots import Slots

store = ReplicaStore("run-1", lambda wanted: None)
small = Header("run-1", 0, 6, bytes(32), 0, 64, 0)
slots, slot = store.reserve(small, 8192)
slots.view(slot)[-64:] = bytes(range(64))
crc = slots.checksum(slot, 0, 64)
small = Header("run-1", 0, 6, bytes(32), 0, 64, crc)
store.complete(small, slot)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
bound = 1 << 20 if "{limit}" == "RLIMIT_FSIZE" else used + (64 << 20)
resource.setrlimit(resource.{limit}, (bound, bound))
for take in (lambda: Slots.create(64 << 20, 2), lambda: store.reserve(Header("run-1", 1, 6, bytes(32), 0, 64, 0), 64 << 20)):
    try:
        take()
    except UsageError as refused:
        print(refused)
assert store.generations() == {{0: (6,)}}
assert slots.verify(slot) == small and bytes(slots.view(slot)[-64:]) == bytes(range(64))
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 2 and all("the system refuses 134217728 bytes of shared memory for 2 snapshot slots" in line for line in lines)


# ---- a slow holder


@pytest.fixture
def session(monkeypatch):
    """A worker's session over a real link; the test is its agent."""
    ours, theirs = local.pair()
    control = ControlBlock.create()
    place = WorkerEnvironment(
        run_id=RUN,
        incarnation="node0-1",
        node="node0",
        worker=0,
        workers=1,
        link_fd=theirs.detach(),
        control_fd=control.fd,
        address="127.0.0.1",
        agent_pid=os.getpid(),
        tmp="/tmp",
    )
    # At the end the link closes, and a worker whose agent is gone ends its process: here only its thread ends.
    monkeypatch.setattr(session_module, "end_process", lambda code, reason: None)
    made = Session(place)
    made.rank, made.version = RANK, 1
    yield made
    ours.close()
    made._monitor.join(5.0)
    made.link.sock.close()
    os.close(control.fd)


def later(delay_s: float, call, *args) -> threading.Timer:
    timer = threading.Timer(delay_s, call, args)
    timer.start()
    return timer


def test_a_slow_holder_stalls_the_fence_and_the_stall_is_counted(session):
    session.control.set(Word.COPIED, GENERATION + 1)
    answered = []

    def acknowledge():
        answered.append(time.perf_counter())
        session.control.set(Word.ACKNOWLEDGED, GENERATION + 1)

    later(0.2, acknowledge)
    began = time.perf_counter()
    session.fence(GENERATION, acknowledged=True)
    ended = time.perf_counter()
    assert session.control.get(Word.ACKNOWLEDGED) == GENERATION + 1
    assert answered[0] - began - 0.01 < session.exposed_stall_s <= ended - began


def test_a_slow_holder_does_not_stall_steps_that_complete_no_snapshot(session):
    """With a snapshot every N steps, the acknowledgement is due before the next one only."""
    session.control.set(Word.COPIED, GENERATION + 1)
    session.fence(GENERATION, acknowledged=False)
    assert session.control.get(Word.ACKNOWLEDGED) == 0


def test_an_older_acknowledgement_does_not_open_the_fence(session):
    session.control.set(Word.COPIED, GENERATION + 1)
    session.control.set(Word.ACKNOWLEDGED, GENERATION)
    later(0.05, session.control.set, Word.OVER_VERSION, 1)
    with pytest.raises(Halted):
        session.fence(GENERATION, acknowledged=True)


@pytest.mark.parametrize(
    "wait", [lambda s: s.fence(GENERATION, acknowledged=True), lambda s: s.await_commit(GENERATION)], ids=["fence", "await_commit"]
)
def test_a_holder_that_never_answers_does_not_hold_a_halt_up(session, wait):
    """It is given up by its lease; then the membership is over, and whoever waits for it is out at once."""
    timer = later(0.1, session.control.set, Word.OVER_VERSION, 1)
    began = time.monotonic()
    with pytest.raises(Halted, match="membership 1 is over"):
        wait(session)
    assert 0.09 < time.monotonic() - began < 5.0
    timer.join()
