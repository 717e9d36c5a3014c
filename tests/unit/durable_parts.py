"""Snapshots in slots, and generations of them on disk, for the tests of durable generations."""

from __future__ import annotations

import random
from pathlib import Path

from megatron.hotswap.snapshot import durable, manifest
from megatron.hotswap.snapshot.layout import HEADER_BYTES, Header, metadata_room_bytes
from megatron.hotswap.snapshot.slots import Slots

RUN, LAYOUT = "run-1", bytes(range(32))


def nothing() -> None:
    """In place of whoever watches that it goes on."""


def fill(slots: Slots, slot: int, rank: int, generation: int, metadata_bytes: int, payload_bytes: int, run: str = RUN) -> Header:
    """Put a snapshot into a slot; its bytes follow from rank and generation."""
    rng = random.Random(f"{rank} {generation}")
    view = slots.view(slot)
    view[HEADER_BYTES : HEADER_BYTES + metadata_bytes] = rng.randbytes(metadata_bytes)
    view[slots.slot_bytes - payload_bytes :] = rng.randbytes(payload_bytes)
    crc = slots.checksum(slot, metadata_bytes, payload_bytes)
    header = Header(run, rank, generation, LAYOUT, metadata_bytes, payload_bytes, crc)
    slots.write_header(slot, header)
    return header


def snapshot(rank: int, generation: int, metadata_bytes: int = 700, payload_bytes: int = 5000) -> tuple[Slots, Header]:
    """Two slots, a snapshot in the second one."""
    slots = Slots.create(HEADER_BYTES + metadata_room_bytes(metadata_bytes) + payload_bytes, 2)
    return slots, fill(slots, 1, rank, generation, metadata_bytes, payload_bytes)


def write_generation(root: Path, generation: int, ranks: int = 2, run: str = RUN, attempt: int = 1, **shape: int) -> str:
    """A whole generation on disk; returns its folder's name."""
    folder = str(manifest.Name(generation, run, 1, attempt))
    files = []
    for rank in range(ranks):
        slots = Slots.create(HEADER_BYTES + metadata_room_bytes(700) + 5000, 1)
        header = fill(slots, 0, rank, generation, 700, 5000, run)
        with durable.in_slot(slots, 0, header, own=slots) as content:
            durable.write_snapshot(root / folder / manifest.file_name(rank), content, nothing)
            files.append(manifest.DurableFile(content.file_bytes, header.crc32c, header.layout_hash.hex()))
    shapes = {manifest.WORLD_SIZE: ranks, **{name.replace("_", "-"): size for name, size in shape.items()}}
    durable.write_manifest(root, folder, manifest.Manifest(manifest.FORMAT, run, generation, shapes, tuple(files)), nothing)
    return folder
