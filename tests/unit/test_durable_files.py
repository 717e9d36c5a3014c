"""snapshot/durable.py and manifest.py: a generation on disk is there whole or not at all, and nothing damaged is loaded (guarantee 6)."""

import errno
import os
import random

import msgspec
import pytest
from durable_parts import LAYOUT, RUN, fill, nothing, snapshot, write_generation
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.hotswap.errors import SnapshotMismatch, UsageError
from megatron.hotswap.snapshot import durable, manifest
from megatron.hotswap.snapshot.layout import HEADER_BYTES, Header
from megatron.hotswap.snapshot.slots import Slots

NEW_RUN = "run-2"
HEADER_SAYS = 112  # bytes: the fields and their checksum; zeros follow, which say nothing


def load(root, folder, rank=0, run=NEW_RUN, most=1 << 20):
    """Read a rank's snapshot back; returns its header in the slot, and the slots."""
    made = []

    def make(slot_bytes):
        if slot_bytes > most:
            raise UsageError("no room")
        made.append(Slots.create(slot_bytes, 2))
        return made[-1]

    try:
        there = durable.read_manifest(root, folder)
        return durable.read_snapshot(root / folder, there, rank, run, make, nothing), made[-1]
    except Exception:
        for slots in made:
            with pytest.raises(SnapshotMismatch):  # what was refused does not lie there as if it were good
                slots.header(0)
        raise


def test_what_was_written_comes_back_bit_for_bit_for_the_run_that_goes_on(tmp_path):
    folder = write_generation(tmp_path, 40)
    for rank in (0, 1):
        header, slots = load(tmp_path, folder, rank)
        assert (header.run_id, header.rank, header.generation, header.layout_hash) == (NEW_RUN, rank, 40, LAYOUT)
        assert slots.verify(0) == header
        rng = random.Random(f"{rank} 40")
        assert slots.span(HEADER_BYTES, 700) == rng.randbytes(700)
        assert slots.view(0)[-5000:] == rng.randbytes(5000)


def test_without_its_manifest_a_generation_is_not_there(tmp_path):
    folder = write_generation(tmp_path, 40)
    (tmp_path / folder / manifest.MANIFEST).unlink()
    assert durable.find(tmp_path) == ([], [], [])
    with pytest.raises(durable.Unseen, match=r"manifest\.json is not there"):
        load(tmp_path, folder)
    assert durable.find(tmp_path / "nowhere") == ([], [], [])


@pytest.mark.parametrize("at", [0, 8, 20, HEADER_BYTES, HEADER_BYTES + 699, HEADER_BYTES + 700, HEADER_BYTES + 5699])
def test_a_flipped_bit_is_found_wherever_it_is(tmp_path, at):
    folder = write_generation(tmp_path, 40)
    path = tmp_path / folder / manifest.file_name(0)
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)
    with pytest.raises(SnapshotMismatch, match="rank_000000"):
        load(tmp_path, folder)


@pytest.mark.parametrize("cut", [0, 1, 200, HEADER_BYTES, HEADER_BYTES + 100, HEADER_BYTES + 5699])
def test_a_truncated_file_is_found(tmp_path, cut):
    folder = write_generation(tmp_path, 40)
    os.truncate(tmp_path / folder / manifest.file_name(0), cut)
    with pytest.raises(SnapshotMismatch):
        load(tmp_path, folder)


def test_a_missing_file_and_one_of_another_rank_or_generation_are_named(tmp_path):
    folder, other = write_generation(tmp_path, 40), write_generation(tmp_path, 41)
    files = [tmp_path / folder / manifest.file_name(rank) for rank in (0, 1)]
    files[1].unlink()
    with pytest.raises(SnapshotMismatch, match=r"rank_000001\.snapshot is missing"):
        load(tmp_path, folder, 1)
    files[1].write_bytes(files[0].read_bytes())
    with pytest.raises(SnapshotMismatch, match="rank is 0, asked for 1"):
        load(tmp_path, folder, 1)
    files[0].write_bytes((tmp_path / other / manifest.file_name(0)).read_bytes())
    with pytest.raises(SnapshotMismatch, match="generation is 41, asked for 40"):
        load(tmp_path, folder, 0)


def test_a_pipe_or_a_link_in_place_of_a_file_is_refused_and_holds_nobody(tmp_path):
    folder = write_generation(tmp_path, 40)
    path = tmp_path / folder / manifest.file_name(0)
    path.rename(tmp_path / "elsewhere")
    os.mkfifo(path)
    with pytest.raises(SnapshotMismatch, match="is not a file"):
        load(tmp_path, folder)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links") as refused:
        load(tmp_path, folder)
    assert refused.value.errno == errno.ELOOP


@pytest.mark.parametrize(
    "name", ["../x", "generation_1", "/etc", "", "generation_0000000001_a/b_1_1", f"generation_0000000001_{'x' * 99}_1_1"]
)
def test_a_folder_that_is_no_generations_name_is_never_opened(tmp_path, name):
    with pytest.raises(SnapshotMismatch, match="is not the name"):
        durable.read_manifest(tmp_path, name)


def signed(**changes):
    """A manifest of one rank with a right checksum, some of whose fields are others."""
    fields = {
        "format": 1,
        "run_id": RUN,
        "generation": 40,
        "shape": {"world-size": 1},
        "files": [{"length": 9796, "crc32c": 1, "layout": "00" * 32}],
    }
    line = msgspec.json.encode({**fields, **changes})
    return line + b"\n" + manifest.hashlib.sha256(line).hexdigest().encode() + b"\n"


NAME = str(manifest.Name(40, RUN, 1, 1))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": 2}, "has format 2, format 1 is read here"),
        ({"generation": 41}, "is of generation 41"),
        ({"run_id": "another"}, "of run 'another'"),
        ({"shape": {"world-size": 2}}, "names 1 files for 2 ranks"),
        ({"shape": {}}, "names 1 files for None ranks"),
        ({"files": [{"length": 5, "crc32c": 1, "layout": "00" * 32}]}, "impossible entry for rank 0"),
        ({"files": [{"length": 9796, "crc32c": 1 << 40, "layout": "00" * 32}]}, "impossible entry"),
        ({"files": [{"length": 9796, "crc32c": 1, "layout": "../../etc"}]}, "impossible entry"),
        ({"files": [{"length": 9796, "crc32c": 1, "layout": "00" * 32, "name": "/etc/passwd"}]}, "cannot be read"),
        ({"more": 1}, "cannot be read"),
        ({"files": "x"}, "cannot be read"),
    ],
)
def test_a_malformed_manifest_is_refused_in_words(changes, says):
    assert manifest.decode(signed(), NAME).generation == 40
    with pytest.raises(SnapshotMismatch, match=says):
        manifest.decode(signed(**changes), NAME)


def test_a_manifest_without_bounds_is_not_read(tmp_path):
    folder = write_generation(tmp_path, 40)
    os.truncate(tmp_path / folder / manifest.MANIFEST, manifest.MANIFEST_BYTES_MAX + 1)  # a hole: takes no room here
    with pytest.raises(SnapshotMismatch, match="more than"):
        durable.read_manifest(tmp_path, folder)
    assert "more than" in durable.find(tmp_path)[2][0]


def test_a_header_that_promises_more_than_the_file_has_takes_no_memory(tmp_path):
    folder = write_generation(tmp_path, 40)
    path = tmp_path / folder / manifest.file_name(0)
    raw = path.read_bytes()
    huge = Header(RUN, 0, 40, LAYOUT, 700, 1 << 50, Header.unpack(raw).crc32c)
    path.write_bytes(huge.pack() + raw[HEADER_BYTES:])
    with pytest.raises(SnapshotMismatch, match="its header says 1125899906847420"):
        load(tmp_path, folder)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_damage_to_a_manifest_is_refused(tmp_path_factory, data):
    """Whatever the bytes are: refused in words, nothing else."""
    raw = signed()
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "noise"]))
    at = data.draw(st.integers(0, len(raw) - 1))
    bad = {
        "flip": raw[:at] + bytes([raw[at] ^ data.draw(st.integers(1, 255))]) + raw[at + 1 :],
        "cut": raw[:at],
        "insert": raw[:at] + data.draw(st.binary(min_size=1, max_size=20)) + raw[at:],
        "noise": data.draw(st.binary(max_size=300)),
    }[kind]
    if bad != raw:
        with pytest.raises(SnapshotMismatch):
            manifest.decode(bad, NAME)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda x: st.lists(x, max_size=3), max_leaves=10))
@settings(max_examples=100, deadline=None)
def test_any_value_in_a_field_is_refused_or_right(value):
    for field in ("format", "run_id", "generation", "shape", "files"):
        raw = signed(**{field: value})
        if raw != signed():
            with pytest.raises(SnapshotMismatch):
                manifest.decode(raw, NAME)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_damage_to_a_file_is_refused(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("fuzz")
    folder = write_generation(root, 40, ranks=1)
    path = root / folder / manifest.file_name(0)
    raw = path.read_bytes()
    at = data.draw(st.integers(0, len(raw) - 1))
    if HEADER_SAYS <= at < HEADER_BYTES:
        at = 0  # the rest of the header's page says nothing
    bad = raw[:at] + data.draw(st.binary(max_size=64)) + raw[at + data.draw(st.integers(0, 64)) :]
    path.write_bytes(bad)
    if bad[:HEADER_SAYS] + bad[HEADER_BYTES:] != raw[:HEADER_SAYS] + raw[HEADER_BYTES:] or len(bad) != len(raw):
        with pytest.raises(SnapshotMismatch):
            load(root, folder)


# ---- writing


def test_a_full_disk_is_an_error_of_the_system_and_leaves_no_generation(tmp_path):
    """/dev/full refuses every write as a full disk does."""
    slots, header = snapshot(0, 40)
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as refused:
        durable.write_snapshot(tmp_path / "full", durable.in_slot(slots, 1, header), nothing)
    assert refused.value.errno == errno.ENOSPC


def test_a_copy_that_is_damaged_in_memory_is_not_written_as_good(tmp_path):
    slots, header = snapshot(0, 40)
    slots.view(1)[-1] ^= 1
    with pytest.raises(SnapshotMismatch, match="the checksum in memory is"):
        durable.write_snapshot(tmp_path / "x", durable.in_slot(slots, 1, header), nothing)


def test_a_slot_that_is_overwritten_meanwhile_is_noticed(tmp_path):
    """Training goes on while a slot is copied or written from: the header is wiped out first, so its end is seen."""
    slots, header = snapshot(0, 40)
    content = durable.in_slot(slots, 1, header)
    with pytest.raises(durable.SnapshotGone, match="was overwritten while it was written"):
        durable.write_snapshot(tmp_path / "x", content, lambda: slots.invalidate(1))
    fill(slots, 1, 0, 40, 700, 5000)
    with pytest.raises(durable.SnapshotGone, match="was overwritten while it was copied"):
        durable.copy_of(content, lambda: fill(slots, 1, 0, 42, 700, 5000))


def test_a_copy_is_out_of_the_way_of_training(tmp_path):
    slots, header = snapshot(0, 40)
    with durable.copy_of(durable.in_slot(slots, 1, header), nothing) as copy:
        fill(slots, 1, 0, 42, 700, 5000)
        durable.write_snapshot(tmp_path / "x", copy, nothing)
    assert Header.unpack((tmp_path / "x").read_bytes()[:HEADER_BYTES]) == header


def test_the_manifest_is_refused_where_a_file_is_not_seen_or_is_another(tmp_path):
    folder = write_generation(tmp_path, 40)
    there = durable.read_manifest(tmp_path, folder)
    (tmp_path / folder / manifest.MANIFEST).unlink()
    path = tmp_path / folder / manifest.file_name(1)
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    with pytest.raises(SnapshotMismatch, match="the file has 9795 bytes, its header says 9796, the manifest 9796"):
        durable.write_manifest(tmp_path, folder, there, nothing)
    path.unlink()
    with pytest.raises(SnapshotMismatch, match="--save must be on a file system that all nodes share"):
        durable.write_manifest(tmp_path, folder, there, nothing)
    assert not (tmp_path / folder / manifest.MANIFEST).exists()


def test_older_generations_go_only_when_a_newer_one_is_whole(tmp_path):
    names = [write_generation(tmp_path, g) for g in (10, 20, 30)]
    torn = write_generation(tmp_path, 25, attempt=7)
    (tmp_path / torn / manifest.MANIFEST).unlink()
    aside = write_generation(tmp_path, 99)
    durable.set_aside(tmp_path, aside)
    (tmp_path / "mine").mkdir()
    newest = write_generation(tmp_path, 40)
    assert sorted(durable.prune(tmp_path, newest, 2)) == sorted([names[0], names[1], torn])
    assert sorted(os.listdir(tmp_path)) == sorted([names[2], newest, aside, "mine"])
    assert [m.generation for m in durable.find(tmp_path)[0]] == [30, 40]
