"""Which nodes get no ranks any more: those given up for their health, and those that fail again and again. Pure.

A node that has failed comes back as a spare, and most such nodes are as good as new: a process was killed, a switch was restarted. One
that fails again within the hour has something that comes back with it. It would be given ranks again and again, and each time the job
would lose seconds and a copy; so it is told to stay away. Its name is what counts: another life of the agent is the same node.

A failure is counted once in a recovery, however many of the node's processes it takes; faults on purpose are not counted.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

import msgspec

#: Of each failure in the words of a quarantine.
_REASON_CHARS_MAX = 160


class Case(NamedTuple):
    """A node that is in."""

    why: str
    until_s: float | None  # None: until it is released


class Failure(NamedTuple):
    """One of a node."""

    when_s: float
    why: str


class Remembered(msgspec.Struct, frozen=True):
    """What another coordinator must know of it."""

    cases: dict[str, Case] = {}  # by node, as all of these
    failures: dict[str, tuple[Failure, ...]] = {}
    counted: dict[str, str] = {}  # life whose failure in the recovery that is under way is one of them
    expected: dict[str, int] = {}  # faults on purpose that have not struck yet


class Quarantine:
    """One per job."""

    def __init__(self, failures_max: int, window_s: float) -> None:
        self._failures_max = failures_max
        self._window_s = window_s
        self._failures: dict[str, deque[Failure]] = {}
        self._counted: dict[str, tuple[str, int]] = {}  # node -> (life, recovery) of its last failure
        self._on_purpose: dict[str, tuple[str, int]] = {}  # the same, of the last one that was caused on purpose
        self._expected: Counter[str] = Counter()  # faults on purpose that have not struck yet
        self._cases: dict[str, Case] = {}
        self._news: list[str] = []

    def remembered(self, recovery: int | None) -> Remembered:
        """What must outlive the coordinator; `recovery` is the number of the one that is under way, if one is."""
        return Remembered(
            dict(self._cases),
            {node: tuple(failures) for node, failures in self._failures.items()},
            {node: life for node, (life, number) in self._counted.items() if number == recovery},
            dict(self._expected),
        )

    def take_up(self, known: Remembered) -> None:
        """Go on from what another coordinator knew. Recoveries are numbered anew, from 0: that is the one which was under way."""
        self._cases = dict(known.cases)
        self._failures = {node: deque(failures, maxlen=self._failures_max) for node, failures in known.failures.items()}
        self._counted = {node: (life, 0) for node, life in known.counted.items()}
        self._expected = Counter(known.expected)

    def expect(self, node: str) -> None:
        """A fault on purpose is armed on the node: its next failure says nothing about it."""
        self._expected[node] += 1

    @property
    def expecting(self) -> bool:
        """Whether some fault on purpose is yet to strike, so that what breaks now may be its doing."""
        return self._expected.total() > 0

    def on_purpose(self, node: str, recovery: int) -> bool:
        """Whether the node's failure in this recovery was caused on purpose."""
        return node in self._on_purpose and self._on_purpose[node][1] == recovery

    def failed(self, node: str, life: str, recovery: int, why: str, now: float) -> str:
        """A process or an agent of the node has failed. If that is once too often, the words for it; else empty.

        Args:
            node: whose failure it is.
            life: the incarnation of its agent.
            recovery: the number of the recovery that it belongs to.
            why: the evidence.
            now: the time, s.
        """
        if self._counted.get(node) == (life, recovery):
            return ""
        self._counted[node] = life, recovery
        if self._expected[node]:
            self._expected[node] -= 1
            self._on_purpose[node] = life, recovery
            return ""
        failures = self._failures.setdefault(node, deque(maxlen=self._failures_max))
        failures.append(Failure(now, why[:_REASON_CHARS_MAX]))
        recent = [failure.why for failure in failures if now - failure.when_s < self._window_s]
        if len(recent) < self._failures_max:
            return ""
        text = (
            f"it failed {len(recent)} time{'s' if len(recent) > 1 else ''} within {now - failures[0].when_s:.0f} s ({'; '.join(recent)}), "
            f"and --hot-swap-quarantine-failures is {self._failures_max} in {self._window_s:g} s"
        )
        self.put(node, text, now, now + self._window_s)
        return text

    def put(self, node: str, why: str, now: float, until_s: float | None = None) -> None:
        """The node gets no ranks any more: until then, or until it is released. What is known already stays."""
        if not self.refusal(node, now):
            self._cases[node] = Case(why, until_s)
            self._news.append(node)

    def news(self) -> list[str]:
        """Nodes that were put into quarantine since this was last asked."""
        news, self._news = self._news, []
        return news

    def refusal(self, node: str, now: float) -> str:
        """Why the node gets no ranks, until when, and how to end that, in words; empty if it may have some."""
        case = self._cases.get(node)
        if case is None or (case.until_s is not None and now >= case.until_s):
            return ""
        until = "" if case.until_s is None else f"in {case.until_s - now:.0f} s by itself, or "
        return f"node {node} is in quarantine: {case.why}; it may join again {until}after: deadpool release {node}"

    def release(self, node: str) -> None:
        """Let it out, and count anew."""
        self._failures.pop(node, None)
        self._cases.pop(node, None)

    def all(self, now: float) -> dict[str, str]:
        """Node -> refusal, of those that are in."""
        found = {node: self.refusal(node, now) for node in self._cases}
        return {node: text for node, text in found.items() if text}
