"""`python -m megatron.hotswap.cli.follow RUN_DIR …`: shows a job from what its coordinator writes, as `deadpool run` shows its own.

A process apart from the coordinator, since its output may go to somebody who does not read it. It ends when the job has ended.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..control.messages import Member, Membership, StepRecord
from ..control.state import Log, Phase
from ..coordinator.recorder import read_exit_code
from .checks import megatron_flags
from .output import JobConsole
from .show import Show, end_lines, log_of_failure

_INTERVAL_S = 0.2
#: What a decision says of the phase that the job is in after it.
_PHASES = {"start": Phase.TRAINING, "recovery": Phase.HALTING, "plan": Phase.RESUMING, "recovered": Phase.TRAINING, "end": Phase.ENDED}


@dataclass
class _Control:
    phase: Phase = Phase.GATHERING
    version: int = 0
    committed: int = -1
    membership: Membership | None = None
    exit_code: int | None = None
    failed: tuple[str, int] | None = None
    reason: str = ""


@dataclass
class _Recorder:
    last_step: StepRecord | None = None
    recoveries: list[dict[str, Any]] = field(default_factory=list)


class Followed:
    """A job as its files tell it; what show.py wants of a coordinator."""

    def __init__(self, run_dir: Path) -> None:
        self.control = _Control()
        self.recorder = _Recorder()
        self.notices: list[Log] = []
        self._files = {name: _Lines(run_dir / name) for name in ("events.jsonl", "steps.jsonl")}

    def read(self) -> None:
        """Take in what is new."""
        for line in self._files["steps.jsonl"].read():
            self._step(line)
        for line in self._files["events.jsonl"].read():
            self._event(line)

    def _step(self, line: dict[str, Any]) -> None:
        numbers = (line["step"], line["version"], line["consumed_samples"], line["step_s"], line["exposed_stall_s"])
        self.recorder.last_step = StepRecord(*numbers, line["loss_hex"], line["grad_norm_hex"], line.get("tokens", 0))
        self.control.committed, self.control.version = line["step"], line["version"]

    def _event(self, line: dict[str, Any]) -> None:
        kind, reason = line["kind"], line["reason"]
        data = {name: value for name, value in line.items() if name not in ("t", "kind", "reason")}
        control = self.control
        control.phase = _PHASES.get(kind, control.phase)
        if kind == "start":
            nodes, holders = data["nodes"], tuple(map(tuple, data["holders"]))
            per_node = len(holders) // len(nodes)  # ranks are laid onto nodes in order
            control.membership = Membership(1, tuple(Member(n, "", i, "") for n in nodes for i in range(per_node)), holders)
        elif kind == "recovered":
            self.recorder.recoveries.append(data["recovery"])
        elif kind == "end":
            control.exit_code, control.reason = data["code"], reason
            control.failed = tuple(data["failed"]) if data["failed"] else None
        self.notices.append(Log(kind=kind, reason=reason, data=data))


class _Lines:
    """New whole lines of a file that grows, as JSON. A coordinator that takes the job up goes on with the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def read(self) -> list[dict[str, Any]]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._at)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def main() -> int:
    """The command: the run directory, then the training command's flags."""
    run_dir, argv = Path(sys.argv[1]), sys.argv[2:]
    job, console = Followed(run_dir), JobConsole(sys.stdout)
    with Show(run_dir, console, steps_total=megatron_flags(argv).train_iters) as show:
        while (code := read_exit_code(run_dir)) is None:
            time.sleep(_INTERVAL_S)
            job.read()
            show(job)
        job.read()
        show(job)
    lines = end_lines(run_dir, code, job.control.reason or "interrupted", log_of_failure(job.control.failed, run_dir))
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    console.patient.drain()
    return 0


if __name__ == "__main__":
    sys.exit(main())
