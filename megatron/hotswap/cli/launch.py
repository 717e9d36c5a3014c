"""Virtual nodes on this machine: each is one process group, an agent with its workers, that can be killed as one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .. import config
from ..control.state import ControlConfig
from ..coordinator.service import Coordinator, Scheduled
from ..environment import AgentEnvironment
from .checks import check_command, grid_of

JOB_FILE = "job.json"
_REAP_TIMEOUT_S = 10.0


@dataclass
class Launch:
    """A job to run here."""

    nodes: int
    ranks_per_node: int
    spares: int
    script: str
    argv: list[str]
    run_dir: Path
    host: str = "127.0.0.1"
    port: int = 0
    return_lost_nodes_after_s: float | None = None
    faults: list[Scheduled] = field(default_factory=list)


class VirtualNodes:
    """The process groups. Whatever happens, `end` leaves none."""

    def __init__(self, launch: Launch, coordinator: str, run_id: str, token: str) -> None:
        self._launch = launch
        self._place = (coordinator, run_id, token)
        self._processes: dict[str, list[subprocess.Popen[bytes]]] = {}

    def start(self, node: str) -> None:
        """Bring a node up (again)."""
        launch = self._launch
        place = AgentEnvironment(*self._place, node=node, workers=launch.ranks_per_node)
        flags = ["--hot-swap", "--hot-swap-run-dir", str(launch.run_dir)]
        log = launch.run_dir / "logs" / f"agent-{node}.log"
        with open(log, "ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "megatron.hotswap", launch.script, *launch.argv, *flags],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **place.export()},
                start_new_session=True,
            )
        self._processes.setdefault(node, []).append(process)

    def kill(self, node: str) -> None:
        """End whatever is left of a node: its ghosts too, frozen ones included."""
        for process in self._processes.pop(node, []):
            _kill_group(process)

    def end(self) -> None:
        """End all nodes."""
        for node in list(self._processes):
            self.kill(node)

    async def wait(self) -> None:
        """Until every agent has ended by itself, or the time for that is over."""
        deadline = time.monotonic() + _REAP_TIMEOUT_S
        while time.monotonic() < deadline and any(p.poll() is None for ps in self._processes.values() for p in ps):
            await asyncio.sleep(0.02)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


async def run(launch: Launch, show: Callable[[Coordinator], None] = lambda c: None) -> int:
    """Run the job; returns its exit code. Ctrl-C (or SIGTERM) ends everything.

    Args:
        launch: what to run.
        show: called ten times a second, to show progress.
    """
    check_command(launch.script, launch.argv, launch.nodes * launch.ranks_per_node)
    hotswap = config.parse([*launch.argv, "--hot-swap-run-dir", str(launch.run_dir)])
    control = ControlConfig(
        run_id=secrets.token_hex(8),
        token=secrets.token_hex(16),
        grid=grid_of(launch.argv, launch.nodes * launch.ranks_per_node),
        nodes=launch.nodes,
        spares=launch.spares,
        lease_s=hotswap.lease_s,
        heartbeat_interval_s=hotswap.heartbeat_interval_s,
        halt_timeout_s=hotswap.halt_timeout_s,
        resume_timeout_s=hotswap.resume_timeout_s,
        wait_for_spare_s=hotswap.wait_for_spare_s,
    )
    (launch.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    (launch.run_dir / "injections.jsonl").unlink(missing_ok=True)
    coordinator = Coordinator(control, launch.run_dir, launch.faults)
    address = await coordinator.start(launch.host, launch.port)
    _write_job_file(launch.run_dir, address, control)
    nodes = VirtualNodes(launch, address, control.run_id, control.token)
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted.set)
    watcher = loop.create_task(_watch_lost(coordinator, nodes, launch.return_lost_nodes_after_s))
    try:
        for index in range(launch.nodes + launch.spares):
            nodes.start(f"node{index}")
        await _until_over(coordinator, interrupted, nodes, show)
    finally:
        watcher.cancel()
        if not interrupted.is_set():
            await nodes.wait()
        nodes.end()
        await coordinator.stop()
        (launch.run_dir / JOB_FILE).unlink(missing_ok=True)
    code = coordinator.control.exit_code
    return 130 if code is None else code


async def _until_over(coordinator: Coordinator, interrupted: asyncio.Event, nodes: VirtualNodes, show: Callable[[Coordinator], None]) -> None:
    while not interrupted.is_set() and not coordinator.ended.is_set():
        await asyncio.sleep(0.1)
        show(coordinator)


async def _watch_lost(coordinator: Coordinator, nodes: VirtualNodes, return_after_s: float | None) -> None:
    """A node that was given up is ended for good (the machine's own fence), and brought back as a spare if that is wanted."""
    while True:
        node = await coordinator.lost_nodes.get()
        nodes.kill(node)
        if return_after_s is not None:
            asyncio.get_running_loop().call_later(return_after_s, nodes.start, node)


def _write_job_file(run_dir: Path, address: str, control: ControlConfig) -> None:
    """How `deadpool inject` finds the job; the token is in it, so only the owner may read it."""
    path = run_dir / JOB_FILE
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump({"coordinator": address, "run_id": control.run_id, "token": control.token, "pid": os.getpid()}, file)
