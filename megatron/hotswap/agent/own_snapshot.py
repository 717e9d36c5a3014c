"""A worker's own snapshot, as its agent sends it on and seals it."""

from __future__ import annotations

from ..errors import SnapshotMismatch
from ..replication.outgoing import Outgoing
from ..snapshot.layout import HEADER_BYTES
from ..snapshot.slots import OWN_SLOTS, Word
from .worker_process import WorkerProcess


def on_its_way(worker: WorkerProcess, run_id: str, generation: int, version: int) -> Outgoing:
    """The snapshot in the generation's slot: complete under its header, or still being copied by the worker."""
    slots, slot, control = worker.slots, generation % OWN_SLOTS, worker.control
    assert slots is not None and worker.rank is not None and worker.layout_hash is not None
    try:
        header = slots.header(slot)
        header.require(run_id=run_id, rank=worker.rank, generation=generation, layout_hash=worker.layout_hash)
        return Outgoing.of_slot(slots, slot, header, version=version)
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
    )


async def seal(outgoing: Outgoing) -> None:
    """Write the own slot's header, once, when every chunk has been summed: from then on the slot can be restored from."""
    if outgoing.promised is None:
        outgoing.slots.write_header(outgoing.slot, await outgoing.header())
