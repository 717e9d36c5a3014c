"""Jobs in the lab: how one is submitted, what it has come to, and what can be asked of its nodes."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab import Lab

from megatron.hotswap.cli.sbatch import BatchJob

ROOT = Path(__file__).resolve().parents[2]
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 "
    "--global-batch-size 16 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 128 --log-interval 1 --eval-iters 1 "
    "--split 90,9,1 --num-workers 0 --hidden-dropout 0.1 --attention-dropout 0.1 --lr-decay-iters 1000 --eval-interval 100000 "
    "--use-distributed-optimizer --save-interval 100000 --ckpt-format torch"
)
#: A machine on which this runs may have fewer cores than the job has processes.
DEADLINES = "--hot-swap-lease-s 5 --hot-swap-wait-for-spare-s 2 --hot-swap-respawn-timeout-s 300"
_POLL_S = 0.1


def command(iterations: int, save: Path, extra: str = "") -> list[str]:
    """The training command."""
    flags = f"{MODEL} {DEADLINES} --train-iters {iterations} {extra}"
    return [str(ROOT / "pretrain_gpt.py"), *flags.split(), "--save", str(save)]


def until(what: str, there: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """Wait for it; returns what it was."""
    deadline = time.monotonic() + limit_s
    while not (found := there()):
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        time.sleep(_POLL_S)
    return found


class Job:
    """A job of the lab, and the run directory of one of its lives."""

    def __init__(self, lab: Lab, number: str, save: Path, output: Path) -> None:
        self.lab, self.number, self._save, self.output = lab, number, save, output
        self.life = 0

    @property
    def run_dir(self) -> Path:
        """Of its present life."""
        return self._save / "runs" / f"slurm-{self.number}-{self.life}"

    def facts(self) -> dict[str, str]:
        """What Slurm says of it: JobState, NodeList, ExitCode, …"""
        return dict(re.findall(r"(\w+)=(\S*)", self.lab.run("scontrol", "-o", "show", "job", self.number)))

    def state(self) -> str:
        """Such as RUNNING."""
        return self.facts()["JobState"]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Of its present life, so far."""
        return [line for line in _lines(self.run_dir / "events.jsonl") if line["kind"] == kind]

    def steps(self) -> list[tuple[Any, ...]]:
        """What each step was, exactly, so far."""
        return steps_of(self.run_dir)

    def summary(self) -> dict[str, Any] | None:
        """Of its present life, once that is over."""
        try:
            found: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        except (OSError, ValueError):
            return None
        return found

    def begin_again(self, limit_s: float = 60.0) -> None:
        """Once it has been requeued and its nodes are free. By itself Slurm begins such a job after two minutes; at once is too early, for
        a node that has just ended a job takes its new credential for the old one, which is revoked."""
        until("the requeued job", lambda: self.facts()["Restarts"] == str(self.life + 1) and self.state() == "PENDING", limit_s)
        self.life += 1
        self.lab.run("scontrol", "update", f"JobId={self.number}", "StartTime=now+3seconds")

    def goes_on(self, steps: int = 3, limit_s: float = 60.0) -> None:
        """Wait until it has done some more steps."""
        before = len(self.steps())
        until(f"{steps} steps after step {before}", lambda: len(self.steps()) >= before + steps, limit_s)

    def told(self) -> str:
        """All that it has said, for whoever looks at a failure."""
        logs = sorted(self._save.glob("runs/*/logs/*.log"))
        tails = [f"== {p.name}\n" + "\n".join(p.read_text(errors="replace").splitlines()[-8:]) for p in logs]
        return "\n".join([self.output.read_text(errors="replace")[-6000:] if self.output.exists() else "no output", *tails])


def steps_of(run_dir: Path) -> list[tuple[Any, ...]]:
    """What each step of a run was."""
    return [(x["step"], x["loss_hex"], x["grad_norm_hex"], x["consumed_samples"]) for x in _lines(run_dir / "steps.jsonl")]


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text()
    except OSError:
        return []
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def submit(lab: Lab, folder: Path, script: str, *flags: str) -> Job:
    """Submit a script; the job saves below the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.sbatch"
    path.write_text(script)
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    output = folder / "job.out"
    number = lab.run("sbatch", "--parsable", f"--chdir={folder}", f"--output={output}", *flags, str(path))
    return Job(lab, number, folder / "save", output)


def batch(words: list[str], nodes: int, spares: int, spares_min: int, **more: Any) -> BatchJob:
    """The job as `deadpool sbatch` would describe it, on CPUs."""
    ranks = more.pop("ranks_per_node", 1)
    tasks = more.pop("tasks_per_node", 1)
    return BatchJob(words, nodes, spares, spares_min, 0, ranks, tasks, "30", "story", 3, python=sys.executable, **more)


def tasks_on(lab: Lab, node: str) -> list[int]:
    """The processes that srun has started on a node: the children of slurmstepd that are Python."""
    found = []
    for pid in lab.processes(node):
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
            if Path(f"/proc/{parent}/comm").read_text().startswith("slurmstepd") and b"pretrain_gpt.py" in _words(pid):
                found.append(pid)
        except OSError:
            continue
    return found


def training_on(lab: Lab, node: str) -> list[int]:
    """Everything of the job that runs on a node: agents, workers, a coordinator."""
    return [pid for pid in lab.processes(node) if b"python" in _words(pid)]


def coordinators_on(lab: Lab, node: str) -> list[int]:
    """The coordinator's process on a node, if it has one."""
    return [pid for pid in lab.processes(node) if b"megatron.hotswap.coordinator" in _words(pid)]


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def kill(pid: int) -> None:
    """SIGKILL."""
    os.kill(pid, signal.SIGKILL)
