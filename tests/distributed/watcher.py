"""Watches a job from outside while it trains, as its user would: Prometheus' target files and `deadpool status --watch --json`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from hot_swap_job import ROOT
from prometheus_client.parser import text_string_to_metric_families

from megatron.hotswap.cli.client import call
from megatron.hotswap.control.messages import Injection
from megatron.hotswap.coordinator.service import Coordinator

Samples = dict[tuple[str, ...], float]


def scrape(target: str) -> Samples:
    """(name, values of its labels) -> value."""
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


class Watcher:
    """Called by the launcher ten times a second, on the coordinator's own loop, which it must not hold up: it reads in a thread.

    A context: neither the thread nor the command that it starts outlives it, whatever becomes of the test.
    """

    def __init__(self, run_dir: Path, scraped_from_step: int, then: Injection) -> None:
        """From that step on every target is read, once; `then` is what happens next to the job."""
        self._run_dir, self._scraped_from_step, self._then = run_dir, scraped_from_step, then
        self._asked: subprocess.Popen[str] | None = None
        self._reading: threading.Thread | None = None
        self.coordinator: Samples = {}
        self.agents: dict[str, Samples] = {}  # by node

    def __call__(self, coordinator: Coordinator) -> None:
        if self._asked is None and coordinator.recorder.last_step is not None:
            command = [sys.executable, "-m", "megatron.hotswap.cli.main", "status", "--run-dir", str(self._run_dir), "--watch", "--json"]
            self._asked = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        last = coordinator.recorder.last_step
        idle = self._reading is None or not self._reading.is_alive()
        if idle and not self.coordinator and last is not None and last.step >= self._scraped_from_step:
            self._reading = threading.Thread(target=self._scrape, name="watcher")
            self._reading.start()

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._asked is not None:
            self._asked.kill()
            self._asked.communicate()
        if self._reading is not None:
            self._reading.join()

    def _scrape(self) -> None:
        """Every target once; all over again later if one does not answer: a node may be lost at this very moment."""
        coordinator: Samples = {}
        agents: dict[str, Samples] = {}
        try:
            for path in (self._run_dir / "metrics").glob("*.json"):
                (found,) = json.loads(path.read_text())
                samples = scrape(found["targets"][0])
                if found["labels"]["part"] == "agent":
                    agents[found["labels"]["node"]] = samples
                else:
                    coordinator = samples
        except OSError:
            return
        self.agents, self.coordinator = agents, coordinator  # the second says that all is here
        call(self._run_dir, self._then)

    def statuses(self) -> list[dict[str, Any]]:
        """What `deadpool status` printed, once the job is over and it has ended by itself."""
        assert self._asked is not None
        said, errors = self._asked.communicate(timeout=60)
        assert self._asked.returncode == 0, errors
        return [json.loads(line) for line in said.splitlines()]
