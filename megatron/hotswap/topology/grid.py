"""Megatron's grid of ranks, re-derived from its sizes alone. Pure.

Follows megatron.core.parallel_state.RankGenerator with its default order "tp-cp-ep-dp-pp": the tensor-parallel rank varies
fastest, then context, then data, then pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError


@dataclass(frozen=True)
class Grid:
    """Sizes of the parallel dimensions; `world_size` ranks in all."""

    world_size: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for name in ("world_size", "tensor", "pipeline", "context"):
            value = getattr(self, name)
            if value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}; give a positive size")
        model = self.tensor * self.pipeline * self.context
        if self.world_size % model:
            raise UsageError(
                f"the world size must be a multiple of tensor x pipeline x context parallel size: {self.world_size} is not a "
                f"multiple of {self.tensor} x {self.pipeline} x {self.context} = {model}; change a size or the number of nodes"
            )

    @property
    def data(self) -> int:
        """Data-parallel size."""
        return self.world_size // (self.tensor * self.pipeline * self.context)

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """(tensor, context, data, pipeline) rank of a global rank."""
        if not 0 <= rank < self.world_size:
            raise UsageError(f"rank must lie in 0..{self.world_size - 1}, got {rank}")
        tensor = rank % self.tensor
        rank //= self.tensor
        context = rank % self.context
        rank //= self.context
        return tensor, context, rank % self.data, rank // self.data

    def rank_at(self, tensor: int, context: int, data: int, pipeline: int) -> int:
        """The global rank at these coordinates: the inverse of `coordinates`."""
        return tensor + self.tensor * (context + self.context * (data + self.data * pipeline))

    def data_ring(self, rank: int) -> tuple[int, ...]:
        """The ranks of this rank's data-parallel group, in ring order, starting after it. Empty if the size is 1."""
        tensor, context, data, pipeline = self.coordinates(rank)
        return tuple(self.rank_at(tensor, context, (data + i) % self.data, pipeline) for i in range(1, self.data))
