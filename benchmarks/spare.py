"""What a spare costs while it waits: memory and processor time of its processes, beside those of a node that trains.

    python benchmarks/spare.py [--seconds 20]

Two nodes train (TP 2 x DP 2), two more wait, so that each kind is measured twice. Memory is what a process does not share with
others in files (code and libraries are shared, once for all processes of a machine). Here the processes are on one machine; on a
cluster a spare has a node of its own, and what it costs is that node.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import psutil
from jobs import SCRIPT, run_launch
from memory import role, usage
from swaps import MODEL

from megatron.hotswap.cli.launch import Launch
from megatron.hotswap.coordinator.service import Coordinator

#: The first steps of a process are not normal ones.
FIRST_STEP = 20
SPARES = 2
_NEVER = 1_000_000


@dataclass(frozen=True)
class Cost:
    """Of one process while it was watched."""

    cpu_s_per_s: float
    memory_kib: int
    threads: int


class Watch:
    """Looks at every agent and worker of the job twice, some seconds apart; then the job is told to end."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began: dict[psutil.Process, tuple[float, float]] = {}  # when it was first looked at, and its processor time then
        self._until_s = 0.0
        self.costs: dict[str, list[Cost]] = defaultdict(list)  # "spare worker", "training agent", … -> of each

    def __call__(self, coordinator: Coordinator) -> None:
        """Called ten times a second."""
        last = coordinator.recorder.last_step
        warm = sum(agent.free for agent in coordinator.control.agents.values())
        if not self._began and last is not None and last.step >= FIRST_STEP and warm == SPARES:
            self._began = {process: (time.monotonic(), _cpu_s(process)) for process in _processes()}
            self._until_s = time.monotonic() + self._seconds
        elif self._began and not self.costs and time.monotonic() >= self._until_s:
            spares = {agent.node for agent in coordinator.control.agents.values() if agent.spare}
            for process, (since, before) in self._began.items():
                kind = "spare" if process.environ()["DEADPOOL_NODE"] in spares else "training"
                used = usage(process.pid, 0)
                cpu = (_cpu_s(process) - before) / (time.monotonic() - since)
                self.costs[f"{kind} {role(process.cmdline())}"].append(Cost(cpu, used.memory_kib, used.threads))
            coordinator.end_job(0, "all was measured")


def _processes() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if role(p.cmdline()) is not None]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    watch = Watch(options.seconds)
    with tempfile.TemporaryDirectory() as folder:
        argv = [*MODEL.split(), "--train-iters", str(_NEVER)]
        run_launch(Launch(2, 2, SPARES, str(SCRIPT), argv, Path(folder) / "run"), watch)
    costs = watch.costs
    for kind, found in sorted(costs.items()):
        print(f"{kind}: {found}", file=sys.stderr)
    memory = {kind: statistics.median(cost.memory_kib for cost in found) for kind, found in costs.items()}
    cpu = {kind: statistics.median(cost.cpu_s_per_s for cost in found) for kind, found in costs.items()}
    figures = {
        "spare_worker_cpu": {
            "value": round(cpu["spare worker"], 4),
            "note": f"of one core; a worker that trains: {cpu['training worker']:.2f}, four of them on {psutil.cpu_count()} cores",
        },
        "spare_agent_cpu": {
            "value": round(cpu["spare agent"], 4),
            "note": f"of one core; that of a node that trains: {cpu['training agent']:.2f}",
        },
        "spare_worker_vs_training_memory": {
            "value": round(memory["spare worker"] / memory["training worker"], 3),
            "note": f"{memory['spare worker'] / 1024:.0f} MiB a rank, {memory['training worker'] / 1024:.0f} MiB of one that trains a tiny "
            f"model; agents: {memory['spare agent'] / 1024:.0f} and {memory['training agent'] / 1024:.0f} MiB",
        },
    }
    print(json.dumps({**figures, "threads": {kind: [cost.threads for cost in found] for kind, found in costs.items()}}))


if __name__ == "__main__":
    main()
