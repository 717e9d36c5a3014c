"""snapshot/engine.py: the copy into a slot, what it says of its progress, and the agent that sends it on behind the copy."""

import asyncio
import os
from types import SimpleNamespace

import pytest
import torch

import deadpool_ext
from megatron.hotswap.agent import own_snapshot
from megatron.hotswap.errors import UsageError
from megatron.hotswap.replication.chunks import CHUNK_BYTES
from megatron.hotswap.snapshot import engine as engine_module
from megatron.hotswap.snapshot import slots as slots_module
from megatron.hotswap.snapshot.engine import SnapshotEngine, layout_of
from megatron.hotswap.snapshot.layout import HEADER_BYTES
from megatron.hotswap.snapshot.slots import OWN_SLOTS, ControlBlock, Slots, Word

METADATA = b"iteration 7"


class Rank:
    """A worker's engine and what its agent has of it. The last tensor ends within an alignment, so that padding follows it."""

    def __init__(self):
        self.tensors = [("empty", torch.empty(0)), ("a", torch.randn(3_000_001)), ("b", torch.randn(5)), ("c", torch.randn(1_000_003))]
        layout = layout_of(self.tensors, len(METADATA))
        self.control = ControlBlock.create()
        self.slots = Slots.create(layout.slot_bytes, OWN_SLOTS)
        self.engine = SnapshotEngine(layout, self.slots, self.control, "run-1", 3)
        self.rank, self.layout_hash, self.metadata_room_bytes = 3, layout.hash, layout.metadata_room_bytes

    def on_its_way(self, generation):
        return own_snapshot.on_its_way(self, "run-1", generation, 0, -1)

    @property
    def generations(self):
        return self.engine._generations

    def slot_of(self, generation):
        return self.engine._slot_of(generation)


@pytest.fixture
def rank():
    made = Rank()
    yield made
    made.engine.close()
    os.close(made.control.fd)
    made.slots.close()


def test_a_slot_is_named_after_its_new_generation_before_a_byte_of_it_changes(rank, monkeypatch):
    """Guarantee 2: whoever dies in between must not leave a slot that passes for what was in it."""
    named = []
    monkeypatch.setattr(rank.slots, "invalidate", lambda slot: named.append(rank.control.get(Word.GENERATION_0 + slot)))
    for generation in (6, 7, 8):
        rank.engine.begin(generation, rank.tensors, METADATA, keep=generation - 1)
    assert named == [7, 8, 9]
    rank.engine.complete()


def test_the_progress_of_a_copy_ends_where_its_last_tensor_does(rank):
    layout = rank.engine.layout
    rank.control.set(Word.COPIED_BYTES_0, 5)  # of the generation that was in the slot before
    rank.engine.begin(7, rank.tensors, METADATA, keep=-1)
    assert rank.engine.complete() == (7,)
    last = layout.tensors[-1]
    assert rank.control.get(Word.COPIED_BYTES_0) == last.offset + last.length_bytes < layout.payload_bytes
    assert rank.control.get(Word.COPIED_BYTES_1) == 0
    assert rank.control.get(Word.COPIED) == 8


def test_progress_that_was_said_is_in_the_slot(rank):
    """What lies before the word is final, whenever it is read."""
    expected = torch.cat([t.view(torch.uint8) for _, t in rank.tensors[1:2]]).numpy()
    rank.engine.begin(7, rank.tensors, METADATA, keep=-1)
    payload = rank.slots.view(0)[rank.slots.slot_bytes - rank.engine.layout.payload_bytes :]
    while rank.control.get(Word.COPIED) < 8:
        upto = min(rank.control.get(Word.COPIED_BYTES_0), len(expected))
        assert payload[max(0, upto - 4096) : upto] == expected[max(0, upto - 4096) : upto].data
    rank.engine.complete()


def test_an_agent_takes_chunks_behind_the_copy_and_seals_the_slot(rank):
    async def send_on():
        rank.engine.begin(7, rank.tensors, METADATA, keep=-1)
        outgoing = rank.on_its_way(7)
        assert outgoing.promised is None
        offset, length, _ = await outgoing.chunk(0)
        assert bytes(rank.slots.view(0)[offset : offset + length]) == METADATA
        await own_snapshot.seal(rank, outgoing)
        return await outgoing.header()

    header = asyncio.run(send_on())
    assert rank.slots.verify(0) == header
    assert rank.engine.verified_metadata(7) == METADATA
    again = rank.on_its_way(7)
    assert again.promised == header and len(again.chunks) == 1 - (-header.payload_bytes // CHUNK_BYTES)
    assert asyncio.run(again.header()) == header


def test_a_new_copy_into_the_slot_takes_the_old_header_and_progress_away(rank):
    rank.engine.begin(7, rank.tensors, METADATA, keep=-1)
    rank.engine.complete()
    asyncio.run(own_snapshot.seal(rank, rank.on_its_way(7)))
    rank.engine.begin(8, rank.tensors, METADATA, keep=7)
    rank.engine.begin(9, rank.tensors, METADATA, keep=8)
    assert rank.slot_of(9) == 0
    outgoing = rank.on_its_way(9)
    assert outgoing.promised is None and outgoing.generation == 9
    rank.engine.complete()


def test_huge_pages_are_asked_for_where_the_system_has_them(monkeypatch):
    """The other way to make pages present; contents and refusals are the same."""
    monkeypatch.setattr(slots_module, "_huge_pages_for_shared_memory", lambda: True)
    made = Slots.create(HEADER_BYTES + 8192, 2)
    assert not any(made.view(1))
    made.close()
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(deadpool_ext, "prefault", _no_memory)
    with pytest.raises(UsageError, match="Shared memory is full"):
        Slots.create(HEADER_BYTES + 8192, 2)
    assert len(os.listdir("/proc/self/fd")) == before


def _no_memory(address, length):
    raise RuntimeError("Shared memory is full")


class DeviceTensor:
    """As much of a CUDA tensor as the engine looks at: there is no GPU in these tests (tests/gpu has the real one)."""

    is_cuda = True
    device = SimpleNamespace(index=1)


@pytest.fixture
def cuda_calls(monkeypatch, rank):
    calls = []
    queue = SimpleNamespace(close=lambda timeout_s: True)
    monkeypatch.setattr(deadpool_ext, "host_register", lambda *call: calls.append(("register", *call)))
    monkeypatch.setattr(deadpool_ext, "host_unregister", lambda *call: calls.append(("unregister", *call)))
    monkeypatch.setattr(deadpool_ext, "CopyQueue", lambda device: queue)
    monkeypatch.setattr(engine_module.torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=5))
    return calls


def test_slots_are_page_locked_once_and_let_go_at_the_end(cuda_calls, rank):
    for _ in range(3):
        assert rank.engine._queue_for([("x", DeviceTensor())])[1] == 5
    base, length = rank.slots.address(0), rank.slots.slot_bytes * OWN_SLOTS
    assert cuda_calls == [("register", base, length, 1)]
    rank.engine.close()
    rank.engine.close()
    assert cuda_calls[1:] == [("unregister", base, 1)]


def test_slots_that_cannot_be_page_locked_are_an_error_in_words(cuda_calls, rank, monkeypatch):
    def refuse(*call):
        raise RuntimeError("cudaHostRegister: cudaErrorMemoryAllocation.")

    monkeypatch.setattr(deadpool_ext, "host_register", refuse)
    with pytest.raises(UsageError, match=r"rank 3: the \d+ bytes .* could not be page-locked for CUDA device 1.*ulimit -l"):
        rank.engine._queue_for([("x", DeviceTensor())])
