"""`deadpool run`: what is shown before, while and after a job runs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from ..config import parse
from ..control.state import ControlConfig
from ..coordinator.service import Coordinator
from ..errors import UsageError
from ..replication.transports import protection
from .checks import describe_grid, flags_added_here, grid_of, lease_for_shared_cores, megatron_flags
from .durable import describe
from .faults import parse_scheduled
from .launch import Launch, VirtualNodes, run
from .restarts import describe_restart
from .show import Show, end_lines, log_of_failure

_PICTURE_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class RunOptions:
    """What stands before `--`, but for the launch itself."""

    inject: list[str]
    verbose: bool
    picture: bool


def run_job(launch: Launch, options: RunOptions, console: Console) -> int:
    """Run it; returns the job's exit code.

    Raises:
        UsageError: refused before anything was started.
    """
    if not launch.argv and launch.script.startswith("-"):
        raise UsageError(f"the training script must come first after --, got {launch.script!r}")
    launch = replace(launch, faults=[parse_scheduled(spec, launch.world_size) for spec in options.inject])
    longer_lease = lease_for_shared_cores(launch.argv, launch.world_size)
    launch = replace(launch, argv=[*launch.argv, *longer_lease])
    seen: list[Coordinator] = []
    with Show(launch.run_dir, console, options.verbose, megatron_flags(launch.argv).train_iters) as show:

        def tick(coordinator: Coordinator) -> None:
            seen[:] = [coordinator]
            show(coordinator)

        def started(control: ControlConfig, nodes: VirtualNodes) -> None:
            console.print(_head(launch, control, bool(longer_lease)), markup=False, highlight=False, soft_wrap=True)
            show.started(control, nodes)

        code = asyncio.run(run(launch, tick, started))
    picture = draw(launch.run_dir, console) if options.picture else None
    _say_end(launch, seen[0], code, picture, console)
    return code


def _head(launch: Launch, control: ControlConfig, longer_lease: bool) -> str:
    grid = grid_of(launch.argv, launch.world_size)
    hotswap = parse(launch.argv)
    spares = f"{launch.spares} spare{'' if launch.spares == 1 else 's'}"
    lines = [
        f"deadpool: {launch.script} on {launch.world_size} ranks "
        f"({describe_grid(grid, megatron_flags(launch.argv).expert_model_parallel_size)}), "
        f"{launch.nodes} virtual nodes x {launch.ranks_per_node} ranks, {spares}",
        f"  lease {hotswap.lease_s:g} s, heartbeat every {hotswap.heartbeat_interval_s:g} s, a rank waits for a "
        "spare at most "
        f"{hotswap.wait_for_spare_s:g} s",
    ]
    restarts = launch.on_failure == "restart"
    lines.append(f"  control traffic is encrypted (TLS); snapshots between nodes: {'none' if restarts else protection(hotswap)}")
    if longer_lease:
        lines.append(
            f"  {launch.world_size} ranks share {len(os.sched_getaffinity(0))} cores, where a process may wait seconds for its turn: "
            "hence this lease; choose another one with --hot-swap-lease-s"
        )
    lines += describe_restart(launch.argv) if restarts else describe(control.durable)
    added = flags_added_here(launch.argv)
    if added:
        lines.append("  no GPU here: trains on CPUs over gloo, with " + " ".join(added))
    lines += [
        f"  fault to come: {f.action} {f.scope} of rank {f.rank} in step {f.at_step}, {f.phase}" for f in launch.faults
    ]
    lines.append(
        f"  files: {launch.run_dir}; break something: deadpool inject --run-dir {launch.run_dir} --kill node:node1"
    )
    return "\n".join(lines)


def draw(run_dir: Path, console: Console) -> Path | None:
    """RUN_DIR/run.png, by a process of its own: matplotlib is slow to import, and a picture must never fail a job."""
    command = [sys.executable, "-m", "megatron.hotswap.cli.picture", str(run_dir)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PICTURE_TIMEOUT_S, check=False)
        trouble = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1] if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as failure:
        trouble = str(failure)
    if trouble:
        console.print(f"deadpool: no picture was drawn: {trouble}", markup=False, highlight=False)
        return None
    return run_dir / "run.png"


def _say_end(launch: Launch, coordinator: Coordinator, code: int, picture: Path | None, console: Console) -> None:
    reason = coordinator.control.exit_reason or "interrupted"
    lines = end_lines(launch.run_dir, code, reason, log_of_failure(coordinator.control.failed, launch.run_dir))
    files = ["steps.jsonl", "events.jsonl", "summary.json", "logs/", *([picture.name] if picture else [])]
    lines.append(f"deadpool: files in {launch.run_dir}: {' '.join(files)}")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
