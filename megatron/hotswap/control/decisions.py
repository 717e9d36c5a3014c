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


@dataclass(frozen=True)
class Log:
    """Decision: a line for events.jsonl, with the reason and the evidence."""

    kind: str
    reason: str
    data: dict[str, Any] = field(default_factory=dict)


Decision = Send | Log
