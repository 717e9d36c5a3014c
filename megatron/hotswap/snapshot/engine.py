"""Filling and reading a worker's own slots: device to host (D2H) behind the training thread's back, and back again.

`begin` hands the whole snapshot to the copy queue and returns at once; completion is the word COPIED of the control block, which
the agent and the fence look at. COPIED_BYTES_0/1 say meanwhile how much of the payload is in place, so that the agent can send it
on behind the copy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

import deadpool_ext

from ..errors import SnapshotMismatch, UsageError
from .layout import HEADER_BYTES, Layout, plan_layout
from .slots import OWN_SLOTS, ControlBlock, Slots, Word, next_slot

_WAIT_S = 60.0
#: How long a rollback waits for the agent to finish the header (checksum) of a slot that was only just filled.
_HEADER_WAIT_S = 10.0

NamedTensors = Sequence[tuple[str, torch.Tensor]]


def layout_of(tensors: NamedTensors, metadata_bytes: int) -> Layout:
    """The layout of these tensors in this order. Each must be contiguous, since copies go by address and length."""
    for name, tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(f"snapshot tensors must be contiguous, {name} (shape {tuple(tensor.shape)}) is not")
    return plan_layout(
        ((name, str(t.dtype), tuple(t.shape), t.numel() * t.element_size()) for name, t in tensors), metadata_bytes
    )


class SnapshotEngine:
    """The slots of one rank, and the copies into them.

    `tensors` is called for every snapshot: an optimizer may put a new tensor in a state's place.
    """

    def __init__(self, layout: Layout, slots: Slots, control: ControlBlock, run_id: str, rank: int) -> None:
        self.layout = layout
        self.slots = slots
        self._control = control
        self._run_id = run_id
        self._rank = rank
        self._queue: deadpool_ext.CopyQueue | None = None
        self._generations: dict[int, int] = {}  # slot -> generation whose copy was begun
        self._metadata: dict[int, bytes] = {}  # generation -> metadata, as it was put into the slot by this process
        self._ticket: int | None = None
        self._registered: int | None = None  # the CUDA device that page-locked the slots
        self._lengths = np.array([t.length_bytes for t in layout.tensors], dtype=np.uint64)
        offsets = np.array([t.offset for t in layout.tensors], dtype=np.uint64)
        payload_at = slots.slot_bytes - layout.payload_bytes
        self._targets = [offsets + np.uint64(slots.address(slot) + payload_at) for slot in range(OWN_SLOTS)]

    @property
    def oldest(self) -> int:
        """The oldest generation that is here, or on its way here: no recovery goes further back. -1: none is."""
        return min(self._generations.values(), default=-1)

    @property
    def newest(self) -> int:
        """The newest generation that is here, or on its way here; -1: none is."""
        return max(self._generations.values(), default=-1)

    def begin(self, generation: int, tensors: NamedTensors, metadata: bytes, keep: int) -> int:
        """Start the copy of a generation; returns its slot at once. That of generation `keep` is left alone.

        Raises:
            ValueError: the tensors or the metadata are not those of the layout.
        """
        if len(metadata) > self.layout.metadata_room_bytes:
            raise ValueError(
                f"metadata has {len(metadata)} bytes, the slot has room for {self.layout.metadata_room_bytes}"
            )
        sources = self._addresses(tensors)
        slot = next_slot(self._generations, keep)
        self._metadata.pop(self._generations.pop(slot, -1), None)
        # First: should this process die from here on, its agent must not take the slot for what was in it before.
        self._control.set(Word.GENERATION_0 + slot, generation + 1)
        self.slots.invalidate(slot)
        self.slots.view(slot)[HEADER_BYTES : HEADER_BYTES + len(metadata)] = metadata
        self._control.set(Word.METADATA_BYTES_0 + slot, len(metadata))
        self._control.set(Word.COPIED_BYTES_0 + slot, 0)
        self._generations[slot] = generation
        self._metadata[generation] = metadata
        queue, stream = self._queue_for(tensors)
        self._ticket = queue.submit(
            sources,
            self._targets[slot],
            self._lengths,
            self._control.address(Word.COPIED),
            generation + 1,
            stream=stream,
            # Targets ascend in the order of the layout, whose first tensor is at offset 0: what the word counts are offsets of
            # the payload. What follows the last tensor (padding) is not copied, so only COPIED says that the payload is whole.
            progress_address=self._control.address(Word.COPIED_BYTES_0 + slot),
        )
        return slot

    def _queue_for(self, tensors: NamedTensors) -> tuple[deadpool_ext.CopyQueue, int | None]:
        on_device = next((t for _, t in tensors if t.is_cuda), None)
        if self._queue is None:
            if on_device is not None:
                self._page_lock(on_device.device.index)
            self._queue = deadpool_ext.CopyQueue(None if on_device is None else on_device.device.index)
        return self._queue, None if on_device is None else torch.cuda.current_stream(on_device.device).cuda_stream

    def _page_lock(self, device: int) -> None:
        """Once: copies from a device go only to memory that the system cannot move."""
        length = self.slots.slot_bytes * self.slots.count
        try:
            deadpool_ext.host_register(self.slots.address(0), length, device)
        except RuntimeError as refused:
            raise UsageError(
                f"rank {self._rank}: the {length} bytes of its snapshot slots could not be page-locked for CUDA device {device}, which "
                f"copies to them need: {refused} Raise the limit on locked memory (ulimit -l unlimited; under Slurm, "
                "PropagateResourceLimitsExcept=MEMLOCK), or put fewer ranks on a node."
            ) from refused
        self._registered = device

    def close(self, timeout_s: float = _WAIT_S) -> None:
        """End the copies and let go of the slots; whoever replaces an engine closes the old one first.

        Raises:
            SnapshotMismatch: the copy in progress does not end; the slots stay page-locked and must not be unmapped.
        """
        if self._queue is not None and not self._queue.close(timeout_s):
            raise SnapshotMismatch(f"the copy in progress did not end in {timeout_s} s")
        self._queue = None
        if self._registered is not None:
            deadpool_ext.host_unregister(self.slots.address(0), self._registered)
            self._registered = None

    def _addresses(self, tensors: NamedTensors) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        if len(tensors) != len(self.layout.tensors):
            raise ValueError(f"the layout has {len(self.layout.tensors)} tensors, got {len(tensors)}")
        for spec, (name, tensor) in zip(self.layout.tensors, tensors, strict=True):
            if name != spec.name or tensor.numel() * tensor.element_size() != spec.length_bytes:
                raise ValueError(
                    f"the layout has {spec.name} of {spec.length_bytes} bytes here, got {name} {tuple(tensor.shape)}"
                )
        return np.array([t.data_ptr() for _, t in tensors], dtype=np.uint64)

    def complete(self) -> tuple[int, ...]:
        """Generations in the slots, after the copy in progress has ended."""
        if self._ticket is not None:
            assert self._queue is not None
            if not self._queue.wait(self._ticket, _WAIT_S):
                raise SnapshotMismatch(f"the copy in progress did not end in {_WAIT_S} s")
            self._ticket = None
        return tuple(sorted(self._generations.values()))

    def adopt(self, generation: int, slot: int) -> None:
        """The agent has put this generation into this slot."""
        self._generations = {s: g for s, g in self._generations.items() if s != slot and g != generation}
        self._generations[slot] = generation
        self._metadata = {g: raw for g, raw in self._metadata.items() if g in self._generations.values() and g != generation}

    def go_back(self, generation: int) -> None:
        """What is newer than this was never; its slot is free."""
        self._generations = {s: g for s, g in self._generations.items() if g <= generation}
        self._metadata = {g: raw for g, raw in self._metadata.items() if g <= generation}

    def metadata(self, generation: int) -> bytes:
        """The metadata of a generation as this process took it; else, of one that was fetched, from its slot, checked.

        Raises:
            SnapshotMismatch: the slot holds another snapshot, or a damaged one.
        """
        return self._metadata[generation] if generation in self._metadata else self.verified_metadata(generation)

    def _slot_of(self, generation: int) -> int:
        for slot, there in self._generations.items():
            if there == generation:
                return slot
        raise SnapshotMismatch(f"rank {self._rank} has no snapshot of generation {generation}; it has {sorted(self._generations.values())}")

    def verified_metadata(self, generation: int) -> bytes:
        """The metadata of a generation in its slot, checked with the rest of the snapshot.

        Raises:
            SnapshotMismatch: the slot holds another snapshot, or a damaged one.
        """
        slot = self._slot_of(generation)
        deadline = time.monotonic() + _HEADER_WAIT_S
        while True:
            try:
                header = self.slots.header(slot)
                header.require(
                    run_id=self._run_id, rank=self._rank, generation=generation, layout_hash=self.layout.hash
                )
                break
            except SnapshotMismatch:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.001)
        self.slots.verify(slot)
        return bytes(self.slots.view(slot)[HEADER_BYTES : HEADER_BYTES + header.metadata_bytes])

    def restore(self, generation: int, tensors: NamedTensors) -> int:
        """Copy a generation's payload back into the tensors; call verified_metadata first. Returns the bytes copied."""
        slot = self._slot_of(generation)
        self._addresses(tensors)
        view = self.slots.view(slot)[self.slots.slot_bytes - self.layout.payload_bytes :]
        with torch.no_grad():
            for spec, (_, tensor) in zip(self.layout.tensors, tensors, strict=True):
                if spec.length_bytes:
                    raw = torch.frombuffer(view, dtype=torch.uint8, count=spec.length_bytes, offset=spec.offset)
                    tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))
        return int(self._lengths.sum())
