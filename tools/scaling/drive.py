"""The runs of a point, one after the other; each leaves a result.json, and one that fails does not keep the others from being made.

A run with hot-swap trains, loses a node by SIGKILL to all of it in the backward pass of the step after the measured ones, and goes on to
its end. A plain run trains, saves the last measured step, is killed as a whole in the step after it, and started again. What a restart
is charged with begins at the kill and ends with the first new step, less a normal one, as a recovery is: no time to notice that a node
is gone, none in a queue, no step to run again. So it is the best that a checkpoint-restart can do.
"""

from __future__ import annotations

import itertools
import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from jobs import step_times

from megatron.hotswap.cli.client import call
from megatron.hotswap.cli.faults import parse_target
from megatron.hotswap.control.messages import Injection
from megatron.hotswap.errors import UsageError

from .collect import last_step, read_recoveries
from .commands import hot_swap_command, plain_command
from .machine import hardware_here, software_here
from .places import Place, Started, slots_on_this_node
from .points import Point
from .sweep import HOT_SWAP, Restart, Result, Run, Settings, Sweep

_POLL_S = 0.1
_TRACKER = "latest_checkpointed_iteration.txt"
#: The plain job is killed long before these many more steps are done.
_NEVER_REACHED = 100_000
#: What Megatron's log says once a restart has come so far, and its name in `Restart.phases`.
_MARKS = (
    ("start_s", re.compile(r"loading (?:distributed )?checkpoint from")),
    ("load_s", re.compile(r"successfully loaded checkpoint from")),
)
RESTART_PHASES = ("end_s", *(name for name, _ in _MARKS), "first_step_s")
_TAIL_LINES = 15


class RunFailed(Exception):
    """A run measures nothing, and why."""


def run_point(sweep: Sweep, point: Point, place: Place, say: Callable[[str], None]) -> int:
    """Make all runs that are not done; returns how many failed."""
    failed, on = 0, {"nodes": place.nodes, "job": place.job, "hardware": hardware_here(), "software": software_here()}
    for run in sweep.runs(point):
        if run.done():
            say(f"{run.name}: done before")
            continue
        run.clear()
        began = time.time()
        say(f"{run.name}: starts on {' '.join(place.nodes)}, {place.spares} spares")
        found: dict[str, object] = {}
        try:
            found = (hot_swap if run.kind == HOT_SWAP else plain)(sweep, point, run, place)
            ended, reason = "done", ""
        except (RunFailed, UsageError, OSError) as failure:
            ended, reason = "failed", str(failure)
            failed += 1
        took_s = time.time() - began
        about = {"ended": ended, "reason": reason, "began": began, "took_s": took_s, "first": run.first}
        run.write(msgspec.convert({**about, **on, **found}, Result))
        say(f"{run.name}: {ended} after {took_s:.0f} s{': ' + reason if reason else ''}")
    return failed


def hot_swap(sweep: Sweep, point: Point, run: Run, place: Place) -> dict[str, object]:
    """Train, lose a node, train on.

    Returns:
        host_bytes: what the slots of this node take, before anything is lost.

    Raises:
        RunFailed: it did not end well, or not in time, or nothing was lost.
    """
    settings = sweep.settings
    command = hot_swap_command(point, sweep.site, settings.fault_step + settings.after)
    log = run.folder / "hot-swap.log"
    fault = parse_target("kill", f"node:{place.victim}", settings.fault_step, "backward")
    armed, host_bytes = False, 0
    started = place.hot_swap(command, run.run_dir, log)
    try:
        for _ in _while_running(started, settings):
            if not armed and (step := last_step(run.run_dir)) >= 1:
                armed = _arm(run.run_dir, fault, step)
                host_bytes = slots_on_this_node()
        code = started.code()
    finally:
        started.kill()
    if code:
        raise RunFailed(f"the job ended with exit code {code}: {_tail(log)}")
    lost = [node for recovery in read_recoveries(run.run_dir) for node in recovery.nodes_lost]
    if lost != [place.victim]:
        raise RunFailed(f"{place.victim} was to be lost and replaced once, and the job's record says: {', '.join(lost) or 'nothing lost'}")
    return {"host_bytes": host_bytes or None}


def _arm(run_dir: Path, fault: Injection, step: int) -> bool:
    """Have the node killed in a later step; False: the coordinator did not answer, and there is time to ask again.

    Raises:
        RunFailed: there is not.
    """
    try:
        call(run_dir, fault)
    except UsageError as failure:
        assert fault.at_step is not None
        if step + 1 < fault.at_step:
            return False
        raise RunFailed(f"the kill in step {fault.at_step} could not be ordered: {failure}") from failure
    return True


def plain(sweep: Sweep, point: Point, run: Run, place: Place) -> dict[str, object]:
    """Train, save, be killed, be started again up to the first new step.

    Returns:
        restart: the time line of the restart.

    Raises:
        RunFailed: the job ended by itself, or did not come so far in time.
    """
    settings, checkpoint = sweep.settings, run.folder / "checkpoint"
    command = plain_command(point, sweep.site, settings.save_step + _NEVER_REACHED, settings.save_step, checkpoint)
    before, after = run.folder / "before.log", run.folder / "after.log"
    started = place.plain(command, before)
    try:
        for _ in _while_running(started, settings):
            if _saved(checkpoint) >= settings.save_step:
                break
        else:
            raise RunFailed(f"the plain job ended by itself with exit code {started.code()}: {_tail(before)}")
        times = [seconds for step, seconds in step_times(before).items() if settings.warm_up < step <= settings.save_step]
        if not times:
            raise RunFailed(f"{before.name} has no times of steps {settings.warm_up + 1} to {settings.save_step}")
        normal_s = statistics.median(times)
        time.sleep(normal_s / 2)  # so that the kill strikes in mid-step
        killed_at = started.kill()
    finally:
        started.kill()
    restart = _restart(settings, place, command, after, killed_at, normal_s)
    shutil.rmtree(checkpoint, ignore_errors=True)  # of a large model, a terabyte
    return {"restart": restart}


def _restart(settings: Settings, place: Place, command: list[str], log: Path, killed_at: float, normal_s: float) -> Restart:
    """Start the command again; what it says, and when, are the moments."""
    moments = [killed_at, time.time()]
    marks = [pattern for _, pattern in _MARKS]
    started = place.plain(command, log)
    try:
        for _ in _while_running(started, settings):
            text = log.read_text(errors="replace")
            while marks and marks[0].search(text):
                moments.append(time.time())
                del marks[0]
            if settings.fault_step in step_times(log):
                moments.append(time.time())
                break
        else:
            raise RunFailed(f"started again, the plain job ended with exit code {started.code()}: {_tail(log)}")
    finally:
        started.kill()
    if marks:
        raise RunFailed(f"started again, the plain job did not say that it loaded its checkpoint; {log.name} has what it said")
    phases = dict(zip(RESTART_PHASES, (b - a for a, b in itertools.pairwise(moments)), strict=True))
    return Restart(phases, moments[-1] - killed_at - normal_s, normal_s)


def _while_running(started: Started, settings: Settings) -> Iterator[None]:
    """Again and again until it has ended.

    Raises:
        RunFailed: that takes too long.
    """
    deadline = time.monotonic() + settings.run_limit_s
    while started.code() is None:
        if time.monotonic() > deadline:
            raise RunFailed(f"it was ended after {settings.run_limit_s:g} s (--run-limit-s)")
        yield
        time.sleep(_POLL_S)


def _saved(checkpoint: Path) -> int:
    """The step of the newest checkpoint that is whole; 0: none."""
    try:
        return int((checkpoint / _TRACKER).read_text().strip())
    except (OSError, ValueError):
        return 0


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return "\n".join(["", *lines[-_TAIL_LINES:]]) if lines else "it said nothing"
