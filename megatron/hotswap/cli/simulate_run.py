"""What `deadpool simulate --from-run` takes from a run: costs that were measured, each with where it comes from."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import msgspec

from ..errors import UsageError
from ..records import read_object


class _Recovery(msgspec.Struct):
    kind: str
    total_s: float


class _Copy(msgspec.Struct):
    total_s: float


class _Summary(msgspec.Struct):
    recoveries: list[_Recovery]
    restart_baseline_s: float | None = None
    exposed_stall_fraction: float | None = None
    mean_step_s: float | None = None
    copy: _Copy | None = None


def costs_of_run(run_dir: Path) -> dict[str, tuple[float, str]]:
    """Input name -> (value, origin), of what the run's summary has.

    Raises:
        UsageError: it has no summary, a damaged one, or nothing that could be used.
    """
    path = run_dir / "summary.json"
    try:
        summary: _Summary = read_object(path, _Summary)
    except OSError as failure:
        raise UsageError(f"{path} cannot be read ({failure.strerror}); give the directory of a run that has ended") from None
    found: dict[str, tuple[float, str]] = {}
    swaps = [r.total_s for r in summary.recoveries if r.kind == "swap"]
    if swaps:
        spread = f", {min(swaps):.3g} to {max(swaps):.3g} s" if len(swaps) > 1 else ""
        found["swap_s"] = (fmean(swaps), f"measured: mean of {len(swaps)} swap{'' if len(swaps) == 1 else 's'}{spread}")
    restarts = [r.total_s for r in summary.recoveries if r.kind == "restart"]
    if restarts:
        found["restart_s"] = (fmean(restarts), f"measured: mean of {len(restarts)} restart{'' if len(restarts) == 1 else 's'}")
    elif summary.restart_baseline_s is not None:
        found["restart_s"] = (summary.restart_baseline_s, "measured: restart_baseline_s")
    if summary.mean_step_s is not None:
        found["step_s"] = (summary.mean_step_s, "measured: mean_step_s")
        if summary.exposed_stall_fraction is not None and not restarts:  # a job that restarts takes no snapshots
            found["stall_s"] = (summary.exposed_stall_fraction * summary.mean_step_s, "measured: exposed_stall_fraction x mean_step_s")
    if summary.copy is not None:
        found["commit_s"] = (summary.copy.total_s, "measured: D2H and H2H of a generation, median")
    if not found:
        raise UsageError(f"{path} has no recovery, no restart_baseline_s and no step; give a run that trained, or the costs by flags")
    return {name: (value, f"{origin} ({run_dir})") for name, (value, origin) in found.items()}
