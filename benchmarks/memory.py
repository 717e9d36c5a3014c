"""Host memory of a job with hot-swap: exactly four slots a rank, and nothing that grows.

A tiny GPT, data parallel 2, trains 520 steps on two virtual nodes. Meanwhile the kernel is asked what every process has: memory,
open files, threads, and the size and content of each piece of shared memory for snapshots. The same training without hot-swap
gives the growth that is Megatron's and the allocator's own. Growth is the difference between the medians around step 100 and at
the end.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from jobs import run_hot_swap, run_plain

from megatron.hotswap.snapshot.layout import HEADER_BYTES, Header, plan_layout
from megatron.hotswap.snapshot.slots import OWN_SLOTS, REPLICA_SLOTS

NODES = 2
STEPS, FROM_STEP, WINDOW = 520, 100, 40
#: Metadata grows by the digits of its counters; its room was planned with those of step 0.
DIGITS_BYTES = 64

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --use-distributed-optimizer "
    "--micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 255 "
    "--log-interval 1 --eval-iters 0 --eval-interval 100000 --split 99,1,0 --num-workers 0"
)


def flags(steps: int) -> list[str]:
    """Megatron's."""
    return [*MODEL.split(), "--train-iters", str(steps)]


@dataclass(frozen=True)
class Usage:
    """What one process had at one moment. Memory is what only it has, or shares with its agent: anonymous and shared memory."""

    step: int
    memory_kib: int
    descriptors: int
    threads: int


def usage(pid: int, step: int) -> Usage:
    """Ask the kernel."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    kib = sum(int(status[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    return Usage(step, kib, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]))


def role(command: list[str]) -> str | None:
    """What a process of a job is, by its command line."""
    if "megatron.hotswap.worker" in command:
        return "worker"
    if "megatron.hotswap" in command:
        return "agent"
    is_rank = len(command) > 1 and command[1:2] != ["-m"] and any(word.endswith("pretrain_gpt.py") for word in command)
    return "worker" if is_rank else None


@dataclass
class Watch:
    """Looks at all processes of a job, and at its slots whenever a few steps have passed."""

    first_step: int
    samples: dict[tuple[str, int], list[Usage]] = field(default_factory=lambda: defaultdict(list))
    slots: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # agent's pid -> its memory for snapshots, as last seen

    def look(self, step: int) -> None:
        """Take a sample."""
        if step < self.first_step:
            return
        for process in psutil.Process().children(recursive=True):
            try:
                kind = role(process.cmdline())
                if kind is None:
                    continue
                self.samples[kind, process.pid].append(usage(process.pid, step))
                if kind == "agent":
                    self.slots[process.pid] = shared_slots(process.pid) or self.slots.get(process.pid, [])
            except (psutil.Error, OSError, KeyError):
                continue  # it is ending

    def growth(self, kind: str, name: str, last_step: int, window: int) -> dict[int, float]:
        """By process: how much more it had in the last steps than in the first ones that were looked at."""
        grown = {}
        for (of, pid), samples in self.samples.items():
            first = [getattr(s, name) for s in samples if s.step <= self.first_step + window]
            last = [getattr(s, name) for s in samples if last_step - window <= s.step < last_step]
            if of == kind and first and last:
                grown[pid] = statistics.median(last) - statistics.median(first)
        return grown

    def peak_kib(self, kind: str) -> int:
        """The most that one of these processes had."""
        return max(s.memory_kib for (of, _), samples in self.samples.items() if of == kind for s in samples)


def shared_slots(pid: int) -> list[dict[str, Any]]:
    """Every piece of shared memory for snapshots that a process has: its bytes, those present, and what its headers say."""
    found, seen = [], set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        if "memfd:deadpool-slots" not in os.readlink(fd):
            continue
        size = fd.stat()
        if size.st_ino in seen:  # Python's mmap keeps a descriptor of its own
            continue
        seen.add(size.st_ino)
        count = OWN_SLOTS  # of either kind there are two
        with open(fd, "rb") as memory:
            headers = []
            for slot in range(count):
                memory.seek(slot * size.st_size // count)
                raw = memory.read(HEADER_BYTES)
                if any(raw[:8]):  # else it is being written
                    headers.append(Header.unpack(raw))
        if headers:
            header = headers[-1]
            found.append(
                {
                    "bytes": size.st_size,
                    "present_bytes": size.st_blocks * 512,
                    "slot_bytes": size.st_size // count,
                    "rank": header.rank,
                    "metadata_bytes": header.metadata_bytes,
                    "payload_bytes": header.payload_bytes,
                }
            )
    return found


def promised_slot_bytes(slot: dict[str, Any]) -> int:
    """What a slot must have: header, room for metadata, payload; the room is that of some metadata a few digits shorter."""
    rooms = {plan_layout([], slot["metadata_bytes"] - less).metadata_room_bytes for less in range(DIGITS_BYTES)}
    sizes = {HEADER_BYTES + room + slot["payload_bytes"] for room in rooms}
    return slot["slot_bytes"] if slot["slot_bytes"] in sizes else max(sizes)


def slot_figures(watch: Watch, ranks: int) -> dict[str, Any]:
    """All memory for snapshots against four slots a rank."""
    pieces = [piece for agent in watch.slots.values() for piece in agent]
    per_rank: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for piece in pieces:
        per_rank[piece["rank"]].append(piece)
    promised = sum((OWN_SLOTS + REPLICA_SLOTS) * promised_slot_bytes(p[0]) for p in per_rank.values())
    held = sum(piece["bytes"] for piece in pieces)
    complete = len(per_rank) == ranks and all(len(p) == 2 for p in per_rank.values())
    return {
        "own_slots_vs_promised": {
            "value": held / promised if complete else 0.0,
            "note": f"{held} bytes of shared memory for {len(per_rank)} of {ranks} ranks, promised {promised}; a slot is a header of "
            f"{HEADER_BYTES} bytes, room for metadata, and a payload of {sorted({p['payload_bytes'] for p in pieces})} bytes",
        },
        "slots": pieces,
    }


def measure(folder: Path, steps: int, first_step: int, window: int) -> dict[str, Any]:
    """Both runs, and what they say."""
    hot, plain = Watch(first_step), Watch(first_step)
    summary = run_hot_swap(folder / "hot-swap", NODES, 1, flags(steps), hot.look)
    run_plain(folder / "plain", NODES, flags(steps), plain.look)
    ours, theirs = (w.growth("worker", "memory_kib", steps, window) for w in (hot, plain))
    agents = hot.growth("agent", "memory_kib", steps, window)
    assert len(ours) == len(theirs) == len(agents) == NODES, f"every process must have been seen: {ours}, {theirs}, {agents}"
    counts = {
        name: sum(sum(hot.growth(kind, name, steps, window).values()) for kind in ("worker", "agent"))
        for name in ("descriptors", "threads")
    }
    span = f"from step {first_step} to {steps}"
    return {
        **slot_figures(hot, NODES),
        "memory_growth_vs_plain_kib": {
            "value": max(ours.values()) - max(theirs.values()),
            "note": f"{span} the worker that grew most grew by {max(ours.values()):.0f} KiB with hot-swap and "
            f"{max(theirs.values()):.0f} KiB without",
        },
        "agent_growth_kib": {"value": max(agents.values()), "note": f"{span}; an agent has {hot.peak_kib('agent')} KiB, slots included"},
        "descriptor_growth": {"value": counts["descriptors"], "note": span},
        "thread_growth": {"value": counts["threads"], "note": span},
        "device_memory_growth_bytes": {"value": None, "note": "no GPU here; tools/gpu_check.py measures it where there is one"},
        "copy": summary["copy"],
        "growth_by_process_kib": {"worker": list(ours.values()), "plain": list(theirs.values()), "agent": list(agents.values())},
    }


def main() -> None:
    """Measure and print."""
    print(f"{STEPS} steps with hot-swap, then without …", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as folder:
        print(json.dumps(measure(Path(folder), STEPS, FROM_STEP, WINDOW)))


if __name__ == "__main__":
    main()
