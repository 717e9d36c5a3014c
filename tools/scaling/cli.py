"""The commands: `sweep` does all of it, `layout`, `submit`, `follow` and `report` a part each; `run-point` is what a batch script calls."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megatron.hotswap.errors import HotSwapError

from . import options as o
from . import stages
from .sweep import load

_SWEEP = "Lay a sweep out, submit it, follow it, and report. Again on the same folder: what is done is not run again."
_LAYOUT = "Check every point and write the sweep's folder with a batch script for each; with --dry-run print all that instead."

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="The scaling study: every point trains with hot-swap and without, loses a node, and is compared.",
)
Folder = Annotated[Path, typer.Argument(metavar="SWEEP", help="The sweep's folder, on a file system that all nodes share.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check every point and print its script; write and submit nothing.")]


@app.command("sweep", help=_SWEEP)
@app.command("layout", help=_LAYOUT)
def lay_out(
    context: typer.Context,
    folder: Folder,
    machine: o.Machine = None,
    only: o.Only = None,
    local: o.Local = False,
    dry_run: DryRun = False,
    pairs: o.Pairs = None,
    warm_up: o.WarmUp = None,
    steps: o.Steps = None,
    after: o.After = None,
    spares: o.Spares = None,
    run_limit_s: o.Limit = None,
    time: o.Time = None,
    account: o.Account = None,
    partition: o.Partition = None,
    qos: o.Qos = None,
    constraint: o.Constraint = None,
    directive: o.Directive = None,
    setup: o.Setup = None,
    interface: o.Interface = None,
    python: o.Python = None,
    container: o.Container = None,
    srun: o.Srun = None,
    megatron: o.Megatron = None,
    ask_for_gpus: o.AskForGpus = None,
    d2h_gb_per_s: o.D2h = None,
    h2h_gb_per_s: o.H2h = None,
    checksum_gb_per_s: o.Checksum = None,
    tflops_per_gpu: o.Tflops = None,
) -> None:
    """Both commands: they take the same flags."""
    site = o.described(
        o.site_of(machine, local),
        *(directive, setup),
        account=account,
        partition=partition,
        qos=qos,
        constraint=constraint,
        time=time,
        interface=interface,
        python=sys.executable if local and python is None else python,
        container=container,
        srun=srun,
        megatron=megatron,
        ask_for_gpus=ask_for_gpus,
    )
    settings = o.settings_of(
        local, pairs=pairs, warm_up=warm_up, steps=steps, after=after, spares=spares, run_limit_s=run_limit_s
    )
    speeds = o.speeds_of(site, d2h_gb_per_s, h2h_gb_per_s, checksum_gb_per_s, tflops_per_gpu)
    laid_out = stages.layout(folder, site, settings, only, speeds, local, dry_run, Console())
    if not dry_run and context.info_name == "sweep":
        raise typer.Exit(stages.run_all(laid_out, only, Console()))


@app.command()
def submit(folder: Folder, only: o.Only = None) -> None:
    """Submit every point that is neither done nor in Slurm's queue (a local sweep: run them here)."""
    raise typer.Exit(stages.submit(load(folder), only, Console()))


@app.command()
def follow(
    folder: Folder, once: Annotated[bool, typer.Option("--once", help="Say where every point stands, and return.")] = False
) -> None:
    """Show where every point stands, until nothing runs or waits any more."""
    stages.follow(load(folder), once, Console())


@app.command()
def report(folder: Folder) -> None:
    """Make tables and plots out of what is there; say what is missing and what failed. Exit code 1: something is missing."""
    raise typer.Exit(stages.report(load(folder), Console()))


@app.command("run-point")
def run_point(folder: Folder, point: Annotated[str, typer.Argument(metavar="POINT", help="Its name.")]) -> None:
    """Make the runs of a point that are not done, within this Slurm allocation or on this machine; batch scripts call it."""
    raise typer.Exit(stages.run_point(load(folder), point))


def main() -> None:
    """The entry. What a user can mend is said in words, with exit code 2."""
    try:
        app(prog_name="python tools/scaling")
    except HotSwapError as failure:
        print(f"scaling: {failure}", file=sys.stderr)
        sys.exit(2)
