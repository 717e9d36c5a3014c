"""The CPU engine: copying 1,000 tensors into a slot against one memcpy, the time of the submit call, and CRC32C.

The tensors are separate allocations of 1 KiB to 64 MiB, 1 GiB in all; the slot is shared memory as agents make it; every page is
present before anything is timed. Copy and memcpy take turns, and each pair gives one ratio. Beside the clock the processor's time
is shown: where the two disagree, the machine was busy with something else.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import numpy as np
import torch

import deadpool_ext
from megatron.hotswap.snapshot.engine import SnapshotEngine, layout_of
from megatron.hotswap.snapshot.slots import OWN_SLOTS, ControlBlock, Slots, Word

TENSORS = 1000
TOTAL_BYTES = 1 << 30
SMALLEST_BYTES, LARGEST_BYTES = 1 << 10, 64 << 20
SEED = 1
REPETITIONS = 15
CRC_REPETITIONS = 7
TIMEOUT_S = 60.0
METADATA = bytes(20_000)  # about what the random states of one rank take


def sizes() -> list[int]:
    """TENSORS sizes in bytes, multiples of 4, from the smallest to the largest allowed, many small and few large, TOTAL_BYTES in all."""
    spread = np.random.default_rng(SEED).uniform(size=TENSORS)
    spread[:2] = 0.0, 1.0  # both ends are among them
    low, high = 1.0, 20.0  # the exponent that makes the sum right
    for _ in range(60):
        middle = (low + high) / 2
        chosen = SMALLEST_BYTES * (LARGEST_BYTES / SMALLEST_BYTES) ** (spread**middle)
        low, high = (middle, high) if chosen.sum() > TOTAL_BYTES else (low, middle)
    result = [int(size) // 4 * 4 for size in chosen]
    result[int(np.argsort(chosen)[TENSORS // 2])] += TOTAL_BYTES - sum(result)
    assert sum(result) == TOTAL_BYTES and min(result) >= SMALLEST_BYTES and max(result) <= LARGEST_BYTES
    return result


class Bench:
    """Tensors, slots, and one stretch of memory of the same size."""

    def __init__(self) -> None:
        self.tensors = [(f"t{i}", torch.full((size // 4,), float(i))) for i, size in enumerate(sizes())]
        self.layout = layout_of(self.tensors, len(METADATA))
        self.slots = Slots.create(self.layout.slot_bytes, OWN_SLOTS)
        deadpool_ext.prefault(self.slots.address(0), OWN_SLOTS * self.layout.slot_bytes)
        self.control = ControlBlock.create()
        self.engine = SnapshotEngine(self.layout, self.slots, self.control, "bench", 0)
        self.whole = torch.full((TOTAL_BYTES // 4,), 1.0)
        self.queue = deadpool_ext.CopyQueue()
        self.source = np.array([t.data_ptr() for _, t in self.tensors], dtype=np.uint64)
        self.lengths = np.array([t.length_bytes for t in self.layout.tensors], dtype=np.uint64)
        offsets = np.array([t.offset for t in self.layout.tensors], dtype=np.uint64)
        self.payload = self.slots.address(0) + self.layout.slot_bytes - self.layout.payload_bytes
        self.target = offsets + np.uint64(self.payload)
        self._count = 0

    def copy(self) -> tuple[float, float, float]:
        """(seconds of the submit call, seconds until all is copied, seconds of the processor for that)."""
        self._count += 1
        began, began_cpu = time.perf_counter(), time.process_time()
        ticket = self.queue.submit(self.source, self.target, self.lengths, self.control.address(Word.COPIED), self._count)
        submitted = time.perf_counter()
        assert self.queue.wait(ticket, TIMEOUT_S)
        return submitted - began, time.perf_counter() - began, time.process_time() - began_cpu

    def memcpy(self) -> tuple[float, float]:
        """Seconds, and seconds of the processor, of one memcpy of as many bytes into a slot."""
        began, began_cpu = time.perf_counter(), time.process_time()
        deadpool_ext.memcpy(self.slots.address(1), self.whole.data_ptr(), TOTAL_BYTES)
        return time.perf_counter() - began, time.process_time() - began_cpu

    def begin(self, generation: int) -> float:
        """Seconds of SnapshotEngine.begin, as the training thread makes it: addresses, metadata, submit."""
        began = time.perf_counter()
        self.engine.begin(generation, self.tensors, METADATA, keep=generation - 1)
        took = time.perf_counter() - began
        self.engine.complete()
        return took

    def crc(self) -> tuple[float, float]:
        """(seconds of the core, seconds) of the checksum of TOTAL_BYTES in a slot."""
        began, began_core = time.perf_counter(), time.thread_time()
        deadpool_ext.crc32c(self.slots.address(1), TOTAL_BYTES)
        return time.thread_time() - began_core, time.perf_counter() - began

    def check(self) -> None:
        """What was copied is what was to be copied."""
        view = self.slots.view(0)[self.layout.slot_bytes - self.layout.payload_bytes :]
        for spec, (name, tensor) in zip(self.layout.tensors, self.tensors, strict=True):
            there = torch.frombuffer(view, dtype=torch.float32, count=spec.length_bytes // 4, offset=spec.offset)
            assert torch.equal(there, tensor), f"{name} was not copied"


def main() -> None:
    """Measure and print."""
    print("copying 1 GiB in 1,000 tensors, and by memcpy, in turns …", file=sys.stderr)
    bench = Bench()
    bench.copy(), bench.memcpy()  # the first of each is not counted
    ratios, cpu_ratios, copies, memcpys, submits = [], [], [], [], []
    for turn in range(REPETITIONS):
        if turn % 2:
            (submit_s, copy_s, copy_cpu_s), (memcpy_s, memcpy_cpu_s) = bench.copy(), bench.memcpy()
        else:
            (memcpy_s, memcpy_cpu_s), (submit_s, copy_s, copy_cpu_s) = bench.memcpy(), bench.copy()
        ratios.append(memcpy_s / copy_s)
        cpu_ratios.append(memcpy_cpu_s / copy_cpu_s)
        copies.append(copy_s)
        memcpys.append(memcpy_s)
        submits.append(submit_s)
    bench.check()
    begins = [bench.begin(g) for g in range(REPETITIONS + 1)][1:]
    bench.crc()
    cores, walls = zip(*(bench.crc() for _ in range(CRC_REPETITIONS)), strict=True)
    gb = TOTAL_BYTES / 1e9
    figures = {
        "copy_vs_memcpy": {
            "value": statistics.median(ratios),
            "note": f"{gb / statistics.median(copies):.2f} and {gb / statistics.median(memcpys):.2f} GB/s; "
            f"ratios {min(ratios):.2f} to {max(ratios):.2f} in {REPETITIONS} pairs; by the processor's time "
            f"{statistics.median(cpu_ratios):.2f}",
        },
        "submit_median_ms": {
            "value": 1e3 * statistics.median(submits),
            "note": f"of {REPETITIONS}: shortest {1e3 * min(submits):.3f} ms, longest {1e3 * max(submits):.3f} ms",
        },
        "begin_median_ms": {
            "value": 1e3 * statistics.median(begins),
            "note": f"SnapshotEngine.begin in ms: the same with addresses gathered and metadata; longest {1e3 * max(begins):.3f} ms",
        },
        "crc32c_gb_per_s": {
            "value": gb / statistics.median(cores),
            "note": f"{deadpool_ext.crc32c_implementation()}; by the clock {gb / statistics.median(walls):.2f} GB/s",
        },
    }
    print(json.dumps({**figures, "ratios": ratios, "submit_s": submits, "begin_s": begins}))


if __name__ == "__main__":
    main()
