"""The detector of a job that hangs: every process lives, and no rank comes any further. Pure.

Nobody's exit, silence or error tells of it: a rank that waits for a lock, a device that never answers, two ranks in different
collectives. What tells is that no rank enters another phase of its step (a counter in shared memory, which its agent reads) for a
multiple of what the job's own steps take. Evaluations and checkpoints take as long as they take, and are not judged.

Whose fault it is, the halt that follows finds out: whoever is only waiting gets out of it and reports; who does not is started again.
The rank that is furthest behind is named as evidence: the others wait for it.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from .progress import Progress

#: Steps from which a normal one is known, and of how many last ones it is the median.
_LEARNED_STEPS, _RECENT_STEPS = 5, 50
#: More than this between two looks is a pause of the listener's own, during which it has not listened.
_LONGEST_LOOK_S = 1.0
#: A halt that found nobody stuck doubles the patience, so that a job which is slow for a reason is not halted again and again.
_PATIENCE_FACTOR = 2.0


class HangDetector:
    """Watches one membership at a time."""

    def __init__(self, factor: float, at_least_s: float) -> None:
        """A job hangs if no rank has moved for `factor` normal steps, and at least `at_least_s`."""
        self._factor = factor
        self._at_least_s = at_least_s
        self._patience = 1.0
        self._steps_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._since_verdict = 0  # steps
        self.begin()

    def begin(self) -> None:
        """A new membership trains: its ranks have said nothing yet. How long steps take is remembered."""
        self._progress: dict[int, Progress] = {}
        self.behind: list[int] = []  # of the last hang: ranks that the others wait for, if they are not all
        self._still_s = 0.0
        self._looked_s: float | None = None

    def step_done(self, seconds: float) -> None:
        """A step is complete, and took so long."""
        self._steps_s.append(seconds)
        self._since_verdict += 1
        if self._since_verdict > _LEARNED_STEPS:
            self._patience = 1.0

    def heard(self, progress: Mapping[int, Progress]) -> None:
        """How far these ranks are now."""
        for rank, now in progress.items():
            if self._progress.get(rank) != now:
                self._still_s = 0.0
            self._progress[rank] = now

    @property
    def progress(self) -> Mapping[int, Progress]:
        """How far each rank was when it was last heard, in this membership."""
        return self._progress

    def look(self, ranks: int, now: float) -> str:
        """The evidence of a hang; empty while there is none. Call once a tick, while training."""
        elapsed, self._looked_s = (0.0 if self._looked_s is None else now - self._looked_s), now
        if len(self._steps_s) < _LEARNED_STEPS or len(self._progress) < ranks:
            return ""
        self._still_s += min(elapsed, _LONGEST_LOOK_S)
        if self._still_s <= self._at_least_s * self._patience:  # mostly: then nothing that grows with the job is looked at
            return ""
        if any(p.is_long or p.phase_name == "eval" for p in self._progress.values()):  # these take as long as they take
            self._still_s = 0.0
            return ""
        normal_s = statistics.median(self._steps_s)
        limit_s = max(self._factor * normal_s, self._at_least_s) * self._patience
        if self._still_s <= limit_s:
            return ""
        still_s, self._still_s = self._still_s, 0.0
        self._patience *= _PATIENCE_FACTOR
        self._since_verdict = 0
        return f"no rank came any further for {still_s:.1f} s, and a step takes {normal_s:.2f} s: {self._who()}"

    def _who(self) -> str:
        first = min(self._progress.values(), key=lambda p: (p.step, p.phase))
        behind = [r for r, p in sorted(self._progress.items()) if (p.step, p.phase) == (first.step, first.phase)]
        where = f"in step {first.step}, {first.phase_name or 'none'}"
        self.behind = behind if len(behind) < len(self._progress) else []
        if len(behind) == len(self._progress):
            return f"all are {where}"
        return f"rank(s) {behind} are furthest behind, {where}"
