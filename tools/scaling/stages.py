"""What the commands do, one after the other."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from megatron.hotswap.errors import UsageError
from megatron.hotswap.records import replace_file
from megatron.hotswap.sizing.advice import GB
from megatron.hotswap.sizing.job import Speeds

from . import drive, standing, tables
from .checks import Checked, check_all, nodes_of
from .collect import collect
from .commands import ROOT
from .places import Allocation, Here
from .points import Point, points_of, select
from .script import batch_script, hours_of, shown, time_limit
from .sites import Site
from .sweep import SCRIPT_FILE, SUBMITTED_FILE, Settings, Submitted, Sweep, lay_out

_TABLE_WIDTH = 140  # characters


def layout(
    folder: Path, site: Site, settings: Settings, only: list[str] | None, speeds: Speeds, local: bool, dry_run: bool, console: Console
) -> Sweep:
    """Check every point, show what is to come, and write the folder; with `dry_run` print every script instead.

    Raises:
        UsageError: a point cannot run, or another sweep is in that folder.
    """
    sweep = lay_out(folder, site, settings, points_of(site.key, only), local)
    checked = check_all(sweep.points, site, speeds)
    scripts = {one.point.name: batch_script(sweep, one) for one in checked}
    if dry_run:
        for name, text in scripts.items():
            console.print(f"# ==== {shown(sweep.folder) / name / SCRIPT_FILE}", markup=False, highlight=False, soft_wrap=True)
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    show_checks(sweep, checked, console)
    if dry_run:
        return sweep
    for name, text in scripts.items():
        path = sweep.folder / name / SCRIPT_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    sweep.save()
    say(console, f"laid out: {len(sweep.points)} points in {shown(sweep.folder)}")
    return sweep


def show_checks(sweep: Sweep, checked: list[Checked], console: Console) -> None:
    """What `deadpool plan` says of every point, in one table, and where its figures come from."""
    table = Table(box=None, pad_edge=False)
    sizes = ("GB/GPU", "GB/node", "exposed", "H2H that would do", "checkpoint GB", "")
    heads = ("point", "TP.PP.DP", "ZeRO", "nodes", "time", "step s", *sizes)
    for head in heads:
        table.add_column(head, justify="left" if head in heads[:1] else "right", no_wrap=True)
    for one in checked:
        point, times = one.point, one.plan.times
        table.add_row(
            point.name,
            f"{point.tensor}.{point.pipeline}.{point.data}",
            str(point.zero_stage),
            f"{one.nodes}+{sweep.settings.spares}",
            time_limit(sweep, one),
            _or_dash(times.step, "{:.2f}"),
            _or_dash(one.device_bytes, "{:.1f}", GB),
            f"{one.host_bytes / GB:.3g}",
            "-" if one.exposed_share is None else f"{one.exposed_share:.1%}",
            _or_dash(one.h2h_that_would_do, "{:.2f} GB/s", GB),
            f"{one.checkpoint_bytes / GB:.3g}",
            point.source,
        )
    Console(file=console.file, width=max(console.width, _TABLE_WIDTH)).print(table, highlight=False)
    say(console, "Computed, not measured: `deadpool plan` on each point's command line. Last column: where grid and batch are from.")
    if sweep.local:
        return
    hours = [(one.nodes + sweep.settings.spares) * hours_of(time_limit(sweep, one)) for one in checked]
    say(console, f"Node hours, at most: {sum(hours):.0f}, if every point takes all of its time.")
    if sweep.site.machine is not None:
        say(console, f"Speeds that no flag gave are assumed shares of data-sheet figures: {sweep.site.machine.source}.")
        say(console, "GB/GPU: weights, gradients, optimizer state; activations are not computed. GB/node: host memory for snapshots.")
    if sweep.site.to_check:
        say(console, f"{sweep.site.title}. We have no such machine; check there:")
        for line in sweep.site.to_check:
            say(console, f"  - {line}")


def _or_dash(value: float | None, form: str, unit: float = 1.0) -> str:
    return "-" if value is None else form.format(value / unit)


def say(console: Console, text: str) -> None:
    """A line, as long as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def submit(sweep: Sweep, only: list[str] | None, console: Console) -> int:
    """Submit what is neither done nor in the queue; on this machine, run it. Returns the exit code.

    Raises:
        UsageError: there is no Slurm here, or no such point.
    """
    wanted = [point for point in select(sweep.points, only) if not sweep.done(point)]
    if sweep.local:
        return _run_here(sweep, wanted, console)
    if shutil.which("sbatch") is None:
        raise UsageError(
            "sbatch is not found, so nothing can be submitted from here; submit on a login node, or try the chain on this machine: "
            "python tools/scaling sweep FOLDER --local"
        )
    live = {one.point for one in standing.standings(sweep) if one.live}
    code = 0
    for point in wanted:
        if point.name in live:
            say(console, f"{point.name}: is in the queue already, or may be")
            continue
        words = ["sbatch", "--parsable", str(sweep.folder_of(point) / SCRIPT_FILE)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            say(console, f"{point.name}: not submitted: {done.stderr.strip()}")
            code = 1
            continue
        job = done.stdout.strip().partition(";")[0]  # "123;cluster" where there are several
        replace_file(sweep.folder_of(point) / SUBMITTED_FILE, msgspec.json.encode(Submitted(job, time.time())))
        say(console, f"{point.name}: job {job}")
    return code


def _run_here(sweep: Sweep, points: list[Point], console: Console) -> int:
    """One point after the other, each by a process of its own, as a batch script would run it."""
    code = 0
    for point in points:
        with open(sweep.folder_of(point) / "local.out", "ab") as out:
            words = [sys.executable, str(ROOT / "tools/scaling"), "run-point", str(sweep.folder), point.name]
            # A session of its own: Ctrl-C is for this process, which ends that one.
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
        try:
            standing.watch(sweep, console, lambda p=process: p.poll() is not None, lambda p=point: p)  # type: ignore[misc]
        finally:
            if process.poll() is None:
                process.terminate()  # it ends what it has started
            code = process.wait() or code
    return code


def follow(sweep: Sweep, once: bool, console: Console) -> None:
    """Until nothing runs or waits."""
    if once:
        Console(file=console.file, width=max(console.width, _TABLE_WIDTH)).print(standing.show(standing.standings(sweep)), highlight=False)
        return
    standing.watch(sweep, console, lambda: not any(one.live for one in standing.standings(sweep)))


def report(sweep: Sweep, console: Console) -> int:
    """Tables, plots, and what is missing. Returns 1 where something is."""
    from .plots import draw  # matplotlib takes a second

    found = collect(sweep)
    checked = check_all(sweep.points, sweep.site)
    text = tables.text(sweep, found, checked)
    tables.write(sweep.folder, text, tables.as_json(sweep, found, checked))
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    pictures = draw(sweep, found, checked)
    files = [sweep.folder / name for name in tables.FILES]
    say(console, "\n".join(["", "written:", *(f"  {path}" for path in (*files, *pictures))]))
    return 1 if any(figures.missing for figures in found) else 0


def run_point(sweep: Sweep, name: str) -> int:
    """Within the allocation, or here. Returns 1 where a run failed."""
    (point,) = select(sweep.points, [name])
    count = nodes_of(point, sweep.site)
    place = (Here if sweep.local else Allocation)(sweep.site, count, sweep.settings.spares)
    signal.signal(signal.SIGTERM, _ended)
    try:
        with sweep.running(point):
            return 1 if drive.run_point(sweep, point, place, lambda line: print(f"{name}: {line}", flush=True)) else 0
    finally:
        place.close()


def _ended(number: int, frame: object) -> None:
    """So that what was started is ended too; and once, since that takes a while."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + number)


def run_all(sweep: Sweep, only: list[str] | None, console: Console) -> int:
    """Submit, follow, report. Returns the exit code."""
    submitted = submit(sweep, only, console)
    if not sweep.local:
        follow(sweep, False, console)
    return report(sweep, console) or submitted
