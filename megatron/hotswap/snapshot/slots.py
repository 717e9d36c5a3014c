"""Memory shared between an agent and its worker: the slots, and the control block of 64-bit words.

Both are memfds: memory with no name in any file system, handed over as a descriptor. It lives exactly as long as a process that
maps it, so a snapshot outlives its worker, and a job that ends, however it ends, leaves nothing behind in /dev/shm.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import deadpool_ext

from ..errors import SnapshotMismatch, UsageError
from .host_memory import available_bytes
from .layout import HEADER_BYTES, Header

OWN_SLOTS = 2
REPLICA_SLOTS = 2


class Word(enum.IntEnum):
    """Words of the control block. Generations are stored plus one, so that zero means none."""

    OVER_VERSION = 0  # agent: this membership is over
    COPIED = 1  # copy engine: newest generation complete in its slot
    ACKNOWLEDGED = 2  # agent: newest generation that the holder has
    COMMITTED = 3  # agent: newest generation that everyone's holder has
    STEP = 4  # worker: step in progress
    PHASE = 5  # worker: index of the phase it last entered
    PROGRESS = 6  # worker: counts phases; a number that stands still is a hang
    VOID = 7  # agent: newest generation that will never be committed, since some rank skipped it
    METADATA_BYTES_0 = 8  # worker: metadata bytes in slot 0
    METADATA_BYTES_1 = 9
    COPIED_BYTES_0 = 10  # copy engine: how much of the payload of slot 0 is in place, while COPIED does not say that all is
    COPIED_BYTES_1 = 11
    GENERATION_0 = 12  # whoever fills slot 0: the generation that it is for, set before a byte of the slot changes
    GENERATION_1 = 13


def next_slot(held: Mapping[int, int], keep: int, count: int = OWN_SLOTS) -> int:
    """The slot to write next: one that holds nothing, else the one with the oldest generation but never that of `keep`.

    Args:
        held: slot -> generation.
        keep: the newest committed generation, which must not be overwritten before a newer one is (guarantee 4).
    """
    for slot in range(count):
        if slot not in held:
            return slot
    return min((slot for slot in held if held[slot] != keep), key=lambda slot: held[slot])


class ControlBlock:
    """One page of words that worker, copy engine and agent read and write without asking each other."""

    BYTES = 4096

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, self.BYTES)
        self._base = _address(self._map)

    @classmethod
    def create(cls) -> ControlBlock:
        """A new, zeroed block."""
        fd = os.memfd_create("deadpool-control")
        os.ftruncate(fd, cls.BYTES)
        return cls(fd)

    def address(self, word: int) -> int:
        """Where a word lies, for the copy engine."""
        return self._base + 8 * word

    def get(self, word: int) -> int:
        """Load (acquire)."""
        return deadpool_ext.load_u64(self.address(word))

    def set(self, word: int, value: int) -> None:
        """Store (release)."""
        deadpool_ext.store_u64(self.address(word), value)

    def bump(self, word: int) -> None:
        """Add one."""
        deadpool_ext.add_u64(self.address(word), 1)


class Slots:
    """`count` slots of equal size in one memfd."""

    def __init__(self, fd: int, slot_bytes: int, count: int) -> None:
        self.fd = fd
        self.slot_bytes = slot_bytes
        self.count = count
        self._map = mmap.mmap(fd, slot_bytes * count)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._base = _address(self._map)
        self._view = memoryview(self._map)

    @classmethod
    def create(cls, slot_bytes: int, count: int) -> Slots:
        """New slots, their pages present, so that no copy is slowed by a fault and memory that is not there shows now.

        Raises:
            UsageError: the system refuses that much memory.
        """
        fd = os.memfd_create("deadpool-slots")
        try:
            if not _huge_pages_for_shared_memory():
                os.posix_fallocate(fd, 0, slot_bytes * count)
                return cls(fd, slot_bytes, count)
            # The advice counts for pages that a mapping brings in, not for those that fallocate makes.
            os.ftruncate(fd, slot_bytes * count)
            slots = cls(fd, slot_bytes, count)
            deadpool_ext.prefault(slots.address(0), slot_bytes * count)
            return slots
        except (OSError, RuntimeError) as refused:  # RuntimeError: of prefault
            os.close(fd)
            raise UsageError(
                f"the system refuses {slot_bytes * count} bytes of shared memory for {count} snapshot slots: {refused}; free host memory, "
                "raise the limits of this process (ulimit -v, ulimit -f), put fewer ranks on a node, or use more data-parallel ranks, "
                "which makes each shard smaller"
            ) from refused

    def address(self, slot: int) -> int:
        """Where a slot begins."""
        return self._base + slot * self.slot_bytes

    def view(self, slot: int) -> memoryview:
        """A slot's bytes, not copied."""
        return self._view[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def span(self, offset: int, length: int) -> memoryview:
        """Bytes of all slots together, not copied, from where the first one begins."""
        return self._view[offset : offset + length]

    def header(self, slot: int) -> Header:
        """Read a slot's header.

        Raises:
            SnapshotMismatch: there is none.
        """
        return Header.unpack(self.view(slot)[:HEADER_BYTES].tobytes())

    def write_header(self, slot: int, header: Header) -> None:
        """Make the slot's content valid. Write it last."""
        self.view(slot)[:HEADER_BYTES] = header.pack()

    def invalidate(self, slot: int) -> None:
        """Make the slot's content invalid before it is overwritten."""
        self.view(slot)[:8] = bytes(8)

    def checksum(self, slot: int, metadata_bytes: int, payload_bytes: int) -> int:
        """CRC32C of a slot's metadata, then payload (which lies at the slot's end)."""
        begin = self.address(slot)
        crc = deadpool_ext.crc32c(begin + HEADER_BYTES, metadata_bytes)
        return deadpool_ext.crc32c(begin + self.slot_bytes - payload_bytes, payload_bytes, crc)

    def verify(self, slot: int) -> Header:
        """The header of a slot whose content matches its checksum.

        Raises:
            SnapshotMismatch: it does not.
        """
        header = self.header(slot)
        if HEADER_BYTES + header.metadata_bytes + header.payload_bytes > self.slot_bytes:  # it would be read past the slot's end
            raise SnapshotMismatch(
                f"rank {header.rank}, generation {header.generation}: a slot of {self.slot_bytes} bytes cannot hold a header and "
                f"{header.metadata_bytes} + {header.payload_bytes} bytes; the slot is another one"
            )
        found = self.checksum(slot, header.metadata_bytes, header.payload_bytes)
        if found != header.crc32c:
            raise SnapshotMismatch(
                f"rank {header.rank}, generation {header.generation}: the checksum is {found:08x}, the header says "
                f"{header.crc32c:08x}; the content was damaged"
            )
        return header

    def close(self) -> None:
        """Give the descriptor back; the memory goes with the last map of it."""
        os.close(self.fd)


def require_room(wanted_bytes: int, limit_bytes: int | None, node: str, purpose: str = "snapshots") -> None:
    """Refuse slots that host memory has no room for, before a byte is taken.

    Args:
        wanted_bytes: that are to be taken now, or over the time of the job; `purpose` says in words what for.
        limit_bytes: the user's limit, less what was taken of it already; None without one.
        node: whose memory it is.

    Raises:
        UsageError: says how many bytes are needed, where, and how many are missing by which limit.
    """
    available, source = available_bytes()
    if limit_bytes is not None and limit_bytes < available:
        available, source = limit_bytes, "--hot-swap-host-memory-max-bytes"
    if wanted_bytes > available:
        raise UsageError(
            f"node {node} needs {wanted_bytes} bytes of host memory for {purpose} and has {available} ({source}): "
            f"{wanted_bytes - available} bytes are missing; put fewer ranks on a node, raise the limit, or use more "
            "data-parallel ranks, which makes each shard smaller"
        )


def require_room_for_job(slot_bytes: int, ranks: int, replicas: int, limit_bytes: int | None, node: str) -> None:
    """Refuse a job whose slots will not all fit, at its start: replicas come only when training has begun.

    Args:
        slot_bytes: of one slot.
        ranks: on this node, each with OWN_SLOTS slots.
        replicas: snapshots of other nodes' ranks that this node is to hold, each with REPLICA_SLOTS slots; that may be more than
            `ranks` (replication/placement.py says how many).
        limit_bytes, node: as for require_room.

    Raises:
        UsageError: as require_room.
    """
    purpose = f"{OWN_SLOTS} slots of {slot_bytes} bytes for each of {ranks} rank(s), and {REPLICA_SLOTS} for each of {replicas} replica(s)"
    require_room(slot_bytes * (OWN_SLOTS * ranks + REPLICA_SLOTS * replicas), limit_bytes, node, purpose)


def _huge_pages_for_shared_memory() -> bool:
    """Whether this system gives huge pages to shared memory that asks for them: fewer entries to walk for every copy and send."""
    with contextlib.suppress(OSError):
        chosen = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
        return any(f"[{mode}]" in chosen for mode in ("always", "within_size", "advise", "force"))
    return False


def _address(mapped: mmap.mmap) -> int:
    return int(np.frombuffer(mapped, dtype=np.uint8).ctypes.data)
