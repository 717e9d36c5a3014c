"""The batch script of a point: one allocation in which every run of it is made, one after the other.

Its head is that of `deadpool sbatch`, which checks the job too. It is not requeued: what is done stays done, and submitting it again
makes the rest. The runs themselves are started by drive.py, by the srun lines of `deadpool sbatch`.
"""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

from megatron.hotswap.cli.sbatch import BatchJob, wrapped
from megatron.hotswap.errors import UsageError

from .checks import Checked
from .commands import ROOT, hot_swap_command, plain_command
from .sweep import Sweep

#: Assumed, for the time limit only: a job comes to its first step within so many seconds, and a point has this many starts a pair.
_START_S, _STARTS = 240.0, 3
_SLACK = 1.5
_ROUNDED_TO_MIN = 10


def time_limit(sweep: Sweep, checked: Checked) -> str:
    """As Slurm writes it: what the user has said, or half as much again as the plan's steps and some minutes a start take."""
    if sweep.site.time:
        return sweep.site.time
    settings, step = sweep.settings, checked.plan.times.step
    assert step is not None, "a site without data-sheet figures has a time of its own"
    steps = 2 * (settings.fault_step + settings.after)
    minutes = _SLACK * settings.pairs * (steps * step + _STARTS * _START_S) / 60
    hours, left = divmod(_ROUNDED_TO_MIN * math.ceil(minutes / _ROUNDED_TO_MIN), 60)
    return f"{hours:02}:{left:02}:00"


def hours_of(limit: str) -> float:
    """A time limit as Slurm writes it: MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, or DAYS- before hours and what follows.

    Raises:
        UsageError: it is none.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if match is None:
        raise UsageError(f"--time must be as Slurm writes it (90, 1:30:00, 1-12:00:00), got {limit!r}")
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    units = (1.0, 1 / 60, 1 / 3600) if days is not None or len(parts) == 3 else (1 / 60, 1 / 3600)
    return 24 * int(days or 0) + sum(part * unit for part, unit in zip(parts, units, strict=False))


def batch_job(sweep: Sweep, checked: Checked) -> BatchJob:
    """What `deadpool sbatch` would start.

    Raises:
        UsageError: it would refuse.
    """
    site, settings = sweep.site, sweep.settings
    command = hot_swap_command(checked.point, site, settings.fault_step + settings.after)
    ranks = None if site.ask_for_gpus else site.ranks_per_node
    return BatchJob(
        *(command, checked.nodes, settings.spares, settings.spares, site.gpus_per_node, ranks, 1),
        *(time_limit(sweep, checked), f"scaling-{checked.point.name}", 0, site.python),
        directives=list(site.directives),
        setup=list(site.setup),
        container=site.container,
        srun=site.srun,
    )


def batch_script(sweep: Sweep, checked: Checked) -> str:
    """The script of a point.

    Raises:
        UsageError: `deadpool sbatch` refuses such a job.
    """
    job = batch_job(sweep, checked)
    folder = shown(sweep.folder)
    head = [line for line in job.header() if not line.startswith(("--requeue", "--output="))]
    head += ["--no-requeue", f"--output={folder / checked.point.name}/slurm-%j.out"]
    settings, point = sweep.settings, checked.point
    plain = plain_command(point, sweep.site, 0, settings.save_step, Path("CHECKPOINT"))[1:]
    cut = plain.index("--train-iters")
    return _SCRIPT.format(
        directives="\n".join(f"#SBATCH {line}" for line in head),
        point=f"{point.model} on {point.gpus} ranks: {point.grid()}, ZeRO stage {point.zero_stage}, {point.global_batch} sequences of "
        f"{point.sequence} tokens a step (grid and batch: {point.source}).",
        nodes=f"{checked.nodes} nodes train; spares: {settings.spares}. Pairs of runs: {settings.pairs}",
        save_step=settings.save_step,
        fault_step=settings.fault_step,
        command="\n".join(f"# {line.strip()}" for line in wrapped(["pretrain_gpt.py", *plain[:cut]]).splitlines()),
        setup="\n".join(sweep.site.setup) + "\n" if sweep.site.setup else "",
        run=shlex.join([sweep.site.python, "tools/scaling", "run-point", str(folder), point.name]),
    )


def shown(folder: Path) -> Path:
    """Relative to the project where it is inside, as scripts are submitted from there."""
    absolute = folder.absolute()
    return absolute.relative_to(ROOT) if absolute.is_relative_to(ROOT) else absolute


#: Braces that bash is to see are doubled.
_SCRIPT = """#!/bin/bash
# Made by `python tools/scaling layout`; submit it from the folder of the project.
# {point}
{directives}

# {nodes}, in alternating order, on the same nodes:
#   with hot-swap: step {save_step} is the last that is measured, a node is killed in step {fault_step}, a spare takes its ranks;
#   plainly under torchrun: step {save_step} is the last that is measured, it is saved, all is killed, and started again from there.
# What is done is not run again. Both train
{command}
cd "${{SLURM_SUBMIT_DIR:-.}}" || exit 2
{setup}exec {run}
"""
