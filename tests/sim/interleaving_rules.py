"""What must hold at every event of interleavings.py. Guarantees are those of the design's section 6, stated for R holders a rank
and a snapshot every N steps:

2  a restored job is one generation, and every rank's bytes are that generation's
3  as long as no more than R nodes are lost before redundancy is complete again, there is something to go back to, and it is at
   most 2N - 1 steps before the newest step that every rank had completed; where late snapshots are skipped, it is the newest
   committed generation or a later one
4  a complete snapshot, own or replica, is overwritten only when a newer generation is held by every rank and every holder, or
   when its own never will be; what is counted as acknowledged is really there
6  nothing is counted or loaded whose bytes are not those of its rank and generation
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from violation import Violation, require

from megatron.hotswap.errors import HotSwapError


class Checks:
    """Knows every memory of the world; believes no flag."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.peak = 0  # newest step that all ranks had completed
        self.base = 0  # generation that the present membership began from
        self.committed = -1  # newest generation that is complete everywhere, in the present membership
        self.void: set[int] = set()  # generations that some rank has skipped, in the present membership
        self.safe = 0  # newest generation that was ever committed, as far as the job has not gone back before it
        self.lost = world.holders_per_rank + 1  # nodes, since redundancy was last complete; at start it never was
        self._replicated: dict[int, set[int]] = {}

    def whole(self, slots: Any, slot: int, rank: int, generation: int) -> bool:
        """Whether a slot holds exactly this snapshot."""
        header = slots.headers[slot]
        right = header is not None and (header.rank, header.generation) == (rank, generation)
        return right and all(part == (rank, generation) for part in slots.parts[slot])

    def on_step(self) -> None:
        """A rank has completed a step."""
        done = [r.done for r in self.world.ranks]
        if None not in done:
            self.peak = max(self.peak, min(done))

    def on_overwrite(self, slots: Any, slot: int, whose: str) -> None:
        """A slot has been invalidated, to be written."""
        header = slots.replaced
        if header is None:
            return
        obsolete = slots.written_in[slot] < self.world.version and header.generation != self.base
        require(
            obsolete or self.committed > header.generation or header.generation in self.void,
            "guarantee 4",
            f"{whose} of generation {header.generation} is overwritten, committed is {self.committed}",
        )

    def on_acknowledged(self, rank: Any, generation: int, holder: Any) -> None:
        """An agent counts a generation as held by a holder."""
        if not holder.alive:
            return
        try:
            slots, slot = holder.replicas.find(rank.rank, generation)
        except HotSwapError as missing:
            raise Violation(f"guarantee 4: acknowledged, but {missing}") from missing
        require(
            self.whole(slots, slot, rank.rank, generation),
            "guarantee 6",
            f"{holder.name} has acknowledged rank {rank.rank}, generation {generation}, and holds {slots.parts[slot]}",
        )

    def on_replicated(self, rank: int, generation: int) -> None:
        """All holders of a rank have acknowledged."""
        ranks = self._replicated.setdefault(generation, set())
        ranks.add(rank)
        if len(ranks) == len(self.world.ranks):
            # With a node lost meanwhile it is not everywhere, but each rank's snapshot is somewhere, and that is what counts.
            self.committed = max(self.committed, generation)
            self.safe = max(self.safe, self.committed)
            if not self.world.recovering:
                self.lost = 0

    def on_death(self) -> None:
        """A node is lost."""
        self.lost += 1

    def on_nothing_left(self, why: str) -> None:
        """The plan says that there is no generation."""
        holders = self.world.holders_per_rank
        require(self.lost > holders, "guarantee 3", f"the loss of {self.lost} node(s) with {holders} replica(s) ended the job: {why}")

    def on_choice(self, generation: int) -> None:
        """The plan has a generation."""
        if self.lost > self.world.holders_per_rank:
            return
        interval = self.world.interval
        least = self.safe if self.world.skip else self.peak - (2 * interval - 1)
        what = f"back to step {generation}, {self.peak} was complete and {self.safe} committed; N is {interval}"
        require(generation >= least, "guarantee 3", what)

    def on_fetch(self, rank: int, generation: int, sources: Sequence[str]) -> Any:
        """The node that a snapshot is fetched from."""
        require(bool(sources), "guarantee 2", f"nobody holds generation {generation} for rank {rank}, which is to be restored")
        source = next(n for n in self.world.nodes if n.name == sorted(sources)[0])
        try:
            slots, slot = source.replicas.find(rank, generation)
        except HotSwapError as missing:
            raise Violation(f"guarantee 2: the plan names {source.name}, but {missing}") from missing
        require(self.whole(slots, slot, rank, generation), "guarantee 6", f"{source.name} gives {slots.parts[slot]}")
        return source

    def on_restore(self, rank: Any, generation: int) -> None:
        """A rank is about to load its own slot."""
        require(
            generation in rank.held.values() and self.whole(rank.own, rank.slot_of(generation), rank.rank, generation),
            "guarantee 2",
            f"rank {rank.rank} is to load generation {generation}, its slots have {rank.own.parts}",
        )

    def on_resume(self, generation: int) -> None:
        """A new membership begins."""
        self.base, self.committed = generation, -1
        self._replicated.clear()
        self.void.clear()
        self.peak = generation
        self.safe = min(self.safe, generation)
