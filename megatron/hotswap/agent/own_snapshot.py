"""A worker's own snapshots, as its agent sends them on, seals them, and knows them when the worker is gone."""

from __future__ import annotations

import contextlib

from ..errors import SnapshotMismatch
from ..replication.outgoing import Outgoing
from ..snapshot.layout import HEADER_BYTES
from ..snapshot.slots import Word
from .worker_process import WorkerProcess


def on_its_way(worker: WorkerProcess, run_id: str, generation: int, version: int, keep: int) -> Outgoing:
    """The snapshot in the generation's slot: complete under its header, or still being copied by the worker."""
    slots, slot, control = worker.slots, worker.slot_of(generation), worker.control
    assert slots is not None and worker.rank is not None and worker.layout_hash is not None
    try:
        header = slots.header(slot)
        header.require(run_id=run_id, rank=worker.rank, generation=generation, layout_hash=worker.layout_hash)
        return Outgoing.of_slot(slots, slot, header, version=version, keep=keep)
    except SnapshotMismatch:  # no header yet: the worker has wiped out the old one
        payload_bytes = slots.slot_bytes - HEADER_BYTES - worker.metadata_room_bytes

    def available() -> int:
        return payload_bytes if control.get(Word.COPIED) >= generation + 1 else control.get(Word.COPIED_BYTES_0 + slot)

    return Outgoing.of_copy(
        slots,
        slot,
        available,
        run_id=run_id,
        rank=worker.rank,
        generation=generation,
        layout_hash=worker.layout_hash,
        metadata_bytes=control.get(Word.METADATA_BYTES_0 + slot),
        payload_bytes=payload_bytes,
        version=version,
        keep=keep,
    )


async def seal(worker: WorkerProcess, outgoing: Outgoing) -> None:
    """Write the own slot's header, once, when every chunk has been summed: from then on the slot can be restored from.

    Raises:
        SnapshotMismatch: the slot is not what its header says.
    """
    header = await outgoing.header()
    if outgoing.promised is None and worker.generations.get(outgoing.slot) == outgoing.generation:
        outgoing.slots.write_header(outgoing.slot, header)


def complete(worker: WorkerProcess, run_id: str) -> tuple[int, ...]:
    """The generations in its slots that can be restored from by a process that has put none of them there."""
    found = []
    for slot, generation in worker.generations.items():
        assert worker.slots is not None and worker.rank is not None and worker.layout_hash is not None
        with contextlib.suppress(SnapshotMismatch):
            header = worker.slots.header(slot)
            header.require(run_id=run_id, rank=worker.rank, generation=generation, layout_hash=worker.layout_hash)
            found.append(generation)
    return tuple(sorted(found))


def another_layout(worker: WorkerProcess) -> str:
    """What is in the slots is not what the model built here would put there, in words."""
    if worker.begins_from is not None:
        return (
            f"the durable generation {worker.begins_from} has another layout for rank {worker.rank} than the model built here: it was "
            "written by another model or optimizer; give the flags that it was written with, or move it away (the log says where it lies)"
        )
    return (
        f"the snapshot fetched for rank {worker.rank} has another layout than the model built here: the nodes do not run the same "
        "program; install the same versions and give the same flags everywhere"
    )
