"""Failures that come again: a step that no node gets through, and resets that always blame the same node. Pure.

One failure is an accident of one process, or one node. If the same step fails on a node, on the spare that took its place, and on the
next one, it is not the nodes: a poisoned batch, a program that runs out of memory there, a state that was damaged before it was copied.
Going on would spend every spare and end in the same place, so the job stops and shows all that was seen.

A reset costs no spare, so it is the answer to a collective that failed while every node lives. If it is needed again and again, and each
time the same node stands out, that node is replaced; it is alive, so its memory serves meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

#: Different nodes that may be replaced for one step. The third failure of a step after two of them stops the job.
SWAPS_MAX = 2
#: Failures of one step of any kind, resets and processes started again included, before the job stops.
STRIKES_MAX = 5
#: Resets within --hot-swap-respawn-window-s that may blame one node before it is replaced.
RESETS_MAX = 2
#: Of all nodes together.
_RESETS_KEPT = 64
#: Of each reason in the words that end a job.
_REASON_CHARS_MAX = 300


class Struck(msgspec.Struct, frozen=True):
    """A step that has failed, for another coordinator."""

    newest: int = -1  # the step before it
    reasons: tuple[str, ...] = ()
    swapped: tuple[str, ...] = ()


class LoopBreaker:
    """Counts failures of the step that the job stands at. A step that is completed begins the count anew."""

    def __init__(self) -> None:
        self._newest = -1
        self._reasons: list[str] = []
        self._swapped: list[str] = []  # different nodes

    @property
    def struck(self) -> Struck:
        """What must outlive the coordinator. While nothing has failed that is nothing, though steps go by."""
        return Struck(self._newest, tuple(self._reasons), tuple(self._swapped)) if self._reasons else Struck()

    def take_up(self, known: Struck) -> None:
        """Go on from what another coordinator knew."""
        self._newest, self._reasons, self._swapped = known.newest, list(known.reasons), list(known.swapped)

    def passed(self, step: int) -> bool:
        """The step is complete, on every rank. Whether one that had failed is among those that are."""
        if step <= self._newest:
            return False
        had_failed = bool(self._reasons)
        self._newest, self._reasons, self._swapped = step, [], []
        return had_failed

    def strike(self, newest_step: int, swapped: Sequence[str], evidence: Sequence[str]) -> str:
        """The job fails again; `newest_step` is complete, `swapped` nodes are replaced for it. Why it must stop, in words, or empty."""
        self.passed(newest_step)
        stop = len(self._swapped) >= SWAPS_MAX or len(self._reasons) >= STRIKES_MAX
        self._reasons.append(", ".join(evidence)[:_REASON_CHARS_MAX])
        if stop:
            return self._in_words()
        self._swapped += [node for node in dict.fromkeys(swapped) if node not in self._swapped]
        return ""

    def _in_words(self) -> str:
        in_vain = f"; replaced for it in vain: {', '.join(self._swapped)}" if self._swapped else ""
        said = "; ".join(f"({number}) {reason}" for number, reason in enumerate(self._reasons, 1))
        return (
            f"step {self._newest + 1} failed {len(self._reasons)} times and was never completed, so it is not the nodes{in_vain}; the "
            f"evidence: {said}; look at what this step does (its samples, its memory), then start the job again"
        )


class Reset(NamedTuple):
    """One that has blamed one node."""

    when_s: float
    node: str
    reason: str


class Resets:
    """Remembers whom resets have blamed."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._resets: deque[Reset] = deque(maxlen=_RESETS_KEPT)
        self._expected = 0  # on purpose, yet to come

    @property
    def all(self) -> tuple[Reset, ...]:
        """What must outlive the coordinator."""
        return tuple(self._resets)

    def take_up(self, known: Sequence[Reset]) -> None:
        """Go on from what another coordinator knew."""
        self._resets.extend(known)

    def expect(self) -> None:
        """One is caused on purpose: it says nothing about any node, or step."""
        self._expected += 1

    def on_purpose(self) -> bool:
        """A reset begins: whether it is one that was expected."""
        expected = self._expected > 0
        self._expected -= expected
        return expected

    def blame(self, nodes: set[str], evidence: str, now: float) -> str:
        """A reset begins, and these nodes stand out. If it is one, and not for the first time, why it is to be replaced; else empty."""
        if len(nodes) != 1:
            return ""
        (node,) = nodes
        before = [r.reason for r in self._resets if r.node == node and now - r.when_s < self._window_s]
        self._resets.append(Reset(now, node, evidence[:_REASON_CHARS_MAX]))
        if len(before) < RESETS_MAX:
            return ""
        return (
            f"{len(before) + 1} resets within {self._window_s:g} s (--hot-swap-respawn-window-s) all point to this node: "
            f"{'; '.join([*before, evidence])[: 3 * _REASON_CHARS_MAX]}"
        )
