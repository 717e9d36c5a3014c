"""From what everybody holds to the generation that the job goes back to. Pure.

Guarantee 2 (never a mix): one generation for all ranks. Guarantee 3 (bounded loss): at least the newest completed step minus one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Holdings:
    """What one rank's own agent and worker hold; a rank whose node is gone, or that is new, holds nothing."""

    done: int | None = None
    between_steps: bool = False
    own: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Choice:
    """The generation, which ranks must fetch it from which holder, and whether work between steps is done again."""

    generation: int
    fetch: Mapping[int, tuple[str, ...]]  # rank -> agents (incarnations) that have the replica, in the order to be tried
    redo_sections: bool
    reason: str


def choose(holdings: Sequence[Holdings], replicas: Mapping[int, Mapping[int, Sequence[str]]]) -> Choice | str:
    """Pick the generation to restore, or say in words why there is none.

    Args:
        holdings: for each rank.
        replicas: rank -> generation -> incarnations of living agents with a complete replica.

    The newest generation that every rank has somewhere is taken. Where some rank was halted between steps (logging, evaluating,
    saving) *after* that generation, and an older one is also still there for all, that one is taken instead: then the steps after
    it are run again by everyone, the replaced rank included, and so the interrupted work is done again by everyone too.
    """
    available = [held.own | replicas.get(rank, {}).keys() for rank, held in enumerate(holdings)]
    common = sorted(frozenset.intersection(*map(frozenset, available)), reverse=True) if available else []
    if not common:
        empty = [rank for rank, have in enumerate(available) if not have]
        if empty:
            return f"no living node has any snapshot of rank(s) {empty}"
        newest = {rank: max(have) for rank, have in enumerate(available)}
        return f"no generation is held for every rank; newest by rank: {newest}"
    generation = common[0]
    completed = max((h.done for h in holdings if h.done is not None), default=generation)
    interrupted = [r for r, h in enumerate(holdings) if h.between_steps and h.done == generation]
    reason = f"generation {generation} is the newest that every rank has"
    redo = True
    if interrupted:
        if len(common) > 1 and completed == generation:
            reason = (
                f"generation {common[1]}: rank(s) {interrupted} were interrupted in the work after step {generation}, which is done "
                "again with its step"
            )
            generation = common[1]
        else:
            redo = False
            reason += f"; the work after it that rank(s) {interrupted} were interrupted in is skipped"
    fetch = {
        rank: tuple(sorted(replicas[rank][generation]))
        for rank, held in enumerate(holdings)
        if generation not in held.own
    }
    return Choice(generation, fetch, redo, reason)
