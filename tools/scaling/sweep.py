"""A sweep's folder: what is to be run, and what has been.

    SWEEP/sweep.json                      site, settings, points: written by `layout`, added to by another `layout`
    SWEEP/POINT/job.sbatch                the batch script of a point
    SWEEP/POINT/running                   locked by whoever makes its runs
    SWEEP/POINT/submitted.json            the Slurm job that it was last submitted as
    SWEEP/POINT/pair-K/hot-swap/run/      a run directory of Deadpool's: K = 1, 2, …
    SWEEP/POINT/pair-K/plain/*.log        what the plain command said, before and after it was started again
    SWEEP/POINT/pair-K/KIND/result.json   that the run is over, how it ended, and what only its driver could measure

A run with a result that is no failure is not run again. Everything else is made out of these files each time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from megatron.hotswap.errors import UsageError
from megatron.hotswap.records import read_object, replace_file

from .points import Point
from .sites import Site

VERSION = 1
SWEEP_FILE, RESULT_FILE, SUBMITTED_FILE, SCRIPT_FILE = "sweep.json", "result.json", "submitted.json", "job.sbatch"
_LOCK_FILE = "running"
HOT_SWAP, PLAIN = "hot-swap", "plain"
#: A scheduled fault is armed when training has begun, so it cannot strike in the very first steps.
_MEASURED_MIN = 3


@dataclass(frozen=True)
class Settings:
    """What is done at each point. Steps are counted from 1: `warm_up` are dropped, `steps` are measured, then a node is killed (or the
    plain job), and `after` more are trained.

    Args:
        pairs: of one run with hot-swap and one without, in alternating order.
        spares: nodes more than train.
        run_limit_s: seconds that one run may take, its start included.
    """

    pairs: int = 2
    warm_up: int = 10
    steps: int = 50
    after: int = 5
    spares: int = 1
    run_limit_s: float = 3600.0

    def __post_init__(self) -> None:
        least = {"pairs": 1, "warm_up": 1, "steps": _MEASURED_MIN, "after": 1, "spares": 1, "run_limit_s": 1}
        for name, at_least in least.items():
            if not getattr(self, name) >= at_least:
                raise UsageError(f"--{name.replace('_', '-')} must be at least {at_least}, got {getattr(self, name):g}")

    @property
    def save_step(self) -> int:
        """The last measured step; the plain run's checkpoint is of it."""
        return self.warm_up + self.steps

    @property
    def fault_step(self) -> int:
        """In which a node is killed: the step after the checkpoint, the best case for a restart."""
        return self.save_step + 1


class Restart(msgspec.Struct, frozen=True):
    """A job killed as a whole and started again. `phases`: seconds from one moment to the next, the first from the kill."""

    phases: dict[str, float]
    total_s: float  # from the kill to the end of the first new step, less a normal step
    normal_step_s: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """result.json: a run is over."""

    ended: str  # "done" or "failed"
    reason: str
    began: float  # seconds since the epoch
    took_s: float
    first: bool  # of its pair
    nodes: list[str]
    hardware: str  # of the first node
    software: str
    job: str = ""  # Slurm's number
    host_bytes: int | None = None  # slots of one node, as its kernel says
    restart: Restart | None = None


class Submitted(msgspec.Struct, frozen=True):
    """submitted.json."""

    job: str
    t: float


class _File(msgspec.Struct, frozen=True):
    version: int
    local: bool
    site: Site
    settings: Settings
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Run:
    """One start of a point's job, with hot-swap or without."""

    folder: Path
    pair: int
    kind: str
    first: bool

    @property
    def name(self) -> str:
        """Such as pair-1/plain."""
        return f"pair-{self.pair}/{self.kind}"

    @property
    def run_dir(self) -> Path:
        """Of the run with hot-swap."""
        return self.folder / "run"

    def result(self) -> Result | None:
        """None: it is not over, or was cut off while it was written."""
        try:
            found: Result = read_object(self.folder / RESULT_FILE, Result)
        except (OSError, UsageError):
            return None
        return found

    def done(self) -> bool:
        """Whether it need not be run again."""
        found = self.result()
        return found is not None and found.ended == "done"

    def write(self, result: Result) -> None:
        """It is over."""
        replace_file(self.folder / RESULT_FILE, msgspec.json.encode(result))

    def clear(self) -> None:
        """Begin anew: nothing of an earlier attempt may be taken for this one's."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)


@dataclass(frozen=True)
class Sweep:
    """A laid out sweep."""

    folder: Path  # absolute: jobs run in the project's folder, wherever this was called
    local: bool
    site: Site
    settings: Settings
    points: tuple[Point, ...]

    def folder_of(self, point: Point) -> Path:
        """Where everything of a point is."""
        return self.folder / point.name

    def runs(self, point: Point) -> Iterator[Run]:
        """All runs of a point, in the order in which they are made: who is first changes from pair to pair and from point to point."""
        odd = self.points.index(point)
        for pair in range(1, self.settings.pairs + 1):
            kinds = (HOT_SWAP, PLAIN) if (pair + odd) % 2 else (PLAIN, HOT_SWAP)
            for kind in kinds:
                yield Run(self.folder_of(point) / f"pair-{pair}" / kind, pair, kind, kind == kinds[0])

    def done(self, point: Point) -> bool:
        """Whether nothing of it is to be run any more."""
        return all(run.done() for run in self.runs(point))

    def submitted(self, point: Point) -> Submitted | None:
        """As what it was last submitted."""
        try:
            found: Submitted = read_object(self.folder_of(point) / SUBMITTED_FILE, Submitted)
        except (OSError, UsageError):
            return None
        return found

    @contextlib.contextmanager
    def running(self, point: Point) -> Iterator[None]:
        """While it lasts, nobody else makes this point's runs. A file system without locks says nothing, and is trusted.

        Raises:
            UsageError: somebody does.
        """
        folder = self.folder_of(point)
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / _LOCK_FILE, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"{folder}: another process makes the runs of this point; wait for its end, or end it") from None
            except OSError:
                pass
            yield

    def is_running(self, point: Point) -> bool:
        """Whether somebody makes this point's runs, where the file system tells."""
        try:
            with open(self.folder_of(point) / _LOCK_FILE) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def save(self) -> None:
        """Write sweep.json."""
        content: dict[str, Any] = {
            "version": VERSION,
            "local": self.local,
            "site": asdict(self.site),
            "settings": asdict(self.settings),
            "points": [asdict(point) for point in self.points],
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / SWEEP_FILE, (json.dumps(content, indent=1) + "\n").encode())


def lay_out(folder: Path, site: Site, settings: Settings, points: tuple[Point, ...], local: bool) -> Sweep:
    """The sweep of a folder: a new one, or the one that is there with these points added. Nothing is written.

    What decides how runs wait and how many there are may be another each time: the time limits, sbatch's flags, the number of pairs.
    What decides how a run is made may not.

    Raises:
        UsageError: another sweep is there.
    """
    folder = folder.absolute()
    if not (folder / SWEEP_FILE).exists():
        return Sweep(folder, local, site, settings, points)
    there = load(folder)
    pairs = {
        "place (--local)": (there.local, local),
        "site": (_fixed_site(there.site), _fixed_site(site)),
        "settings": (_fixed_settings(there.settings), _fixed_settings(settings)),
    }
    different = [name for name, (before, now) in pairs.items() if before != now]
    if different:
        raise UsageError(
            f"{folder} has a sweep of another {' and '.join(different)} already: its points could not be compared with these; give another "
            "folder, or the same flags as then (--time, flags of sbatch, --pairs and --run-limit-s may be others)"
        )
    known = [point.name for point in there.points]
    return Sweep(folder, local, site, settings, (*there.points, *(point for point in points if point.name not in known)))


def _fixed_site(site: Site) -> Site:
    return replace(site, time="", directives=())


def _fixed_settings(settings: Settings) -> Settings:
    return replace(settings, pairs=1, run_limit_s=1.0)


def load(folder: Path) -> Sweep:
    """Read it.

    Raises:
        UsageError: there is none, or it is damaged or of another version.
    """
    folder = folder.absolute()
    try:
        found: _File = read_object(folder / SWEEP_FILE, _File)
    except OSError as failure:
        raise UsageError(
            f"{folder} has no sweep ({SWEEP_FILE}: {failure.strerror}); lay one out: python tools/scaling layout FOLDER --machine …"
        ) from failure
    if found.version != VERSION:
        raise UsageError(f"{folder / SWEEP_FILE} is of version {found.version}, this program reads {VERSION}; use the one that wrote it")
    return Sweep(folder, found.local, found.site, found.settings, found.points)
