"""What a rank's snapshot holds: the optimizer's shard of its parameters, tensor by tensor. Pure.

With the distributed optimizer (megatron.core.optimizer.distrib_optimizer, _compute_per_buffer_param_layout) each model chunk has one
buffer for its dense parameters and one for its experts'. A buffer takes parameters back to front, each beginning at a multiple of 64
elements, and is cut into buckets whose ends are padded to a multiple of lcm(shards, 128). Each rank of the data-parallel group owns the
same fraction of every bucket; a parameter that lies across a border gives a piece to both sides. Padding is in no piece, but it moves
the borders, so shards differ by at most their padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..snapshot.layout import ALIGNMENT_BYTES
from .model import ModelShape, Parameter, Split, buffers, chunk_parameters

#: Elements to which the distributed optimizer aligns the begin of each parameter, and the least to which a bucket's end.
_PARAMETER_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128
_HIGH_BANDWIDTH_ALIGNMENT = 1 << 16  # --ddp-pad-buckets-for-high-nccl-busbw
_BUCKET_ELEMENTS_MIN = 40_000_000
_BUCKET_ELEMENTS_PER_SHARD = 1_000_000
_FP32_BYTES = 4


@dataclass(frozen=True)
class OptimizerKind:
    """How state is kept. `fp32_tensors`: the main parameter and the states of its size (Adam: 3 in all)."""

    distributed: bool
    fp32_tensors: int = 3
    step_tensor: bool = False  # on CPUs torch's Adam keeps a step beside each piece of a parameter
    overlap_grad_reduce: bool = False
    bucket_elements: int | None = None
    buckets: int | None = None  # wanted number, --ddp-num-buckets
    high_bandwidth_padding: bool = False
    element_bytes: int = 4  # of the model's precision: 2 under bf16 or fp16


@dataclass(frozen=True)
class SnapshotSize:
    """Of one rank."""

    parameters: int  # elements of this rank's model chunks
    owned: int  # elements of its optimizer shard
    tensors: int
    copied_bytes: int  # D2H in a step
    payload_bytes: int  # in the slot: each tensor aligned

    def __add__(self, other: SnapshotSize) -> SnapshotSize:
        return SnapshotSize(
            self.parameters + other.parameters,
            self.owned + other.owned,
            self.tensors + other.tensors,
            self.copied_bytes + other.copied_bytes,
            self.payload_bytes + other.payload_bytes,
        )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _tensors(lengths_bytes: Iterable[int], parameters: int = 0, owned: int = 0) -> SnapshotSize:
    lengths = list(lengths_bytes)
    return SnapshotSize(parameters, owned, len(lengths), sum(lengths), sum(_round_up(n, ALIGNMENT_BYTES) for n in lengths))


def _state(pieces: Sequence[int], kind: OptimizerKind, parameters: int) -> SnapshotSize:
    """Main parameters and states of pieces of so many elements."""
    lengths = [_FP32_BYTES * n for n in pieces for _ in range(kind.fp32_tensors)]
    if kind.step_tensor:
        lengths += [_FP32_BYTES] * len(pieces)
    return _tensors(lengths, parameters, sum(pieces))


def lay_out(
    parameters: Sequence[Parameter], bucket_elements: int | None, shards: int, high_bandwidth: bool
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(begin, end) of each parameter, back to front, and of each bucket, in elements of one buffer."""
    multiple = math.lcm(shards, _BUCKET_ALIGNMENT, *([_HIGH_BANDWIDTH_ALIGNMENT] if high_bandwidth else []))
    spans: list[tuple[int, int]] = []
    buckets: list[tuple[int, int]] = []
    bucket_begin = position = in_bucket = 0

    def close(at: int) -> int:
        end = _round_up(at, multiple)
        buckets.append((bucket_begin, end))
        return end

    for parameter in reversed(parameters):
        position = _round_up(position, _PARAMETER_ALIGNMENT)
        if parameter.shared_embedding and in_bucket:
            bucket_begin = position = close(position)
            in_bucket = 0
        spans.append((position, position + parameter.count))
        position += parameter.count
        in_bucket += 1
        full = bucket_elements is not None and position - bucket_begin >= bucket_elements
        if full or parameter.shared_embedding:
            bucket_begin = position = close(position)
            in_bucket = 0
    if in_bucket:
        close(position)
    return spans, buckets


def pieces_of_shards(spans: Sequence[tuple[int, int]], buckets: Sequence[tuple[int, int]], shards: int) -> list[list[int]]:
    """For each shard the elements of every piece of a parameter that it owns."""
    pieces: list[list[int]] = [[] for _ in range(shards)]
    bucket = 0
    for begin, end in spans:
        while begin >= buckets[bucket][1]:
            bucket += 1
        first, last = buckets[bucket]
        width = (last - first) // shards
        for shard in range((begin - first) // width, (end - 1 - first) // width + 1):
            low, high = first + shard * width, first + (shard + 1) * width
            pieces[shard].append(min(end, high) - max(begin, low))
    return pieces


class StageSizes:
    """Snapshot sizes of the ranks of one pipeline stage.

    Args:
        shards: ranks of a data-parallel group, context-parallel ones included.
        expert_shards: ranks of an expert-data-parallel group.
    """

    def __init__(
        self, shape: ModelShape, split: Split, kind: OptimizerKind, stage: int, shards: int, expert_shards: int
    ) -> None:
        chunks = [chunk_parameters(shape, split, stage, c) for c in range(split.virtual)]
        self.parameters = sum(p.count for chunk in chunks for p in chunk)
        self._rest = _tensors(buffers(shape, split, stage, kind.element_bytes))
        if not kind.distributed:
            whole = _state([p.count for chunk in chunks for p in chunk], kind, self.parameters)
            self._dense, self._expert = [whole], [_tensors([])]
            return
        bucket = self._bucket_elements(kind, stage, shards)
        dense: list[list[int]] = [[] for _ in range(shards)]
        expert: list[list[int]] = [[] for _ in range(expert_shards)]
        for c, chunk in enumerate(chunks):
            for owners, part in (
                (dense, [p for p in chunk if not p.expert]),
                (expert, [p for p in chunk if p.expert]),
            ):
                if part:
                    limit = bucket if c == 0 else None
                    layout = lay_out(part, limit, len(owners), kind.high_bandwidth_padding)
                    for owner, pieces in zip(owners, pieces_of_shards(*layout, len(owners)), strict=True):
                        owner += pieces
        self._dense = [_state(pieces, kind, self.parameters) for pieces in dense]
        self._expert = [_state(pieces, kind, 0) for pieces in expert]

    def _bucket_elements(self, kind: OptimizerKind, stage: int, shards: int) -> int | None:
        """Megatron cuts buckets only where reductions overlap the backward pass, and only on the first pipeline stage."""
        if not kind.overlap_grad_reduce or stage > 0:
            return None
        if kind.buckets is not None:
            return self.parameters // kind.buckets
        return kind.bucket_elements or max(_BUCKET_ELEMENTS_MIN, _BUCKET_ELEMENTS_PER_SHARD * shards)

    def of(self, shard: int, expert_shard: int) -> SnapshotSize:
        """The rank with these positions in its data-parallel and its expert-data-parallel group."""
        return self._dense[shard % len(self._dense)] + self._expert[expert_shard % len(self._expert)] + self._rest
