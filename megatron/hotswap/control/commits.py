"""Which generations are complete everywhere, which never will be, and which copies are of no use. Pure."""

from __future__ import annotations

from collections.abc import Iterable


class Commits:
    """What is known of the copies of generations, in the present membership. -1 stands for none, as before training."""

    def __init__(self, world_size: int) -> None:
        self.committed = -1
        self.skipped_generations = 0  # of the whole job
        self._world_size = world_size
        self._acknowledged: dict[int, set[int]] = {}  # generation -> ranks whose every holder has it
        self._void: set[int] = set()
        self._damaged: set[tuple[str, int, int]] = set()  # (agent incarnation, rank, generation)

    def acknowledge(self, rank: int, generation: int) -> bool:
        """A rank's holders have a generation. Whether it is committed by that."""
        if generation <= self.committed or generation in self._void:
            return False
        ranks = self._acknowledged.setdefault(generation, set())
        ranks.add(rank)
        if len(ranks) < self._world_size:
            return False
        self.committed = generation
        self._forget_up_to(generation)
        return True

    def skip(self, generation: int) -> bool:
        """Some rank does not take this generation. Whether that is news."""
        if generation <= self.committed or generation in self._void:
            return False
        self._void.add(generation)
        self._acknowledged.pop(generation, None)
        self.skipped_generations += 1
        return True

    def damage(self, incarnation: str, rank: int, generation: int) -> None:
        """The agent's copy of the rank's generation cannot be restored from, whatever it reports."""
        self._damaged.add((incarnation, rank, generation))

    def usable(self, incarnation: str, rank: int, generations: Iterable[int]) -> frozenset[int]:
        """Of the generations of a rank that an agent reports: those not known to be damaged."""
        return frozenset(g for g in generations if (incarnation, rank, g) not in self._damaged)

    def begin_again(self, generation: int) -> None:
        """A new membership goes on from `generation`: committed once its holders (who may be others) have it, like all after it."""
        self.committed = min(self.committed, generation - 1)
        self._acknowledged.clear()
        self._void.clear()
        # A damaged copy of what comes after is overwritten; one of `generation` must stay known.
        self._damaged = {entry for entry in self._damaged if entry[2] == generation}

    def _forget_up_to(self, generation: int) -> None:
        for old in [g for g in self._acknowledged if g <= generation]:
            del self._acknowledged[old]
        self._void = {g for g in self._void if g > generation}
