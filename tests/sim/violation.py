"""What both simulations raise when a guarantee does not hold."""

from __future__ import annotations

from collections.abc import Callable


class Violation(AssertionError):
    """A guarantee does not hold."""


def require(holds: bool, guarantee: str, what: str | Callable[[], str]) -> None:
    """Raise a violation unless it holds. Where words would cost more than the check, `what` is called for them."""
    if not holds:
        raise Violation(f"{guarantee}: {what if isinstance(what, str) else what()}")
