"""snapshot/slots.py: memory that agent and worker share, and what may be read from it (guarantee 6)."""

import gc
import os
import resource

import pytest

from megatron.hotswap.errors import SnapshotMismatch, UsageError
from megatron.hotswap.snapshot.layout import HEADER_BYTES, Header
from megatron.hotswap.snapshot.slots import ControlBlock, Slots, Word, require_room, require_room_for_job

METADATA, PAYLOAD = b"iteration 7", bytes(range(256)) * 8
SLOT_BYTES = HEADER_BYTES + 4096 + len(PAYLOAD)


@pytest.fixture
def slots():
    made = Slots.create(SLOT_BYTES, 2)
    yield made
    made.close()


def fill(slots, slot, generation=7):
    view = slots.view(slot)
    view[HEADER_BYTES : HEADER_BYTES + len(METADATA)] = METADATA
    view[SLOT_BYTES - len(PAYLOAD) :] = PAYLOAD
    crc = slots.checksum(slot, len(METADATA), len(PAYLOAD))
    header = Header("run-1", 3, generation, bytes(32), len(METADATA), len(PAYLOAD), crc)
    slots.write_header(slot, header)
    return header


def test_what_was_written_is_verified(slots):
    header = fill(slots, 1)
    assert slots.verify(1) == header
    assert slots.header(1) == header


def test_the_other_slot_is_untouched(slots):
    fill(slots, 1)
    assert not any(slots.view(0))
    with pytest.raises(SnapshotMismatch, match="the slot is empty or not a slot"):
        slots.verify(0)


@pytest.mark.parametrize(
    "at", [HEADER_BYTES, HEADER_BYTES + len(METADATA) - 1, SLOT_BYTES - len(PAYLOAD), SLOT_BYTES - 1000, SLOT_BYTES - 1]
)
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_is_refused(slots, at, bit):
    fill(slots, 0)
    slots.view(0)[at] ^= 1 << bit
    with pytest.raises(SnapshotMismatch, match=r"rank 3, generation 7: the checksum is .* the content was damaged"):
        slots.verify(0)


def test_bytes_between_metadata_and_payload_mean_nothing(slots):
    """The room for metadata is larger than the metadata."""
    header = fill(slots, 0)
    slots.view(0)[HEADER_BYTES + len(METADATA) + 5] ^= 1
    assert slots.verify(0) == header


def test_an_invalid_slot_is_not_read(slots):
    fill(slots, 0)
    slots.invalidate(0)
    with pytest.raises(SnapshotMismatch, match="empty or not a slot"):
        slots.header(0)


def test_another_process_maps_the_same_bytes(slots):
    """What an agent hands to its worker is a descriptor."""
    header = fill(slots, 1)
    duplicate = os.dup(slots.fd)
    theirs = Slots(duplicate, SLOT_BYTES, 2)
    assert theirs.verify(1) == header
    theirs.view(1)[-1] ^= 1
    with pytest.raises(SnapshotMismatch):
        slots.verify(1)
    theirs.close()


def test_slots_leave_no_descriptor_behind():
    """Guarantee 8: made and closed again and again, no open file stays."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        Slots.create(SLOT_BYTES, 2).close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_slots_that_the_system_refuses_leave_no_descriptor():
    """The refusal is provoked by a limit on file sizes: asking for too much memory would have the kernel kill somebody."""
    gc.collect()  # what other tests have left to it is not counted
    before, limits = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SLOT_BYTES, limits[1]))
    try:
        with pytest.raises(UsageError, match=f"the system refuses {2 * SLOT_BYTES} bytes of shared memory for 2 snapshot slots"):
            Slots.create(SLOT_BYTES, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(os.listdir("/proc/self/fd")) == before


def test_words_of_the_control_block_are_apart():
    block = ControlBlock.create()
    for word in Word:
        block.set(word, 100 + word)
    block.bump(Word.PROGRESS)
    assert [block.get(w) for w in Word] == [100 + w + (w is Word.PROGRESS) for w in Word]
    other = ControlBlock(os.dup(block.fd))
    other.set(Word.COMMITTED, 5)
    assert block.get(Word.COMMITTED) == 5
    os.close(other.fd)
    os.close(block.fd)


def test_no_room_says_how_much_is_missing_and_where():
    with pytest.raises(UsageError) as refusal:
        require_room(5000, 3000, "node7")
    said = str(refusal.value)
    assert "node node7 needs 5000 bytes" in said and "has 3000 (--hot-swap-host-memory-max-bytes)" in said
    assert "2000 bytes are missing" in said and "raise the limit" in said


def test_no_room_in_the_machine_is_said_so():
    with pytest.raises(UsageError, match=r"\(available host memory\): \d+ bytes are missing"):
        require_room(1 << 60, None, "node7")


def test_enough_room_is_no_error():
    require_room(1 << 20, 1 << 20, "node7")
    require_room(1 << 20, None, "node7")


def test_a_job_is_refused_at_start_by_the_replicas_that_it_will_hold():
    """A node may hold more replicas than it has ranks: 2 ranks and 4 replicas are 12 slots."""
    require_room_for_job(1000, ranks=2, replicas=4, limit_bytes=12_000, node="node7")
    with pytest.raises(UsageError, match=r"2 slots of 1000 bytes for each of 2 rank\(s\), and 2 for each of 4 replica\(s\).*: 1 bytes"):
        require_room_for_job(1000, ranks=2, replicas=4, limit_bytes=11_999, node="node7")


@pytest.mark.parametrize(("metadata", "payload"), [(SLOT_BYTES, 0), (0, SLOT_BYTES), (2**63, 2**63)])
def test_lengths_that_no_slot_has_are_refused_before_they_are_read(slots, metadata, payload):
    """A whole header of a larger slot: reading as much as it says would run past the mapping."""
    slots.write_header(0, Header("run-1", 3, 7, bytes(32), metadata, payload, 0))
    with pytest.raises(SnapshotMismatch, match=f"a slot of {SLOT_BYTES} bytes cannot hold"):
        slots.verify(0)
