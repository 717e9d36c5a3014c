"""The task that keeps the coordinator. It starts, as children: the coordinator, and again if it dies; this node's agent; the display.

It decides nothing itself, so that little can go wrong with it; what it starts ends with it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import subprocess
import sys
import time
from dataclasses import replace

from ..agent.interface import address_of
from ..cli.checks import describe_grid, flags_added_here, grid_of, megatron_flags
from ..cli.durable import describe
from ..cli.launch import Launch, clear_run_files, control_of
from ..control.config import ControlConfig
from ..coordinator.__main__ import LEFT
from ..coordinator.job_file import Command, Job, Setup, read_setup, write_command, write_setup
from ..coordinator.recorder import read_exit_code
from ..coordinator.stores import JOURNAL
from ..errors import UsageError
from ..processes import die_with_parent, end_in_words
from ..replication.transports import protection
from ..security import files as credentials
from ..security.authority import issue
from .batch_script import answer_for_batch_script
from .layout import gpu_variables, place_of
from .run_files import forget_refusal, is_of_life, life, refuse, write_layout
from .task import REQUEUE, Started, wait_for_job

_POLL_S = 0.1
#: A coordinator that dies so often in this time has a fault that starting it again does not mend.
_DEATHS_MAX, _DEATHS_WITHIN_S = 5, 60.0
_ENDS_WITHIN_S = 20.0


def keep(started: Started) -> int:
    """Keep the job's coordinator until the job is over; returns its exit code.

    Raises:
        UsageError: the job cannot begin. The other tasks hear of it too.
    """
    task, run_dir = started.task, started.run_dir
    first = task.node == started.layout.keepers(movable=False)[0]
    address = _address(started)
    if first and not _goes_on(started):
        try:
            forget_refusal(run_dir)
            _prepare(started, address)
            write_layout(run_dir, task, started.layout)
        except UsageError as wrong:
            refuse(run_dir, task, str(wrong))
            raise
    with _Children(started, address) as children:
        if first:
            children.start_coordinator()
            children.start_display()
        job = wait_for_job(run_dir, task)
        if job is None:
            return REQUEUE
        if not first:  # it stands by, until etcd lets it lead
            children.start_coordinator()
        children.start_agent(job)
        code = children.until_over()
    if first:
        with contextlib.suppress(OSError):
            credentials.forget(run_dir)
        answer_for_batch_script(run_dir, task)
    return code


def _goes_on(started: Started) -> bool:
    """Whether this life of the job has begun already, and is not over: this task was started again."""
    try:
        setup = read_setup(started.run_dir)
    except (OSError, UsageError):
        return False
    return is_of_life(setup.control.run_id, started.task) and read_exit_code(started.run_dir) is None


def _address(started: Started) -> str:
    """Where the coordinator is to be reached: the interface that the user has chosen, or the one that leads to where srun runs."""
    towards = f"{started.task.srun_address or started.layout.active[0]}:1"
    return address_of(started.config.interface, towards)


def _prepare(started: Started, address: str) -> None:
    """Everything that can be refused before training, the credentials, and what a coordinator is to know."""
    layout, config = started.layout, started.config
    nodes, spares = (len(names) * layout.tasks_per_node for names in (layout.active, layout.spares))
    launch = Launch(nodes, layout.ranks_per_task, spares, started.script, started.argv, started.run_dir)
    control = control_of(launch, f"{life(started.task)}-{secrets.token_hex(4)}")
    control = replace(control, taken_last=tuple(layout.agents(started.task.node)) if layout.spares else ())
    clear_run_files(started.run_dir)
    issue(started.run_dir, control.run_id, token=control.token)
    write_command(started.run_dir, Command(started.script, started.command[1:], os.getcwd(), layout.ranks_per_task))
    write_setup(started.run_dir, Setup(control, config.store, config.metrics_address, config.metrics_port))
    print("\n".join(head(started, control, address)), flush=True)


def head(started: Started, control: ControlConfig, address: str) -> list[str]:
    """The start-up summary: what was worked out of Slurm's words."""
    task, layout, config = started.task, started.layout, started.config
    grid = describe_grid(grid_of(started.argv, layout.world_size), megatron_flags(started.argv).expert_model_parallel_size)
    tasks = "one task with all ranks of its node" if layout.tasks_per_node == 1 else f"{layout.tasks_per_node} tasks on each"
    ranks = f"{layout.ranks_per_node} rank{'s' if layout.ranks_per_node > 1 else ''} on each"
    lines = [
        f"deadpool: Slurm job {task.job}{f', requeued {task.restarts} times' if task.restarts else ''}: {started.script} on "
        f"{layout.world_size} ranks ({grid})",
        f"  train: {' '.join(layout.active)} ({ranks}, {tasks}); spares: {' '.join(layout.spares) or 'none'}",
        f"  coordinator on {task.node} at {address}; run {control.run_id}; its token and certificates are in {started.run_dir}/credentials",
        f"  lease {config.lease_s:g} s, heartbeat every {config.heartbeat_interval_s:g} s, a rank waits for a spare at most "
        f"{config.wait_for_spare_s:g} s",
        f"  control traffic is encrypted (TLS); snapshots between nodes: {protection(config)}, over "
        f"{config.interface or 'the interface that leads to the coordinator'}",
        *describe(control.durable),
        *fatal_nodes(started),
        f"  files: {started.run_dir}; deadpool status --run-dir {started.run_dir}",
    ]
    added = flags_added_here(started.argv)
    return [*lines, *(["  no GPU here: trains on CPUs over gloo, with " + " ".join(added)] if added else [])]


def fatal_nodes(started: Started) -> list[str]:
    """Every single node whose loss the job would not survive, by name."""
    layout, config, node = started.layout, started.config, started.task.node
    lines = []
    if config.store == JOURNAL:
        lines.append(
            f"  the loss of {node} ends this life of the job: its coordinator runs there, and records its decisions in the run directory "
            "(with --hot-swap-store etcd://… any node may be lost); requeued, the job goes on from its newest durable generation or "
            "checkpoint"
        )
    if not layout.spares:
        lines.append("  there is no spare: after the loss of any node the job is requeued; --hot-swap-spares N keeps N nodes for that")
    return lines or ["  no single node is needed: the job survives the loss of any one"]


class _Children:
    """A context: whatever is still running at its end is ended."""

    def __init__(self, started: Started, address: str) -> None:
        self._started = started
        self._address = address
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._display: subprocess.Popen[bytes] | None = None
        self._agent: subprocess.Popen[bytes] | None = None
        self._deaths: list[float] = []

    def __enter__(self) -> _Children:
        return self

    def __exit__(self, *failure: object) -> None:
        for child in (self._agent, self._coordinator, self._display):
            if child is not None and child.poll() is None:
                child.kill()
                child.wait()

    def start_coordinator(self) -> None:
        """At the node's address and any free port."""
        where = ["--run-dir", str(self._started.run_dir), "--host", self._address]
        self._coordinator = _child("-m", "megatron.hotswap.coordinator", *where)

    def start_display(self) -> None:
        """A process of its own: an output that nobody reads any more must not hold up anything else."""
        self._display = _child("-m", "megatron.hotswap.cli.follow", str(self._started.run_dir), *self._started.argv)

    def start_agent(self, job: Job) -> None:
        """This node's own."""
        task, layout = self._started.task, self._started.layout
        environment = {**place_of(task, layout, job.coordinator, job.run_id).export(), **gpu_variables(task, layout)}
        self._agent = _child("-m", "megatron.hotswap", *self._started.command, environment=environment)

    def until_over(self) -> int:
        """Wait for the job's end; returns its exit code."""
        while (code := self._over()) is None:
            time.sleep(_POLL_S)
        for child in (self._agent, self._display):
            if child is not None:
                _wait(child, _ENDS_WITHIN_S)
        return code

    def _over(self) -> int | None:
        assert self._agent is not None and self._coordinator is not None
        status = self._coordinator.poll()
        if status is None and self._agent.poll() is None:
            return None
        written = read_exit_code(self._started.run_dir)
        if written is not None or status is None:
            return written
        now = time.monotonic()
        self._deaths = [*(t for t in self._deaths if now - t < _DEATHS_WITHIN_S), now]
        again = status != 2 and len(self._deaths) < _DEATHS_MAX
        told = "it is started again, and takes the job up if nobody else has it" if again else "it is not started again"
        how = "has left the job" if status == LEFT else f"{'was ' if status < 0 else ''}{end_in_words(status)}"
        print(f"deadpool: the coordinator {how}; {told}", file=sys.stderr, flush=True)
        if not again:
            return status if status > 0 else 1
        self.start_coordinator()
        return None


def _child(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    )


def _wait(child: subprocess.Popen[bytes], limit_s: float) -> None:
    try:
        child.wait(limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
