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

#: Failures of one step for which nodes were replaced, another one each time. One more failure of that step stops the job.
SWAPS_MAX = 2
#: Failures of any kind and of any step, resets and processes started again included, that may follow each other before the job stops,
#: where none of these steps is completed meanwhile.
STRIKES_MAX = 5
#: Resets within --hot-swap-respawn-window-s that may blame one node before it is replaced.
RESETS_MAX = 2
#: Of all nodes together.
_RESETS_KEPT = 64
#: Of each reason in the words that end a job.
_REASON_CHARS_MAX = 300


class Strike(msgspec.Struct, frozen=True):
    """A step that has failed, and was not completed since."""

    step: int
    reason: str
    replaced: tuple[str, ...] = ()  # nodes


class LoopBreaker:
    """Counts failures of steps until they are completed.

    A job that goes back some steps may fail before it comes to the step that had failed: that says nothing about the latter. Nodes that are
    lost together, as behind one switch, are one failure.
    """

    def __init__(self) -> None:
        self._strikes: tuple[Strike, ...] = ()

    @property
    def strikes(self) -> tuple[Strike, ...]:
        """What must outlive the coordinator."""
        return self._strikes

    def take_up(self, known: tuple[Strike, ...]) -> None:
        """Go on from what another coordinator knew."""
        self._strikes = known

    def passed(self, step: int) -> bool:
        """The step is complete, and all before it. Whether one that had failed is among them."""
        before, self._strikes = self._strikes, tuple(x for x in self._strikes if x.step > step)
        return len(self._strikes) < len(before)

    def strike(self, newest_step: int, replaced: Sequence[str], evidence: Sequence[str]) -> str:
        """The job fails again; `newest_step` is complete, nodes are replaced for it. Why it must stop, in words, or empty."""
        self.passed(newest_step)
        now = Strike(newest_step + 1, ", ".join(evidence)[:_REASON_CHARS_MAX], tuple(dict.fromkeys(replaced)))
        of_this = [x for x in self._strikes if x.step == now.step]
        known: set[str] = set()
        swaps = 0
        for earlier in of_this:
            swaps += not known.issuperset(earlier.replaced)
            known |= set(earlier.replaced)
        too_many = len(self._strikes) >= STRIKES_MAX
        self._strikes += (now,)
        if too_many:
            return _in_words(self._strikes)
        return _in_words([*of_this, now]) if swaps >= SWAPS_MAX else ""


def _in_words(strikes: Sequence[Strike]) -> str:
    steps = sorted({x.step for x in strikes})
    which, was = (f"step {steps[0]}", "was") if len(steps) == 1 else (f"steps {', '.join(map(str, steps))}", "were")
    replaced = ", ".join(dict.fromkeys(node for x in strikes[:-1] for node in x.replaced))
    in_vain = f"; replaced for it in vain: {replaced}" if replaced else ""
    said = "; ".join(f"({number}) {x.reason}" for number, x in enumerate(strikes, 1))
    what = "this step does (its samples, its memory)" if len(steps) == 1 else "these steps do (their samples, their memory)"
    return (
        f"{which} failed {len(strikes)} times and {was} never completed, so it is not the nodes{in_vain}; the evidence: {said}; look at "
        f"what {what}, then start the job again"
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
