"""The run directory of a Slurm job, by which its tasks find each other: it is on the file system that all nodes share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..cli.checks import megatron_flags
from ..coordinator.recorder import write_summary
from ..environment import SlurmTask
from ..errors import UsageError
from ..records import read_object, replace_file
from .layout import Layout

_FLAG = "--hot-swap-run-dir"
_REFUSED = "refused.json"
_LAYOUT = "layout.json"


class Refused(msgspec.Struct, frozen=True):
    """refused.json: why this job could not begin, for the tasks that wait for it."""

    life: str
    reason: str


class Told(msgspec.Struct, frozen=True):
    """layout.json: who trains and who is a spare in this life."""

    life: str
    layout: Layout


def life(task: SlurmTask) -> str:
    """What names one life of a job, from one start by Slurm to the next requeue. Every run id begins with it."""
    return f"{task.job}-{task.restarts}"


def is_of_life(run_id: str, task: SlurmTask) -> bool:
    """Whether a run was begun since Slurm last started this job."""
    return run_id.startswith(f"{life(task)}-")


def split_run_dir(argv: Sequence[str], task: SlurmTask) -> tuple[Path, list[str]]:
    """The run directory, and the command line without the flag that gives it. Without that flag every life of a job has a folder of its
    own, under --save or the working directory."""
    given, rest = None, []
    words = iter(argv)
    for word in words:
        if word == _FLAG:
            given = next(words, None)
        elif word.startswith(f"{_FLAG}="):
            given = word.partition("=")[2]
        else:
            rest.append(word)
    if given is not None:
        return Path(given), rest
    save = megatron_flags(argv).save
    return Path(save or ".", "runs", f"slurm-{life(task)}"), rest


def with_run_dir(argv: Sequence[str], run_dir: Path) -> list[str]:
    """The command line of an agent."""
    return [*argv, _FLAG, str(run_dir)]


def refuse(run_dir: Path, task: SlurmTask, reason: str) -> None:
    """Tell the tasks that wait that there will be no job; and the batch script its exit code, or it would have the job requeued."""
    replace_file(run_dir / _REFUSED, msgspec.json.encode(Refused(life(task), reason)))
    write_summary(run_dir, {"exit_code": 2, "ended": reason})


def refusal(run_dir: Path, task: SlurmTask) -> str:
    """Why there will be no job; empty while nobody says so."""
    try:
        said: Refused = read_object(run_dir / _REFUSED, Refused)
    except (OSError, UsageError):
        return ""
    return said.reason if said.life == life(task) else ""


def write_layout(run_dir: Path, task: SlurmTask, layout: Layout) -> None:
    """For tasks that are started later, when Slurm's words may be others: a lost node leaves the job's list."""
    replace_file(run_dir / _LAYOUT, msgspec.json.encode(Told(life(task), layout)))


def read_layout(run_dir: Path, task: SlurmTask) -> Layout | None:
    """What this life of the job began with; None: it has not begun."""
    try:
        told: Told = read_object(run_dir / _LAYOUT, Told)
    except (OSError, UsageError):
        return None
    return told.layout if told.life == life(task) else None


def forget_refusal(run_dir: Path) -> None:
    """A new attempt."""
    (run_dir / _REFUSED).unlink(missing_ok=True)
