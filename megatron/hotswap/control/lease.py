"""The detector of nodes that have gone silent. Pure.

Every agent says something at least once a heartbeat interval. One that has said nothing for a whole lease is given up, unless it was
the listener who stood still: its messages then wait unread, so a pause of the coordinator itself is added to every lease.
"""

from __future__ import annotations

from collections.abc import Collection

from .config import ControlConfig
from .membership import Agent


class Lease:
    """Looks at all agents at every tick."""

    def __init__(self, config: ControlConfig) -> None:
        self._config = config
        self._last_look_s: float | None = None

    def silent(self, agents: Collection[Agent], now: float) -> dict[str, str]:
        """Those whose lease has run out: incarnation -> evidence."""
        self._forgive_own_pause(agents, now)
        lease_s = self._config.lease_s
        return {
            a.incarnation: f"silent for {now - a.last_heard_s:.2f} s, lease {lease_s} s" for a in agents if now - a.last_heard_s > lease_s
        }

    def _forgive_own_pause(self, agents: Collection[Agent], now: float) -> None:
        pause = 0.0 if self._last_look_s is None else now - self._last_look_s
        self._last_look_s = now
        if pause > self._config.heartbeat_interval_s:
            for agent in agents:
                agent.last_heard_s = min(now, agent.last_heard_s + pause)
