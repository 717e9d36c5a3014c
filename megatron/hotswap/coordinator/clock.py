"""The time that the core is told: seconds since 1970 when this process began, and from there on as its steady clock goes.

So it never jumps, and the times that a coordinator has recorded (control/decided.py) mean the same to the next one, on another machine,
as far as the machines' clocks agree: a quarantine ends sooner or later by what they differ. Nothing else rests on that.
"""

from __future__ import annotations

import time

_STEADY_BEGAN_S = time.time() - time.monotonic()


def now() -> float:
    """Seconds."""
    return _STEADY_BEGAN_S + time.monotonic()
