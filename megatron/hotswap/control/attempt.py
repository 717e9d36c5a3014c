"""One durable generation on its way to --save: what has been decided and said of it so far. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from . import messages as m

#: A generation to be taken in training is named this many steps before it is due: an agent must hear of it before the copy is
#: overwritten, two snapshots later. Doubled each time that was too late.
LEAD_STEPS = 2


@dataclass(frozen=True)
class Ending:
    """How the job ends once its last generation is written, or cannot be."""

    code: int
    reason: str
    failed: tuple[str, int] | None = None
    for_want_of_spares: bool = False  # then the job does not end if they come while the generation is being written


@dataclass
class Saving:
    """One generation on its way to --save."""

    ending: Ending | None  # None: in training
    attempt: int = 0
    generation: int | None = None  # None: not chosen yet
    folder: str = ""
    by: Mapping[int, str] = field(default_factory=dict)  # rank -> who writes it
    files: dict[int, m.DurableFile] = field(default_factory=dict)
    manifest_by: str | None = None
    stock: dict[str, Mapping[int, tuple[int, ...]]] = field(default_factory=dict)
    stock_due_s: float = 0.0
    failures: int = 0
    failed_at: set[str] = field(default_factory=set)  # agents that could not write
    retry_s: float | None = None
    lead_steps: int = LEAD_STEPS

    def under_way(self, attempt: int) -> bool:
        """Whether files of this attempt are being written, and count."""
        return attempt == self.attempt and self.generation is not None and self.retry_s is None
