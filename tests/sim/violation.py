"""What both simulations raise when a guarantee does not hold."""

from __future__ import annotations


class Violation(AssertionError):
    """A guarantee does not hold."""


def require(holds: bool, guarantee: str, what: str) -> None:
    """Raise a violation unless it holds."""
    if not holds:
        raise Violation(f"{guarantee}: {what}")
