"""Watches a job from outside while it trains, as its user would: Prometheus' target files and `deadpool status --watch --json`."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from hot_swap_job import ROOT
from prometheus_client.parser import text_string_to_metric_families

from megatron.hotswap.coordinator.service import Coordinator

Samples = dict[tuple[str, ...], float]


def scrape(target: str) -> Samples:
    """(name, values of its labels) -> value."""
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


class Watcher:
    """Called by the launcher ten times a second, on the coordinator's own loop: what it reads is served by other threads.

    A context: the command it starts does not outlive it, whatever becomes of the test.
    """

    def __init__(self, run_dir: Path, scraped_from_step: int) -> None:
        self._run_dir, self._scraped_from_step = run_dir, scraped_from_step
        self._asked: subprocess.Popen[str] | None = None
        self.coordinator: Samples = {}
        self.agents: dict[str, Samples] = {}  # by node

    def __call__(self, coordinator: Coordinator) -> None:
        if self._asked is None and coordinator.recorder.last_step is not None:
            command = [sys.executable, "-m", "megatron.hotswap.cli.main", "status", "--run-dir", str(self._run_dir), "--watch", "--json"]
            self._asked = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        last = coordinator.recorder.last_step
        if not self.coordinator and last is not None and last.step >= self._scraped_from_step:
            self._scrape()

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._asked is not None:
            self._asked.kill()
            self._asked.communicate()

    def _scrape(self) -> None:
        """Every target once; all over again at the next call if one does not answer: a node may be lost at this very moment."""
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
        self.coordinator, self.agents = coordinator, agents

    def statuses(self) -> list[dict[str, Any]]:
        """What `deadpool status` printed, once the job is over and it has ended by itself."""
        assert self._asked is not None
        said, errors = self._asked.communicate(timeout=60)
        assert self._asked.returncode == 0, errors
        return [json.loads(line) for line in said.splitlines()]
