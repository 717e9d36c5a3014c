"""Which generations are complete everywhere, which never will be, and which copies are of no use. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from .messages import Acknowledged


class Commits:
    """What is known of the copies of generations, in the present membership. -1 stands for none, as before training."""

    def __init__(self, world_size: int) -> None:
        self.committed = -1
        self.skipped_generations = 0  # of the whole job
        self._world_size = world_size
        self._acknowledged: dict[int, set[int]] = {}  # generation -> ranks whose every holder has it
        self._void: set[int] = set()
        self._payloads: dict[int, dict[int, int]] = {}  # generation -> rank -> CRC32C of a payload that was not sent
        self._peers: dict[int, tuple[int, ...]] = {}  # rank -> ranks that should have the same payload
        self._damaged: set[tuple[str, int, int]] = set()  # (agent incarnation, rank, generation)

    def acknowledge(self, event: Acknowledged) -> bool:
        """A rank's holders have a generation. Whether it is committed by that."""
        rank, generation = event.rank, event.generation
        if generation <= self.committed or generation in self._void:
            return False
        if event.payload_crc is not None:
            self._payloads.setdefault(generation, {})[rank] = event.payload_crc
            self._peers[rank] = event.peers
        ranks = self._acknowledged.setdefault(generation, set())
        ranks.add(rank)
        if len(ranks) < self._world_size:
            return False
        self.committed = generation
        self._forget_up_to(generation)
        return True

    def difference(self, generation: int) -> str:
        """Which ranks' payloads should be equal in this generation and are not, in words: neither can stand in for the other."""
        crcs = self._payloads.get(generation, {})
        for rank, crc in crcs.items():
            for peer in self._peers[rank]:
                if crcs.get(peer, crc) != crc:
                    return (
                        f"ranks {rank} and {peer} should have the same state after step {generation}, and do not (CRC32C {crc:08x}, "
                        f"{crcs[peer]:08x}); from now on each is sent whole"
                    )
        return ""

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

    def mend(self, incarnation: str, rank: int, generation: int) -> None:
        """The agent has another copy of it now, which was checked."""
        self._damaged.discard((incarnation, rank, generation))

    def usable(self, incarnation: str, rank: int, generations: Iterable[int]) -> frozenset[int]:
        """Of the generations of a rank that an agent reports: those not known to be damaged."""
        return frozenset(g for g in generations if (incarnation, rank, g) not in self._damaged)

    def begin_again(self, generation: int) -> None:
        """A new membership goes on from `generation`: committed once its holders (who may be others) have it, like all after it."""
        self.committed = min(self.committed, generation - 1)
        self._acknowledged.clear()
        self._payloads.clear()
        self._void.clear()
        # A damaged copy of what comes after is overwritten; one of `generation` must stay known.
        self._damaged = {entry for entry in self._damaged if entry[2] == generation}

    def _forget_up_to(self, generation: int) -> None:
        for old in [g for g in self._acknowledged if g <= generation]:
            del self._acknowledged[old]
        self._payloads = {g: crcs for g, crcs in self._payloads.items() if g >= generation}
        self._void = {g for g in self._void if g > generation}
