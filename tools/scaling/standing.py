"""Where every point of a sweep stands: from its files, and from Slurm's queue where there is one."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table

from megatron.hotswap.errors import UsageError

from .collect import reached
from .points import Point
from .sweep import Sweep

_QUEUE_TIMEOUT_S = 60.0
_LOCAL_INTERVAL_S, _SLURM_INTERVAL_S = 1.0, 15.0
_REASON_WIDTH = 100  # characters


@dataclass(frozen=True)
class Standing:
    """A point's state, in words; `live`: something runs or waits for it."""

    point: str
    state: str
    runs: str
    detail: str
    live: bool


def standings(sweep: Sweep, running: Point | None = None) -> list[Standing]:
    """All of them. `running`: the point that runs on this machine, of a local sweep."""
    queue: dict[str, str] | None = {} if sweep.local else jobs_in_queue()
    return [of_point(sweep, point, queue, point == running) for point in sweep.points]


def of_point(sweep: Sweep, point: Point, queue: dict[str, str] | None, running: bool) -> Standing:
    """One of them. `queue`: job -> what Slurm says of it; None: it does not answer, so a point that was submitted may still run."""
    runs = list(sweep.runs(point))
    results = [(run, run.result()) for run in runs]
    done = sum(result is not None and result.ended == "done" for _, result in results)
    failed = [f"{run.name} failed: {_short(result.reason)}" for run, result in results if result is not None and result.ended == "failed"]
    counted = f"{done}/{len(runs)}"
    if done == len(runs):
        return Standing(point.name, "done", counted, "", False)
    submitted = None if sweep.local else sweep.submitted(point)
    if submitted is not None and queue is None:
        return Standing(point.name, "not known", counted, f"job {submitted.job}: squeue does not answer", True)
    said = queue.get(submitted.job) if submitted is not None and queue is not None else None
    if running or (sweep.local and sweep.is_running(point)) or (said is not None and said.startswith("RUNNING")):
        now = [f"{run.name}: step {reached(run)}" for run, result in results if result is None and run.folder.is_dir()]
        return Standing(point.name, "running", counted, "; ".join([*failed, *now]), True)
    if said is not None and submitted is not None:
        return Standing(point.name, "queued", counted, f"job {submitted.job}: {said}", True)
    if failed:
        return Standing(point.name, "failed", counted, "; ".join(failed), False)
    if submitted is not None:
        output = sweep.folder_of(point) / f"slurm-{submitted.job}.out"
        return Standing(point.name, "ended", counted, f"job {submitted.job} is gone and not all is done: {output}", False)
    return Standing(point.name, "not run" if done == 0 else "partly run", counted, "", False)


def jobs_in_queue() -> dict[str, str] | None:
    """This user's jobs -> their state and its reason. None: Slurm does not answer now.

    Raises:
        UsageError: there is no Slurm here.
    """
    words = ["squeue", "--noheader", f"--user={os.getuid()}", "--format=%i %T (%r)"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_QUEUE_TIMEOUT_S)
    except OSError as failure:
        raise UsageError(f"squeue cannot be run here ({failure}): follow a sweep of a cluster on its login node") from failure
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        return None
    listed = (line.split(None, 1) for line in done.stdout.splitlines())
    return {words[0]: words[1] for words in listed if len(words) > 1}


def show(found: list[Standing]) -> Table:
    """As a table."""
    table = Table(box=None, pad_edge=False)
    for head in ("point", "state", "runs", ""):
        table.add_column(head, no_wrap=head != "")
    for one in found:
        table.add_row(one.point, one.state, one.runs, one.detail)
    return table


def watch(sweep: Sweep, console: Console, over: Callable[[], bool], running: Callable[[], Point | None] = lambda: None) -> None:
    """Show it again and again, until `over` and one last time; where the output is no terminal, a line for each change."""
    interval_s = _LOCAL_INTERVAL_S if sweep.local else _SLURM_INTERVAL_S
    shown: dict[str, Standing] = {}

    def look() -> list[Standing]:
        return standings(sweep, running())

    def tell(found: list[Standing]) -> None:
        for one in found:
            if shown.get(one.point) != one and (one.point in shown or one.live):
                detail = f" ({one.detail})" if one.detail else ""
                console.print(f"{one.point}: {one.state}, {one.runs} runs{detail}", markup=False, highlight=False, soft_wrap=True)
            shown[one.point] = one

    if not console.is_terminal:
        while not over():
            tell(look())
            time.sleep(interval_s)
        return tell(look())
    with Live(show(look()), console=console, auto_refresh=False) as live:
        while not over():
            live.update(show(look()), refresh=True)
            time.sleep(interval_s)
        live.update(show(look()), refresh=True)
    return None


def _short(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= _REASON_WIDTH else line[: _REASON_WIDTH - 1] + "…"
