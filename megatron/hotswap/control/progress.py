"""How far a rank is in its step: what a worker writes into its control block, and heartbeats carry. Pure."""

from __future__ import annotations

import msgspec

#: The moments of a step, and between steps, in which progress is noted and a fault on purpose can strike.
PHASES = ("forward", "backward", "grad-sync", "fence", "optimizer", "param-gather", "d2h", "h2h", "log", "eval", "save")
#: What a training script has announced (long_work.py). Not a place for faults.
LONG_WORK = "long-work"
_SAID = (*PHASES, LONG_WORK)
#: While a rank is there it may keep Python's lock for long.
_LONG = frozenset({"save", LONG_WORK})


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """How far a rank is."""

    step: int
    phase: int  # index into PHASES, plus 1; one more: LONG_WORK; 0: none yet, or halted
    count: int  # grows with every phase that it enters, repeated ones too

    @property
    def phase_name(self) -> str:
        """Of PHASES, or LONG_WORK; empty if it is in none."""
        return _SAID[self.phase - 1] if 0 < self.phase <= len(_SAID) else ""

    @property
    def is_long(self) -> bool:
        """Whether it may not answer for long, and nothing is wrong."""
        return self.phase_name in _LONG

    @staticmethod
    def number(phase: str) -> int:
        """What `phase` is for this name."""
        return _SAID.index(phase) + 1
