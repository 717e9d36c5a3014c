"""How a run is started and ended: by srun within a Slurm allocation, or on this machine.

With hot-swap: as the script of `deadpool sbatch` does it, one srun for each node; here as `deadpool run` does it, on virtual nodes.
Plainly: torchrun on every node that trains. Whatever a place has started is gone when its `kill` has returned.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path

import psutil

from megatron.hotswap.cli.launch import slot_bytes
from megatron.hotswap.coordinator.recorder import read_exit_code
from megatron.hotswap.errors import UsageError
from megatron.hotswap.host_list import expand_hosts

from .commands import ROOT
from .sites import Site

_POLL_S = 0.05
_ENDS_WITHIN_S = 30.0
_SLURM_TIMEOUT_S = 60.0
#: A folder of each node's own for temporary files of the plain jobs, in bash.
_SCRATCH = 'export TMPDIR="${TMPDIR:-/tmp}/deadpool-$SLURM_JOB_ID"'
#: What the agent of a node that was killed has left there, in Python.
_SWEEP = "from megatron.hotswap.agent.scratch import sweep; sweep()"
_FIRST_PORT, _PORTS = 20_000, 20_000
#: Exit code where the processes of a job are gone and nobody has said why.
LOST = 75


class Started(ABC):
    """A running job."""

    @abstractmethod
    def code(self) -> int | None:
        """Its exit code; None: it runs."""

    @abstractmethod
    def kill(self) -> float:
        """SIGKILL to all of it, on all nodes; returns when nothing is left, and says when that was ordered (seconds since the epoch)."""


class Place(ABC):
    """Where the runs of a point are made.

    Args:
        nodes: that train, in their order; spares are not among them.
        job: Slurm's number; "" without Slurm.
    """

    def __init__(self, site: Site, nodes: list[str], spares: int, job: str) -> None:
        self.site, self.nodes, self.spares, self.job = site, nodes, spares, job

    @property
    def victim(self) -> str:
        """The node that is killed: not the first one, where the batch script and the plain job's rendezvous are."""
        return self.nodes[1]

    @abstractmethod
    def hot_swap(self, command: list[str], run_dir: Path, log: Path) -> Started:
        """Start a job with hot-swap and spares. `command`: the script and its flags."""

    @abstractmethod
    def plain(self, command: list[str], log: Path) -> Started:
        """Start the same without hot-swap; all ranks write to `log`."""

    @abstractmethod
    def close(self) -> None:
        """Remove temporary files: processes that are killed leave theirs."""


def slots_on_this_node() -> int:
    """Bytes of host memory that an agent on this machine holds for snapshots, own and others'; of several agents, the one with most."""
    me = os.getuid()
    found = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == me:
                found = max(found, slot_bytes(process.pid))
    return found


def environment() -> dict[str, str]:
    """For jobs: this process's, with the project importable, and as many threads a rank as torchrun gives where nobody said."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _popen(words: list[str], log: Path, **variables: str) -> subprocess.Popen[bytes]:
    surroundings = {**environment(), **variables}
    with log.open("ab") as out:
        return subprocess.Popen(
            words, cwd=ROOT, env=surroundings, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )


class _Tree(Started):
    """A process of this machine, and all of its descendants."""

    def __init__(self, process: subprocess.Popen[bytes], patience_s: float = 0.0) -> None:
        self._process, self._patience_s = process, patience_s

    def code(self) -> int | None:
        return self._process.poll()

    def kill(self) -> float:
        ordered = time.time()
        if self._process.poll() is None and self._patience_s:  # `deadpool run` ends what it has started, its nodes' sessions too
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self._patience_s)
        if self._process.poll() is None:
            with contextlib.suppress(psutil.Error):
                root = psutil.Process(self._process.pid)
                everyone = [root, *root.children(recursive=True)]
                for process in everyone:  # the root first: seeing its children die, it might end by itself, and well
                    with contextlib.suppress(psutil.Error):
                        process.kill()
                deadline = time.monotonic() + _ENDS_WITHIN_S
                while any(map(_lives, everyone)) and time.monotonic() < deadline:
                    time.sleep(_POLL_S)
        self._process.wait()
        return ordered


def _lives(process: psutil.Process) -> bool:
    """Dead and not waited for, as the children of a killed launcher are until init comes to it, is over: it holds nothing any more."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class Here(Place):
    """This machine: virtual nodes, ranks that share its cores."""

    def __init__(self, site: Site, count: int, spares: int) -> None:
        super().__init__(site, [f"node{index}" for index in range(count)], spares, "")
        self._scratch = tempfile.TemporaryDirectory(prefix="dp-", ignore_cleanup_errors=True)

    def hot_swap(self, command: list[str], run_dir: Path, log: Path) -> Started:
        run = [self.site.python, "-m", "megatron.hotswap.cli.main", "run", "--run-dir", str(run_dir), "--no-picture"]
        run += ["--nodes", str(len(self.nodes)), "--ranks-per-node", str(self.site.ranks_per_node), "--spares", str(self.spares)]
        return _Tree(_popen([*run, "--", *command], log), patience_s=_ENDS_WITHIN_S)

    def plain(self, command: list[str], log: Path) -> Started:
        ranks = len(self.nodes) * self.site.ranks_per_node
        torchrun = [self.site.python, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        torchrun += ["--nproc-per-node", str(ranks), "--log-dir", str(log.parent / "torchrun")]
        return _Tree(_popen([*torchrun, *command], log, TMPDIR=self._scratch.name))

    def close(self) -> None:
        self._scratch.cleanup()


def node_srun(site: Site, node: str) -> list[str]:
    """srun's words for the agent of one node: those of `deadpool sbatch`, which a test compares."""
    gpus = [f"--gpus-per-node={site.gpus_per_node}"] if site.gpus_per_node else []
    fixed = "--no-kill --kill-on-bad-exit=0 --wait=0 --nodes=1 --ntasks=1 --ntasks-per-node=1"
    return ["srun", *fixed.split(), f"--nodelist={node}", *gpus, *shlex.split(site.srun)]


class Allocation(Place):
    """A Slurm job: its first nodes train, the others are spares."""

    def __init__(self, site: Site, count: int, spares: int) -> None:
        try:
            job, listed = os.environ["SLURM_JOB_ID"], os.environ["SLURM_JOB_NODELIST"]
        except KeyError as missing:
            raise UsageError(
                f"{missing} is not set: run-point is for batch scripts of Slurm (sbatch POINT/job.sbatch); a sweep for this machine is "
                "laid out with --local"
            ) from None
        names = expand_hosts(listed)
        if len(names) < count + spares:
            raise UsageError(f"job {job} has {len(names)} nodes, and this point takes {count} and {spares} spares; submit it again")
        super().__init__(site, names[:count], spares, job)
        self._all = names[: count + spares]
        self._steps = 0

    def hot_swap(self, command: list[str], run_dir: Path, log: Path) -> Started:
        (run_dir / "logs").mkdir(parents=True)
        ranks = [] if self.site.ask_for_gpus else ["--hot-swap-ranks-per-node", str(self.site.ranks_per_node)]
        words = [*shlex.split(self.site.container), self.site.python, *command, "--hot-swap", *ranks]
        words += ["--hot-swap-spares", str(self.spares), "--hot-swap-run-dir", str(run_dir)]
        name = self._step_name("hot-swap")
        tasks = []
        for node in self._all:
            output = [] if node == self._all[-1] else [f"--output={run_dir}/logs/agent-%N-%t.log"]
            tasks.append(_popen([*node_srun(self.site, node), f"--job-name={name}", *output, *words], log))
        return _Step(self.job, name, tasks, run_dir)

    def plain(self, command: list[str], log: Path) -> Started:
        count, name = len(self.nodes), self._step_name("plain")
        gpus = [f"--gpus-per-node={self.site.gpus_per_node}"] if self.site.gpus_per_node else []
        srun = [*self._on_all(), "--kill-on-bad-exit=1", f"--job-name={name}", *gpus, *shlex.split(self.site.srun)]
        port = _FIRST_PORT + (int(self.job) * 31 + self._steps) % _PORTS  # another one each time: the last may not be free yet
        torchrun = [self.site.python, "-m", "torch.distributed.run", "--nnodes", str(count), "--nproc-per-node"]
        torchrun += [str(self.site.ranks_per_node), "--master-addr", self.nodes[0], "--master-port", str(port)]
        words = shlex.join([*shlex.split(self.site.container), *torchrun])
        start = f'{_SCRATCH}; mkdir -p "$TMPDIR"; exec {words} --node-rank "$SLURM_NODEID" {shlex.join(command)}'
        return _Step(self.job, name, [_popen([*srun, "bash", "-c", start], log)], None)

    def close(self) -> None:
        if self._steps:
            python = shlex.join([*shlex.split(self.site.container), self.site.python, "-c", _SWEEP])
            _slurm([*self._on_all(), "--job-name=remove", "bash", "-c", f'{python}; {_SCRATCH}; rm -rf "$TMPDIR"'])

    def _on_all(self) -> list[str]:
        """srun's words for a task on each node that trains."""
        count = len(self.nodes)
        return ["srun", "--no-kill", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={','.join(self.nodes)}"]

    def _step_name(self, kind: str) -> str:
        self._steps += 1
        return f"{kind}-{self._steps}"


class _Step(Started):
    """Job steps of one name, each with the srun that waits for it."""

    def __init__(self, job: str, name: str, tasks: list[subprocess.Popen[bytes]], run_dir: Path | None) -> None:
        self._job, self._name, self._tasks, self._run_dir = job, name, tasks, run_dir

    def code(self) -> int | None:
        """With hot-swap the job's own word counts: srun's exit code is 0 when a node was lost."""
        if self._run_dir is None:
            return self._tasks[0].poll()
        said = read_exit_code(self._run_dir)
        if said is not None:
            self._wait(_ENDS_WITHIN_S)
            return said
        return LOST if all(task.poll() is not None for task in self._tasks) else None

    def kill(self) -> float:
        steps = self._numbers() if self._running() else []  # asked for first: a busy controller takes its time to answer
        ordered = time.time()
        for number in steps:  # by scancel, since the end of an srun is not the end of its tasks
            _slurm(["scancel", "--signal=KILL", number])
        if steps:
            self._wait(_ENDS_WITHIN_S)
        for task in self._tasks:
            if task.poll() is None:
                task.kill()
            task.wait()
        return ordered

    def _running(self) -> bool:
        return any(task.poll() is None for task in self._tasks)

    def _wait(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while self._running() and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _numbers(self) -> list[str]:
        """As Slurm counts: 17.3"""
        listed = _slurm(["squeue", "--steps", "--noheader", f"--jobs={self._job}", "--format=%i %j"])
        steps = [line.strip().split(None, 1) for line in listed.splitlines()]
        return [words[0] for words in steps if words[1:] == [self._name]]


def _slurm(words: list[str]) -> str:
    try:
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False, timeout=_SLURM_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as failure:
        print(f"scaling: {shlex.join(words)}: {failure}", file=sys.stderr, flush=True)
        return ""
    if done.returncode:
        print(f"scaling: {shlex.join(words)}: {done.stderr.strip()}", file=sys.stderr, flush=True)
    return done.stdout
