"""snapshot/layout.py: a layout means the same everywhere, and a header that is not the one asked for is refused (guarantee 6)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.hotswap.errors import SnapshotMismatch
from megatron.hotswap.snapshot.layout import ALIGNMENT_BYTES, HEADER_BYTES, Header, plan_layout

USED_BYTES = 8 + 4 + 4 + 8 + 8 + 8 + 4 + 32 + 32 + 4  # of the header; zeros follow

u64 = st.integers(0, 2**64 - 1)
headers = st.builds(
    Header,
    run_id=st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=32),
    rank=st.integers(0, 2**32 - 1),
    generation=u64,
    layout_hash=st.binary(min_size=32, max_size=32),
    metadata_bytes=u64,
    payload_bytes=u64,
    crc32c=st.integers(0, 2**32 - 1),
)
HEADER = Header("run-1", 3, 17, bytes(range(32)), 100, 2000, 0xDEADBEEF)


@settings(deadline=None)
@given(headers)
def test_a_header_survives_the_round_trip(header):
    raw = header.pack()
    assert len(raw) == HEADER_BYTES
    assert Header.unpack(raw) == header


@pytest.mark.parametrize("at", range(USED_BYTES))
def test_every_damaged_byte_of_the_header_is_noticed(at):
    for flip in (0x01, 0x80, 0xFF):
        raw = bytearray(HEADER.pack())
        raw[at] ^= flip
        with pytest.raises(SnapshotMismatch):
            Header.unpack(bytes(raw))


def test_what_follows_the_header_is_zeros():
    assert not any(HEADER.pack()[USED_BYTES:])


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_noise_is_refused_and_never_crashes(noise):
    with pytest.raises(SnapshotMismatch):
        Header.unpack(noise)


@settings(deadline=None)
@given(st.binary(min_size=8 + USED_BYTES, max_size=400))
def test_noise_behind_the_magic_is_refused(noise):
    with pytest.raises(SnapshotMismatch):
        Header.unpack(b"DEADPOOL" + noise)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"run_id": "run-2"}, "run is 'run-1', asked for 'run-2'"),
        ({"rank": 4}, "rank is 3, asked for 4"),
        ({"generation": 16}, "generation is 17, asked for 16"),
        ({"layout_hash": bytes(32)}, "layout is '000102030405', asked for '000000000000'"),
    ],
)
def test_another_snapshot_is_refused_by_name(asked, says):
    right = {"run_id": "run-1", "rank": 3, "generation": 17, "layout_hash": bytes(range(32))}
    HEADER.require(**right)
    with pytest.raises(SnapshotMismatch, match=says):
        HEADER.require(**{**right, **asked})


def test_all_that_differs_is_named_at_once():
    with pytest.raises(SnapshotMismatch, match=r"run is .*; rank is .*; generation is "):
        HEADER.require(run_id="x", rank=0, generation=0)


def test_a_run_id_that_does_not_fit_is_our_own_bug():
    with pytest.raises(ValueError, match="at most 32 bytes, got 33"):
        Header("x" * 33, 0, 0, bytes(32), 0, 0, 0).pack()


tensors = st.lists(
    st.tuples(st.sampled_from(["torch.float32", "torch.int8"]), st.lists(st.integers(0, 9), max_size=3).map(tuple), st.integers(0, 500)),
    max_size=8,
).map(lambda parts: [(f"t{i}", *part) for i, part in enumerate(parts)])


@settings(deadline=None)
@given(tensors, st.integers(0, 20_000))
def test_tensors_lie_aligned_apart_and_inside(parts, metadata_bytes):
    layout = plan_layout(parts, metadata_bytes)
    end = 0
    for spec, (name, dtype, shape, length) in zip(layout.tensors, parts, strict=True):
        assert (spec.name, spec.dtype, spec.shape, spec.length_bytes) == (name, dtype, shape, length)
        assert spec.offset % ALIGNMENT_BYTES == 0 and spec.offset >= end
        end = spec.offset + length
    assert layout.payload_bytes >= end
    assert layout.metadata_room_bytes >= 2 * metadata_bytes
    assert layout.slot_bytes == HEADER_BYTES + layout.metadata_room_bytes + layout.payload_bytes


BASE = [("w", "torch.float32", (2, 3), 24), ("b", "torch.float32", (3,), 12)]


@pytest.mark.parametrize(
    "other",
    [
        [("v", "torch.float32", (2, 3), 24), BASE[1]],
        [("w", "torch.int32", (2, 3), 24), BASE[1]],
        [("w", "torch.float32", (3, 2), 24), BASE[1]],
        [("w", "torch.float32", (2, 3), 20), BASE[1]],
        [BASE[1], BASE[0]],
        BASE[:1],
    ],
    ids=["name", "dtype", "shape", "length", "order", "fewer"],
)
def test_the_hash_differs_with_whatever_changes_the_meaning(other):
    assert plan_layout(BASE, 10).hash != plan_layout(other, 10).hash


def test_the_hash_is_equal_where_only_the_room_for_metadata_differs():
    """A spare's metadata may be a few digits shorter; its layout must still be known as the same."""
    assert plan_layout(BASE, 10).hash == plan_layout(BASE, 50_000).hash


def test_a_name_twice_is_refused():
    with pytest.raises(ValueError, match="'w' twice"):
        plan_layout([BASE[0], BASE[0]], 0)
