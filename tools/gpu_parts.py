"""The parts of tools/gpu_check.py. Each is a function that returns what it measured and runs in a process of its own.

`on_cpu` runs the same code through the CPU device layer, with small sizes: it shows that the check itself works, and its figures say
nothing about a GPU. What a part cannot do there it leaves out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import deadpool_ext
from megatron.hotswap.snapshot.slots import ControlBlock, Slots, Word

_RUNS = 5
_TIMEOUT_S = 60.0
#: Pieces of the copy test: as many as the optimizer's shard of a model of 1 billion parameters has, three tensors each.
_PIECES = 900


def seconds_of(work: Callable[[], object]) -> list[float]:
    """Of each of several runs, the first left out."""
    times = []
    for _ in range(_RUNS + 1):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return times[1:]


def copy_speed(total_bytes: int, on_cpu: bool) -> dict[str, Any]:
    """Device to host: the engine's copy queue, from many tensors into page-locked slots, beside one plain pinned copy of torch."""
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    elements = total_bytes // 4 // _PIECES
    flat = torch.randn(elements * _PIECES, device=device)
    pieces = flat.split(elements)
    length = flat.numel() * 4
    slots = Slots.create(length, 1)
    if not on_cpu:
        deadpool_ext.host_register(slots.address(0), length, device.index)
    queue = deadpool_ext.CopyQueue(None if on_cpu else device.index)
    control = ControlBlock.create()
    sizes = np.full(_PIECES, elements * 4, dtype=np.uint64)
    sources = np.array([p.data_ptr() for p in pieces], dtype=np.uint64)
    targets = slots.address(0) + np.arange(_PIECES, dtype=np.uint64) * np.uint64(elements * 4)
    stream = None if on_cpu else torch.cuda.current_stream(device).cuda_stream

    def engine() -> None:
        ticket = queue.submit(sources, targets, sizes, control.address(Word.COPIED), 1, stream=stream)
        assert queue.wait(ticket, _TIMEOUT_S), f"the engine's copy did not end in {_TIMEOUT_S} s"

    plain = torch.empty_like(flat, device="cpu") if on_cpu else torch.empty(flat.numel(), pin_memory=True)

    def torchs() -> None:
        plain.copy_(flat, non_blocking=True)
        if not on_cpu:
            torch.cuda.current_stream(device).synchronize()

    engine_s, torch_s = seconds_of(engine), seconds_of(torchs)
    same = bytes(slots.view(0)) == plain.numpy().tobytes()
    queue.close()
    if not on_cpu:
        deadpool_ext.host_unregister(slots.address(0), device.index)
    assert same, "the engine's copy and torch's differ"
    return {
        "bytes": length,
        "pieces": _PIECES,
        "engine_bytes_per_s": length / min(engine_s),
        "torch_pinned_bytes_per_s": length / min(torch_s),
        "engine_over_torch": min(torch_s) / min(engine_s),
        "engine_s": engine_s,
        "torch_s": torch_s,
        "same_bits": same,
    }


class _Holder:
    """Stands for a model: holds groups, as layers and optimizers do."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.world = dist.group.WORLD


def rebuild_communicators(on_cpu: bool) -> dict[str, Any]:
    """A world of one rank: a collective, abort, new groups, references replaced, a collective again; as a recovery does it.

    gloo has no abort, so on a CPU only the rest is run.
    """
    from megatron.hotswap.topology.groups import Groups
    from megatron.hotswap.topology.rendezvous import Rendezvous, RendezvousStore
    from megatron.hotswap.worker.abort import abort_device_groups

    backend, device = ("gloo", "cpu") if on_cpu else ("nccl", f"cuda:{torch.cuda.current_device()}")
    timeout = timedelta(seconds=_TIMEOUT_S)
    served = [Rendezvous("127.0.0.1") for _ in range(2)]
    groups = Groups(timeout, timeout)
    groups.version = 1

    def sums(holder: _Holder) -> bool:
        tensor = torch.arange(1 << 20, dtype=torch.float32, device=device)
        wanted = tensor.clone()
        for group in (holder.group, holder.world):
            dist.all_reduce(tensor, group=group)
        return torch.equal(tensor, wanted)

    groups.start_world(backend, RendezvousStore(served[0].address, timeout), 0, [0])
    holder = _Holder(groups.create([0], None, None, "check"))
    assert sums(holder), "an all-reduce of one rank changed its tensor"
    began = time.perf_counter()
    abort_device_groups([made.group for made in groups.doom(None)])
    aborted = time.perf_counter()
    replaced = groups.rebuild(2, RendezvousStore(served[1].address, timeout), ()).references
    rebuilt = time.perf_counter()
    assert holder.world is dist.group.WORLD, "the references were not replaced"
    assert sums(holder), "an all-reduce on the rebuilt groups changed its tensor"
    first = time.perf_counter()
    dist.destroy_process_group()
    return {
        "backend": backend,
        "abort_s": None if on_cpu else aborted - began,
        "rebuild_s": rebuilt - aborted,
        "first_collectives_s": first - rebuilt,
        "references_replaced": replaced,
    }
