"""What each process group of this rank has begun and finished.

A group survives a recovery only if nothing is under way in it: no collective that one member has entered and another has not, no
message that was sent and never received. Every member counts for itself; `under_way` compares the counts.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Counts(msgspec.Struct, frozen=True):
    """One member's view of its group. `version` is that of the membership in which it was made; ranks are the group's own."""

    version: int
    idle: bool  # everything that was begun here has ended, and ended well
    collectives: int
    sent: dict[int, int]  # to -> how many
    received: dict[int, int]  # from -> how many


def under_way(members: Mapping[int, Counts]) -> str | None:
    """Why the members of a group cannot keep it, or None if they can. `members`: group rank -> its counts."""
    busy = sorted(rank for rank, counts in members.items() if not counts.idle)
    if busy:
        return f"members {busy} have unfinished work in it"
    versions = {counts.version for counts in members.values()}
    if len(versions) > 1:
        return f"its members hold it from different memberships: {sorted(versions)}"
    collectives = {counts.collectives for counts in members.values()}
    if len(collectives) > 1:
        return f"its members have taken part in different numbers of collectives: {sorted(collectives)}"
    for here, mine in members.items():
        for there, theirs in members.items():
            sent, received = mine.sent.get(there, 0), theirs.received.get(here, 0)
            if sent != received:
                return f"of {sent} messages from member {here} to member {there} {received} were received"
    return None


class Ledger:
    """The counts of one group as they grow."""

    __slots__ = ("collectives", "received", "sent", "unfinished")

    def __init__(self) -> None:
        self.collectives = 0
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}
        #: Begun and not yet seen to end well. What failed, or was never waited for, stays in it: such a group is not kept.
        self.unfinished = 0

    def counts(self, version: int, idle: bool) -> Counts:
        """To be compared with the other members'. `idle`: nothing that this ledger does not know of is under way."""
        return Counts(version, idle and not self.unfinished, self.collectives, dict(self.sent), dict(self.received))


#: Name of a process group -> its ledger; one worker process trains one rank.
LEDGERS: dict[str, Ledger] = {}
