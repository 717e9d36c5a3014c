"""From what everybody holds to the generation that the job goes back to, or that is written down, or that a new job begins from. Pure.

Guarantee 2 (never a mix): one generation for all ranks. Guarantee 3 (bounded loss): at least the newest completed step minus one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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


@dataclass(frozen=True)
class Writing:
    """The generation to make durable, and which agent writes which rank's snapshot."""

    generation: int
    by: Mapping[int, str]  # rank -> incarnation
    reason: str


def choose_to_write(
    ranks: int, stock: Mapping[str, Mapping[int, Collection[int]]], own: Mapping[int, str], last: Collection[str]
) -> Writing | str:
    """Pick the newest generation of which every rank has a copy in some memory, or say in words why there is none.

    Args:
        ranks: how many there are.
        stock: incarnation of a living agent -> rank -> generations that it could write.
        own: rank -> incarnation of the agent that has its own slots.
        last: agents that could not write before: others are asked first.

    Of the agents that have a copy the rank's own is taken, else the one that has least to write.
    """
    has: list[dict[int, list[str]]] = [{} for _ in range(ranks)]
    for incarnation, held in sorted(stock.items()):
        for rank in held.keys() & set(range(ranks)):
            for generation in held[rank]:
                has[rank].setdefault(generation, []).append(incarnation)
    empty = [rank for rank, copies in enumerate(has) if not copies]
    if empty:
        return f"no living node has any snapshot of rank(s) {empty}"
    common = set.intersection(*(set(copies) for copies in has))
    if not common:
        return f"no generation is held for every rank; newest by rank: {({rank: max(copies) for rank, copies in enumerate(has)})}"
    generation = max(common)
    load = dict.fromkeys(stock, 0)
    by = {}
    for rank, copies in enumerate(has):
        by[rank] = min(copies[generation], key=lambda i: (i in last, i != own.get(rank), load[i], i))
        load[by[rank]] += 1
    others = [rank for rank in by if by[rank] != own.get(rank)]
    reason = f"generation {generation} is the newest of which every rank has a copy"
    return Writing(generation, by, reason + (f"; rank(s) {others} are written from replicas" if others else ""))


@dataclass(frozen=True)
class DurableFolder:
    """A whole durable generation, as its manifest says."""

    folder: str
    generation: int
    run_id: str
    shape: tuple[tuple[str, int], ...]  # sizes of the grid that wrote it, by their flags


@dataclass(frozen=True)
class Beginning:
    """What a job begins from: the first of `load` that is undamaged, or what Megatron loads by itself. `aside` are generations of
    another course of training: newer than what this job begins from, so a later start must not take them for its own."""

    load: tuple[DurableFolder, ...]
    aside: tuple[DurableFolder, ...]
    reason: str


def choose_beginning(found: Sequence[DurableFolder], saved: int, loads: int, shape: Mapping[str, int]) -> Beginning | str:
    """What a starting job begins from, or in words why it cannot.

    Args:
        found: the whole durable generations.
        saved: the newest iteration that Megatron's own checkpoints there have; 0: none.
        loads: the iteration at which Megatron would begin by itself; 0: a fresh start.
        shape: sizes of this job's grid, by their flags.

    Durable generations that are newer than every checkpoint of Megatron are what the job was at when it ended, so they go first. Where
    Megatron would load nothing, one that is as new as its checkpoint does too.
    """
    newest_first = sorted(found, key=lambda d: (-d.generation, d.folder))
    least = max(saved, 1) if loads == 0 else max(saved, loads) + 1
    newer = tuple(d for d in newest_first if d.generation >= least)
    if not newer:
        aside = tuple(d for d in newest_first if d.generation > loads)
        return Beginning((), aside, "")
    first = newer[0]
    differs = {flag: (size, shape.get(flag)) for flag, size in first.shape if shape.get(flag) != size}
    if differs:
        flags = ", ".join(f"--{flag} was {there} and is {here}" for flag, (there, here) in sorted(differs.items()))
        return (
            f"generation {first.generation} ({first.folder}) is newer than Megatron's checkpoint (iteration {max(saved, loads)}) and was "
            f"written on another grid: {flags}. A snapshot is loaded only by the grid that wrote it: start once on the old grid and let "
            "Megatron save a checkpoint (--save-interval, --exit-interval), then change the grid; or move the folder away to begin from "
            "the older checkpoint"
        )
    same = tuple(d for d in newer if d.shape == first.shape)
    return Beginning(same, (), f"generation {first.generation} of run {first.run_id} is newer than Megatron's checkpoint")
