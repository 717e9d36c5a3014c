"""`deadpool verify RUN_A RUN_B`: are two runs the same, bit for bit?

Floats are compared as the hex texts that the trainer's rank wrote, so that equal means equal bits, and a NaN equals
itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..coordinator.recorder import write_summary
from ..errors import UsageError
from ..records import read_lines, read_object

Steps = dict[int, dict[str, Any]]


class StepLine(msgspec.Struct, frozen=True):
    """Of a line of steps.jsonl, what is compared."""

    step: int
    loss_hex: dict[str, str]
    grad_norm_hex: str | None
    consumed_samples: int


@dataclass(frozen=True)
class Comparison:
    """What was found. `difference` is None where the runs are the same."""

    compared: int
    difference: str | None

    @property
    def identical(self) -> bool:
        """Whether nothing differs."""
        return self.difference is None


def read_steps(run_dir: Path) -> Steps:
    """The steps of a run, by number.

    Raises:
        UsageError: the file is missing, empty or damaged.
    """
    path = run_dir / "steps.jsonl"
    try:
        steps: Steps = {line.step: msgspec.structs.asdict(line) for line in read_lines(path, StepLine, "the record of a step")}
    except OSError as failure:
        raise UsageError(
            f"{run_dir} is no run that can be compared: {path} cannot be read ({failure.strerror}); give the "
            "--run-dir of a "
            "job that has trained"
        ) from failure
    if not steps:
        raise UsageError(f"{path} has no step: the job ended before its first one, and there is nothing to compare")
    return steps


def compare(a: Steps, b: Steps, common_only: bool = False) -> Comparison:
    """The first difference in the order of steps, in words.

    Args:
        a: the reference.
        b: the run in question.
        common_only: leave out steps that only one of them has (for a run that began at a checkpoint).
    """
    compared = 0
    for step in sorted(a.keys() | b.keys()):
        if step not in a or step not in b:
            if common_only:
                continue
            missing, there = ("A", "B") if step not in a else ("B", "A")
            return Comparison(
                compared,
                f"step {step} is in run {there} only: run {missing} has steps {_span(a if missing == 'A' else b)}",
            )
        difference = _difference(step, a[step], b[step])
        if difference is not None:
            return Comparison(compared, difference)
        compared += 1
    if not compared:
        return Comparison(0, f"no step is in both: run A has steps {_span(a)}, run B {_span(b)}")
    return Comparison(compared, None)


def _span(steps: Steps) -> str:
    return f"{min(steps)} to {max(steps)}"


def _difference(step: int, a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    names = sorted(a["loss_hex"].keys() | b["loss_hex"].keys())
    pairs = [(name, a["loss_hex"].get(name), b["loss_hex"].get(name)) for name in names]
    pairs.append(("gradient norm", a["grad_norm_hex"], b["grad_norm_hex"]))
    for name, left, right in pairs:
        if left != right:
            return f"step {step}: the {name} differs: {_float(left)} in run A, {_float(right)} in run B"
    left, right = a["consumed_samples"], b["consumed_samples"]
    if left != right:
        return f"step {step}: the consumed samples differ: {left} in run A, {right} in run B"
    return None


def _float(text: str | None) -> str:
    if text is None:
        return "none"
    try:
        return f"{text} ({float.fromhex(text)!r})"
    except (ValueError, OverflowError):
        return f"{text!r}, which is no float in hex"


def verify_runs(run_a: Path, run_b: Path, common_only: bool = False) -> Comparison:
    """Compare, and write `bit_identical` into run B's summary.

    Raises:
        UsageError: one of them cannot be read.
    """
    comparison = compare(read_steps(run_a), read_steps(run_b), common_only)
    path = run_b / "summary.json"
    try:
        summary = read_object(path, dict[str, Any])
    except OSError as failure:
        raise UsageError(
            f"{path} cannot be read ({failure}): it is written when the job ends; is it still running?"
        ) from failure
    summary["bit_identical"] = comparison.identical
    write_summary(run_b, summary)
    return comparison
