"""Guarantee 10: whatever an agent is told to act upon is recorded, so whoever takes the job up knows it."""

from __future__ import annotations

from typing import Any

from violation import require

from megatron.hotswap.control import messages as m
from megatron.hotswap.control.decided import Decided


class RecordChecks:
    """Called when something is recorded, and when an agent hears an order."""

    def __init__(self) -> None:
        self.memberships: dict[int, list[m.Membership]] = {}  # version -> as it was recorded, again and again while spares come
        self.version = 0
        self.newest: Decided | None = None

    def on_recorded(self, decided: Decided) -> None:
        """The store has it."""
        before = self.newest
        require(decided.version >= self.version, "guarantee 10", f"the record goes back from version {self.version} to {decided.version}")
        if before is not None:
            forgotten = before.fenced.keys() - decided.fenced.keys()
            require(not forgotten, "guarantee 10", f"the record forgets that {forgotten} were given up")
            require(
                before.exit_code is None or decided == before, "guarantee 10", lambda: f"the job has ended: {before}, and then: {decided}"
            )
        self.newest, self.version = decided, decided.version
        if decided.membership is not None:
            self.memberships.setdefault(decided.version, []).append(decided.membership)

    def on_order(self, agent: Any, message: Any, decided: Decided | None) -> None:
        """An agent is about to obey."""
        incarnation = agent.incarnation
        # What a newer record has overtaken on its way is harmless: the halt of it is right behind.
        if isinstance(message, m.Start | m.Resume):
            membership = message.membership
            same = membership in self.memberships.get(membership.version, ())
            self._recorded(agent, message, self.version > membership.version or same)
        elif isinstance(message, m.Halt):
            self._recorded(agent, message, self.version > message.version)
        elif isinstance(message, m.Assign):
            known = self.memberships.get(message.version, ())
            of = {(x.incarnation, x.worker, r) for membership in known for r, x in enumerate(membership.members)}
            mine = all((incarnation, worker, rank) in of for worker, rank in message.ranks.items())
            self._recorded(agent, message, self.version > message.version or mine)
        elif isinstance(message, m.Stop):
            self._recorded(agent, message, decided is not None and decided.exit_code == message.code)
        elif isinstance(message, m.Refused) and "given up" in message.reason:
            self._recorded(agent, message, decided is not None and incarnation in decided.fenced)
        elif isinstance(message, m.WriteSnapshots):
            self._recorded(agent, message, decided is not None and decided.attempts >= message.attempt)

    @staticmethod
    def _recorded(agent: Any, message: Any, holds: bool) -> None:
        require(holds, "guarantee 10", lambda: f"{agent.incarnation} is told what is not recorded: {message}")
