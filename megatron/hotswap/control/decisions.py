"""What the core decides. Its caller carries it out. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from . import messages as m


@dataclass(frozen=True)
class Send:
    """Decision: put a message on an agent's connection."""

    incarnation: str
    message: m.FromCoordinator


#: Every kind of line that events.jsonl can have; docs/watching.md says what each means, and tests compare. Notes of agents are lines too.
EVENT_KINDS = frozenset(
    (
        *("assign", "coordinator-back", "copy-damaged", "durable", "durable-refused", "end", "error", "generation-skipped"),
        *("groups-renewed", "ignored"),
        *("inject", "inject-refused", "joined", "joined-as-rank", "last-rung", "loading", "metrics", "metrics-refused", "no-spare"),
        *("node-lost", "not-removed", "peers-differ", "placement", "plan", "push-failed", "recovered", "recovery", "refused"),
        *("replication", "respawned", "resumed", "save", "save-again", "save-failed", "save-refused", "skipped", "spare", "start"),
        *("waiting", "worker-lost", "write-failed", *m.CABLE_FAULTS),
        *("healthy", "health-watch", "quarantined", "release-refused", "released", "unhealthy"),
    )
)


@dataclass(frozen=True)
class Log:
    """Decision: a line for events.jsonl, with the reason and the evidence."""

    kind: str
    reason: str
    data: dict[str, Any] = field(default_factory=dict)


Decision = Send | Log
