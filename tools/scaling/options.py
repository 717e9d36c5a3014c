"""The flags of the commands that lay a sweep out, as values."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from megatron.hotswap.errors import UsageError
from megatron.hotswap.sizing.advice import GB
from megatron.hotswap.sizing.job import Speeds

from .sites import SITES, Site, with_user
from .sweep import Settings

#: Short enough that all points of the CPU sweep take two to three minutes on two cores that are free.
LOCAL_SETTINGS = Settings(pairs=2, warm_up=5, steps=20, after=5, run_limit_s=300.0)

Machine = Annotated[str | None, typer.Option("--machine", help=f"One of {', '.join(SITES)}; default with --local: cpu.")]
Only = Annotated[list[str] | None, typer.Option("--only", metavar="POINT", help="Only this point, such as 6.7B-0064; repeatable.")]
Local = Annotated[bool, typer.Option("--local", help="Run the CPU sweep on this machine, without Slurm.")]
Pairs = Annotated[int | None, typer.Option("--pairs", help="Pairs of runs, with hot-swap and without, of each point (2).")]
WarmUp = Annotated[int | None, typer.Option("--warm-up", help="First steps that are dropped (10).")]
Steps = Annotated[int | None, typer.Option("--steps", help="Steps that are measured (50).")]
After = Annotated[int | None, typer.Option("--after", help="Steps after the kill (5).")]
Spares = Annotated[int | None, typer.Option("--spares", help="Spare nodes (1).")]
Limit = Annotated[float | None, typer.Option("--run-limit-s", help="Longest that one run may take (3600).")]
Time = Annotated[str | None, typer.Option("--time", help="Slurm's time limit of a point; default: worked out.")]
Account = Annotated[str | None, typer.Option("--account", help="As Slurm's: who pays.")]
Partition = Annotated[str | None, typer.Option("--partition", help="As Slurm's: where it waits.")]
Qos = Annotated[str | None, typer.Option("--qos", help="As Slurm's: quality of service.")]
Constraint = Annotated[str | None, typer.Option("--constraint", help="As Slurm's: kind of node.")]
Directive = Annotated[list[str] | None, typer.Option("--directive", metavar="FLAG", help="Another flag of sbatch; repeatable.")]
Setup = Annotated[
    list[str] | None, typer.Option("--setup", metavar="LINE", help="A line of shell at the start, in the place of the machine's own.")
]
Interface = Annotated[str | None, typer.Option("--interface", help="Network interface for snapshots (--hot-swap-interface).")]
Python = Annotated[str | None, typer.Option("--python", help="The interpreter on the nodes.")]
Container = Annotated[str | None, typer.Option("--container", metavar="WORDS", help="What runs python inside a container.")]
Srun = Annotated[str | None, typer.Option("--srun", metavar="FLAGS", help="More of srun's flags.")]
Megatron = Annotated[
    str | None, typer.Option("--megatron", metavar="FLAGS", help="More of Megatron's flags, for every point: '--transformer-impl local'.")
]
AskForGpus = Annotated[
    bool | None, typer.Option("--ask-for-gpus/--no-ask-for-gpus", help="Whether sbatch and srun get --gpus-per-node.")
]
D2h = Annotated[float | None, typer.Option("--d2h-gb-per-s", help="For the check: measured, of each rank, not of data sheets.")]
H2h = Annotated[float | None, typer.Option("--h2h-gb-per-s", help="For the check: measured, of a node, each direction.")]
Checksum = Annotated[float | None, typer.Option("--checksum-gb-per-s", help="For the check: measured, CRC32C on one core.")]
Tflops = Annotated[float | None, typer.Option("--tflops-per-gpu", help="For the check: reached by training.")]


def site_of(machine: str | None, local: bool) -> Site:
    """The machine that is meant.

    Raises:
        UsageError: none is named, or one that is not known, or another one than CPUs for this machine.
    """
    key = machine or ("cpu" if local else None)
    if key is None:
        raise UsageError(f"--machine is missing: one of {', '.join(SITES)}; or --local, for CPUs of this machine")
    if key not in SITES:
        raise UsageError(f"--machine is one of {', '.join(SITES)}; got {key}")
    if local and key != "cpu":
        raise UsageError(f"--local runs the sweep of --machine cpu on this machine, got --machine {key}; leave one of the two out")
    return SITES[key]


def described(site: Site, directives: list[str] | None, setup: list[str] | None, **told: object) -> Site:
    """The site with the user's flags. `told`: partition, qos and so on as Slurm's flags of that name; the rest as the site's fields."""
    slurm = {name: told.pop(name, None) for name in ("account", "partition", "qos", "constraint")}
    flags = [*(f"--{name}={value}" for name, value in slurm.items() if value is not None), *(directives or [])]
    return with_user(site, directives=flags, setup=None if setup is None else tuple(setup), **told)


def settings_of(local: bool, **told: float | None) -> Settings:
    """The settings with what the user has said.

    Raises:
        UsageError: one is too small.
    """
    given = {name: value for name, value in told.items() if value is not None}
    return replace(LOCAL_SETTINGS if local else Settings(), **given)  # type: ignore[arg-type]


def speeds_of(site: Site, d2h_gb: float | None, h2h_gb: float | None, checksum_gb: float | None, tflops: float | None) -> Speeds:
    """The site's speeds, with measured ones in their place: GB a second, and 10^12 operations."""
    measured = {"d2h": (d2h_gb, GB), "h2h": (h2h_gb, GB), "checksum": (checksum_gb, GB), "flops_per_gpu": (tflops, 1e12)}
    return replace(site.speeds(), **{name: value * unit for name, (value, unit) in measured.items() if value is not None})
