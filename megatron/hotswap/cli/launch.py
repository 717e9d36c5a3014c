"""Virtual nodes on this machine: each is one process group, an agent with its workers, that can be killed as one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .. import config
from ..agent.inject import write_down
from ..agent.scratch import sweep
from ..control.messages import Injection
from ..control.state import ControlConfig, Phase
from ..coordinator.job_file import JOB_FILE, Command, announce, running_job, write_command
from ..coordinator.service import Coordinator, Scheduled
from ..coordinator.store import JOURNAL_FILE
from ..coordinator.stores import JOURNAL
from ..environment import AgentEnvironment
from ..errors import UsageError
from ..metrics import FOLDER as METRICS
from ..replication.transports import make_transport
from ..security import files as credentials
from ..security.authority import issue, new_token
from .checks import check_command, check_nodes, flags_added_here, grid_of
from .durable import durable_of
from .networks import NodeNetworks
from .restarts import check_restart

#: What a run leaves at the top of its directory; the next run there replaces it.
_RUN_FILES = ("steps.jsonl", "events.jsonl", "summary.json", "injections.jsonl", "run.png", JOURNAL_FILE)
_REAP_TIMEOUT_S = 10.0
#: Exit code of a job that its user has ended: 128 + SIGINT, as shells have it.
_INTERRUPTED = 130
_SHOW_INTERVAL_S = 0.1
_LOG_LINES_SHOWN = 15


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
    separate_networks: bool = False  # a network namespace for each node, so that its cable can be pulled
    end_lost_nodes: bool = True  # False leaves a frozen node's ghosts alone, as a cluster that cannot reach the node must
    faults: list[Scheduled] = field(default_factory=list)
    on_failure: Literal["swap", "restart"] = "swap"

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    @property
    def command(self) -> Command:
        """What its agents run."""
        flags = ["--hot-swap", "--hot-swap-run-dir", str(self.run_dir), "--hot-swap-on-failure", self.on_failure]
        return Command(self.script, [*self.argv, *flags], os.getcwd(), self.ranks_per_node)


class VirtualNodes:
    """The process groups. Whatever happens, `end` leaves none."""

    def __init__(self, launch: Launch, coordinator: str, run_id: str, networks: NodeNetworks | None = None) -> None:
        self.networks = networks
        self._launch = launch
        self._place = (coordinator, run_id)
        self._processes: dict[str, list[subprocess.Popen[bytes]]] = {}
        self._over = False

    def start(self, node: str) -> None:
        """Bring a node up (again), unless the job is over."""
        if self._over:
            return
        command = self._launch.command
        place = AgentEnvironment(*self._place, node=node, workers=command.workers, launcher_pid=os.getpid())
        within = [] if self.networks is None else self.networks.command(node)
        with open(self.log(node), "ab") as out:
            process = subprocess.Popen(
                [*within, sys.executable, "-m", "megatron.hotswap", command.script, *command.argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                # Unbuffered: what a worker has printed when it is killed must be in its log.
                env={**os.environ, "PYTHONUNBUFFERED": "1", **place.export()},
                start_new_session=True,
            )
        self._processes.setdefault(node, []).append(process)

    def log(self, node: str) -> Path:
        """Where an agent's own words go."""
        return self._launch.run_dir / "logs" / f"agent-{node}.log"

    def ended(self) -> dict[str, int]:
        """Nodes whose agents have all ended by themselves, with the last one's exit code."""
        codes = {node: [p.poll() for p in processes] for node, processes in self._processes.items()}
        return {node: code[-1] for node, code in codes.items() if code and code[-1] is not None and None not in code}

    def host_memory_bytes(self) -> dict[str, int]:
        """Shared memory that each node's agent holds for snapshots, own and others'. Read from the kernel."""
        return {node: sum(slot_bytes(p.pid) for p in processes) for node, processes in self._processes.items()}

    def kill(self, node: str) -> None:
        """End whatever is left of a node: its ghosts too, frozen ones included."""
        for process in self._processes.pop(node, []):
            _kill_group(process)
        sweep()

    def end(self) -> None:
        """End all nodes; none starts after this."""
        self._over = True
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


def slot_bytes(pid: int) -> int:
    """Sizes of the slots (snapshot/slots.py names them) among a process's open files. Python's mmap keeps each open once more."""
    sizes: dict[int, int] = {}  # by inode
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if "deadpool-slots" in os.readlink(fd):
                    sizes[fd.stat().st_ino] = fd.stat().st_size
    return sum(sizes.values())


async def run(
    launch: Launch,
    show: Callable[[Coordinator], None] = lambda c: None,
    started: Callable[[ControlConfig, VirtualNodes], None] = lambda c, n: None,
) -> int:
    """Run the job; returns its exit code. Ctrl-C (or SIGTERM) ends everything.

    Args:
        launch: what to run.
        show: called ten times a second to show progress, and once more when all has ended.
        started: called once, when the nodes have been started.
    """
    flags = config.parse(launch.argv)
    if flags.store != JOURNAL:
        raise UsageError(
            f"--hot-swap-store {flags.store} is for jobs of several machines; all of this one, its coordinator too, is on this machine: "
            "leave the flag away here, and give it under Slurm"
        )
    control = prepare(launch)
    shown = credentials.read(launch.run_dir, "agent", control.run_id)
    await make_transport(flags, shown, launch.host).check()
    networks = NodeNetworks() if launch.separate_networks else None
    try:
        return await _run(launch, flags, control, networks, show, started)
    finally:
        if networks is not None:
            networks.close()


async def _run(
    launch: Launch,
    flags: config.HotSwapConfig,
    control: ControlConfig,
    networks: NodeNetworks | None,
    show: Callable[[Coordinator], None],
    started: Callable[[ControlConfig, VirtualNodes], None],
) -> int:
    coordinator = Coordinator.with_journal(control, launch.run_dir, launch.faults)
    address = await coordinator.start(launch.host if networks is None else networks.address, launch.port)
    announce(launch.run_dir, address, control.run_id)
    if flags.metrics_port:
        await coordinator.serve_metrics(flags.metrics_address, flags.metrics_port, address.rsplit(":", 1)[0])
    nodes = VirtualNodes(launch, address, control.run_id, networks)
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted.set)
    watchers = [loop.create_task(_watch_lost(coordinator, nodes, launch))]
    if networks is not None:
        coordinator.cables = asyncio.Queue()
        watchers.append(loop.create_task(_watch_cables(coordinator.cables, networks, launch.run_dir)))
    try:
        for index in range(launch.nodes + launch.spares):
            nodes.start(f"node{index}")
        started(control, nodes)
        await _until_over(launch, coordinator, interrupted, nodes, show)
    finally:
        for watcher in watchers:
            watcher.cancel()
        coordinator.end_job(_INTERRUPTED, "interrupted")  # nodes that are ended here are no losses
        if not interrupted.is_set():
            await nodes.wait()
        nodes.end()
        await coordinator.stop()
        (launch.run_dir / JOB_FILE).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            credentials.forget(launch.run_dir)
        show(coordinator)
    assert coordinator.control.exit_code is not None
    return coordinator.control.exit_code


def prepare(launch: Launch) -> ControlConfig:
    """Everything that can be refused before a process starts, and an empty run directory.

    Raises:
        UsageError: says what is wrong.
    """
    control = control_of(launch, secrets.token_hex(8))
    _empty_run_dir(launch.run_dir)
    issue(launch.run_dir, control.run_id, token=control.token)
    write_command(launch.run_dir, launch.command)
    return control


def control_of(launch: Launch, run_id: str) -> ControlConfig:
    """What the core must know of a job, once its command has been checked.

    Raises:
        UsageError: says what is wrong.
    """
    check_nodes(launch.nodes, launch.ranks_per_node, launch.spares)
    check_command(launch.script, launch.argv, launch.world_size)
    flags_added_here(launch.argv)
    restarts = launch.on_failure == "restart"
    if restarts:
        check_restart(launch.argv, launch.faults, launch.separate_networks)
    hotswap = config.parse([*launch.argv, "--hot-swap-run-dir", str(launch.run_dir)])
    return ControlConfig(
        run_id=run_id,
        token=new_token(),
        grid=grid_of(launch.argv, launch.world_size),
        nodes=launch.nodes,
        spares=launch.spares,
        lease_s=hotswap.lease_s,
        heartbeat_interval_s=hotswap.heartbeat_interval_s,
        halt_timeout_s=hotswap.halt_timeout_s,
        long_work_s=hotswap.long_work_s,
        resume_timeout_s=hotswap.resume_timeout_s,
        wait_for_spare_s=hotswap.wait_for_spare_s,
        respawn_timeout_s=hotswap.respawn_timeout_s,
        respawn_window_s=hotswap.respawn_window_s,
        quarantine_failures=hotswap.quarantine_failures,
        quarantine_window_s=hotswap.quarantine_window_s,
        hang_factor=hotswap.hang_factor,
        hang_min_s=hotswap.hang_min_s,
        replicas=hotswap.replicas,
        interval=hotswap.interval,
        durable=None if restarts else durable_of(launch.argv, launch.world_size, hotswap.keep_durable),
        on_failure=launch.on_failure,
    )


def _empty_run_dir(run_dir: Path) -> None:
    """What an earlier run left there must not be taken for this one's."""
    job = running_job(run_dir)
    if job is not None:
        raise UsageError(
            f"a job (process {job.pid}) runs in {run_dir}; give another --run-dir, or end that job first"
        )
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        clear_run_files(run_dir)
        for path in [*(run_dir / "logs").glob("*.log"), *(run_dir / METRICS).glob("*.json")]:
            path.unlink(missing_ok=True)
    except OSError as failure:
        raise UsageError(f"--run-dir {run_dir} cannot be written: {failure}; give a directory of your own") from failure


def clear_run_files(run_dir: Path) -> None:
    """Remove what an earlier run has left at the top of the directory."""
    for name in _RUN_FILES:
        (run_dir / name).unlink(missing_ok=True)


async def _until_over(
    launch: Launch,
    coordinator: Coordinator,
    interrupted: asyncio.Event,
    nodes: VirtualNodes,
    show: Callable[[Coordinator], None],
) -> None:
    while not interrupted.is_set() and not coordinator.ended.is_set():
        await asyncio.sleep(_SHOW_INTERVAL_S)
        show(coordinator)
        if coordinator.control.phase is Phase.GATHERING:
            _end_if_hopeless(launch, coordinator, nodes)


def _end_if_hopeless(launch: Launch, coordinator: Coordinator, nodes: VirtualNodes) -> None:
    """Nodes that die before the job has begun are not waited for: nobody brings them back."""
    ended = nodes.ended()
    gone = set(ended) | {n.data["node"] for n in coordinator.notices if n.kind == "node-lost"}
    if launch.nodes + launch.spares - len(gone) >= launch.nodes:
        return
    node = sorted(gone)[0]
    code = f" with exit code {ended[node]}" if node in ended else ""
    said = _tail(nodes.log(node)) or "it said nothing"
    coordinator.end_job(1, f"node {node} ended{code} before training began: {said}")


def _tail(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-_LOG_LINES_SHOWN:])


async def _watch_lost(coordinator: Coordinator, nodes: VirtualNodes, launch: Launch) -> None:
    """A node that was given up is ended for good (the machine's own fence), and brought back if that is wanted."""
    while True:
        node = await coordinator.lost_nodes.get()
        if launch.end_lost_nodes:
            nodes.kill(node)
        if launch.return_lost_nodes_after_s is not None:
            asyncio.get_running_loop().call_later(launch.return_lost_nodes_after_s, nodes.start, node)


async def _watch_cables(wanted: asyncio.Queue[tuple[str, str]], networks: NodeNetworks, run_dir: Path) -> None:
    """Cables are pulled and put back on this side of them."""
    while True:
        action, node = await wanted.get()
        write_down(Injection(action, "node", node), run_dir)  # type: ignore[arg-type]
        (networks.unplug if action == "unplug" else networks.plug)(node)
