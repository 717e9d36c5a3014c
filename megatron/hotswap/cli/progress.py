"""The progress line. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..control.messages import StepRecord


@dataclass(frozen=True)
class Progress:
    """What the line is made of."""

    phase: str
    version: int
    committed: int
    last: StepRecord | None
    steps_total: int | None

    def line(self) -> str:
        """`step 12/60 | loss 3.1416 | 9,800 tokens/s | membership 1 | committed 11 | stall 0.1 % | training`."""
        if self.last is None:
            return f"no step yet | {self.phase}"
        last = self.last
        loss = " ".join(f"{float.fromhex(value):.4f}" for value in last.loss.values()) or "?"
        total = f"/{self.steps_total}" if self.steps_total is not None else ""
        rate = last.tokens / last.seconds if last.seconds > 0 else 0.0
        stall = 100 * last.exposed_stall_s / last.seconds if last.seconds > 0 else 0.0
        return (
            f"step {last.step}{total} | loss {loss} | {rate:,.0f} tokens/s | membership {self.version} | "
            f"committed {self.committed} | stall {stall:.2f} % | {self.phase}"
        )
