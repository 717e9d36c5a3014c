"""The detector of those who have gone silent: of agents to the coordinator, and of the coordinator to an agent. Pure.

Everyone says something at least once a heartbeat interval. Who has said nothing for a whole lease is given up, unless it was the
listener who stood still: what was said meanwhile waits unread. A listener on a busy machine stands still often, and for seconds,
so silence is not the time since the last word but the time *listened* since then: of the time between two looks only what the
listener may take to come back counts, and after a real pause there is always a heartbeat interval more, in which to read first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from .config import ControlConfig
from .membership import Agent

#: How many leases an agent waits for the coordinator. More than the coordinator waits for it: one silent node is replaced, but when
#: the coordinator stands still for a moment all nodes hear nothing at once, and would end the job together. A node that was given up
#: does no harm meanwhile: its version is over, so its messages and snapshots are refused, and no collective of its ranks goes on.
COORDINATOR_LEASES = 3


class _Silence(NamedTuple):
    heard_s: float  # the last word that this counts from
    listened_s: float


class Listener:
    """Looks at the clock again and again, every `turn_s` or sooner. A look that comes a whole turn late or more ends a pause."""

    def __init__(self, lease_s: float, interval_s: float, turn_s: float) -> None:
        self.lease_s = lease_s
        self._interval_s = interval_s
        self._turn_s = turn_s
        self._last_look_s: float | None = None
        self._silences: dict[str, _Silence] = {}

    def look(self, heard_s: Mapping[str, float], now: float) -> list[str]:
        """Who has been silent for longer than the lease, given when each was heard last. Call once a turn."""
        elapsed = 0.0 if self._last_look_s is None else now - self._last_look_s
        self._last_look_s = now
        counted = min(elapsed, self._turn_s)
        most = self.lease_s - self._interval_s if elapsed > 2 * self._turn_s else float("inf")
        before, self._silences = self._silences, {}
        for who, heard in heard_s.items():
            known = before.get(who)
            listened = known.listened_s + counted if known is not None and known.heard_s == heard else min(now - heard, counted)
            self._silences[who] = _Silence(heard, min(listened, most))
        return [who for who, silence in self._silences.items() if silence.listened_s > self.lease_s]


class Lease:
    """Looks at all agents at every tick, of which there are several in a heartbeat interval."""

    def __init__(self, config: ControlConfig) -> None:
        self._listener = Listener(config.lease_s, config.heartbeat_interval_s, config.heartbeat_interval_s / 2)

    def doubtful(self, agents: Collection[Agent], now: float) -> bool:
        """Whether somebody may be given up soon. The caller then makes sure, before the next tick, that it hears at all."""
        return any(now - agent.last_heard_s > self._listener.lease_s / 2 for agent in agents)

    def silent(self, agents: Collection[Agent], now: float) -> dict[str, str]:
        """Those whose lease has run out: incarnation -> evidence."""
        heard_s = {a.incarnation: a.last_heard_s for a in agents}
        lease_s = self._listener.lease_s
        return {who: f"silent for {now - heard_s[who]:.2f} s, lease {lease_s} s" for who in self._listener.look(heard_s, now)}
