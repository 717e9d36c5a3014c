"""What a run leaves behind: steps.jsonl, events.jsonl and summary.json in the run directory.

A step's line is written once it is committed, since a step that is not may be run again; until then it waits here. So
the file has one line a step, each as it finally counted.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from ..agent.inject import last_strike
from ..control.messages import Acknowledged, StepRecord
from ..control.state import Log
from ..records import replace_file

#: A normal step's time is the median of this many last ones.
_NORMAL_STEPS = 50
#: How many lost nodes `deadpool status` can name.
_LOST = 20
#: The copy times in the summary are medians of this many last generations.
_COPIES = 1000


class _Copy(NamedTuple):
    """Seconds that one generation took."""

    d2h_s: float
    h2h_s: float
    total_s: float


class Recorder:
    """Writes the three files of one run."""

    def __init__(self, run_dir: Path, again: bool = False) -> None:
        """`again`: another coordinator has begun the three files, and this one goes on with them."""
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self.last_step: StepRecord | None = None
        self.recoveries: list[dict[str, Any]] = []
        self.lost: deque[tuple[float, str, str]] = deque(maxlen=_LOST)  # (when, node, why)
        self.nodes_lost = 0
        self._waiting: dict[int, tuple[StepRecord, float]] = {}  # with the time of its arrival
        self._lost: dict[int, list[tuple[StepRecord, float]]] = {}  # step -> how and when it was completed before, and gone back behind
        self._recent_s: deque[float] = deque(maxlen=_NORMAL_STEPS)
        self._copying: dict[int, _Copy] = {}  # generations that are not committed yet
        self._copies: deque[_Copy] = deque(maxlen=_COPIES)
        self._written = -1
        self._count = 0
        self._seconds = 0.0
        self._stalled_s = 0.0
        self._skipped = 0
        if again:
            self._take_up()
        mode = "a" if again else "w"
        self._steps: TextIO = open(run_dir / "steps.jsonl", mode, buffering=1)  # noqa: SIM115 - closed by close()
        self._events: TextIO = open(run_dir / "events.jsonl", mode, buffering=1)  # noqa: SIM115

    def _take_up(self) -> None:
        """Count what stands in the files. A line that was cut off while it was written is removed."""
        for line in _whole_lines(self.run_dir / "steps.jsonl"):
            self._written = line["step"]
            self._counted(line["step_s"], line["exposed_stall_s"])
        for line in _whole_lines(self.run_dir / "events.jsonl"):
            self._noted(line["kind"], line["t"], line)
            if line["kind"] == "recovered":
                self.recoveries.append(line["recovery"])

    def step(self, record: StepRecord) -> None:
        """A step is complete on the rank that logs; it may yet be run again."""
        if record.step > self._written:
            self._waiting[record.step] = (record, time.time())
            self.last_step = record

    def copied(self, done: Acknowledged) -> None:
        """A rank's snapshot is at its holder; of a generation the slowest rank counts."""
        if done.d2h_s or done.h2h_s:
            now = _Copy(done.d2h_s, done.h2h_s, done.d2h_s + done.h2h_s)
            self._copying[done.generation] = _Copy(*map(max, now, self._copying.get(done.generation, now)))

    def committed(self, generation: int) -> None:
        """Steps up to this one cannot be lost any more."""
        self._copies.extend(self._copying.pop(g) for g in sorted(g for g in self._copying if g <= generation))
        for step in sorted(s for s in self._waiting if s <= generation):
            self._write(*self._waiting.pop(step))

    def rolled_back(self, generation: int, version: int) -> None:
        """Steps after this one, of memberships before `version`, will be run again."""
        for step in [s for s, (record, _) in self._waiting.items() if s > generation and record.version < version]:
            self._lost.setdefault(step, []).append(self._waiting.pop(step))
        for late in [g for g in self._copying if g > generation]:
            del self._copying[late]

    def _write(self, r: StepRecord, arrived: float) -> None:
        lost = self._lost.pop(r.step, [])
        line = {
            "step": r.step,
            "t": arrived,
            "loss": {k: float.fromhex(v) for k, v in r.loss.items()},
            "loss_hex": r.loss,
            "grad_norm": None if r.grad_norm is None else float.fromhex(r.grad_norm),
            "grad_norm_hex": r.grad_norm,
            "consumed_samples": r.consumed_samples,
            "step_s": r.seconds,
            "exposed_stall_s": r.exposed_stall_s,
            "version": r.version,
            "again": len(lost),
        }
        if lost:
            same = all((x.loss, x.grad_norm) == (r.loss, r.grad_norm) for x, _ in lost)
            line |= {"first_t": lost[0][1], "same_bits": same}
        self._steps.write(json.dumps(line) + "\n")
        self._written = r.step
        self._counted(r.seconds, r.exposed_stall_s)

    def _counted(self, seconds: float, stalled_s: float) -> None:
        self._count += 1
        self._recent_s.append(seconds)
        self._seconds += seconds
        self._stalled_s += stalled_s

    def _noted(self, kind: str, t: float, data: Mapping[str, Any]) -> None:
        if kind == "node-lost":
            self.nodes_lost += 1
            self.lost.append((t, data["node"], data["reason"]))
        self._skipped += kind == "generation-skipped"

    def event(self, log: Log) -> None:
        """A decision, with its reason and evidence."""
        data, now = dict(log.data), time.time()
        self._noted(log.kind, now, {"reason": log.reason, **data})
        if log.kind == "recovered":
            data["recovery"] = {**self._recovery(data["recovery"]), "t": now}
            self.recoveries.append(data["recovery"])
        self._events.write(json.dumps({"t": now, "kind": log.kind, "reason": log.reason, **data}) + "\n")

    def _recovery(self, line: dict[str, Any]) -> dict[str, Any]:
        """The core's time line, in the units of the summary, counted from the fault where its time is known."""
        detected = line["detected_s"]
        struck = last_strike(self.run_dir, line["nodes_struck"], detected)
        since = "fault" if struck is not None else "last sign of life"
        began = struck if struck is not None else line["last_heard_s"]
        # The median: the first steps of a process, and those that evaluate or save in between, are not normal ones.
        normal = statistics.median(self._recent_s) if self._recent_s else 0.0
        later = ("halt_s", "plan_s", "rebuild_s", "restore_s", "first_step_s")
        phases = {"detect_s": detected - began, **{name: line[name] for name in later}}
        return {
            "kind": line["kind"],
            "nodes_lost": line["nodes_lost"],
            "ranks_respawned": line["ranks_respawned"],
            "phases": {k: round(v, 6) for k, v in phases.items()},
            "total_s": round(sum(phases.values()) - normal, 6),
            "normal_step_s": round(normal, 6),
            "counted_from": since,
            "survivors_out_s": round(line["survivors_out_s"], 6),
            "groups": line["groups"],
            "steps_rerun": line["steps_rerun"],
            "bytes_restored": line["bytes_restored"],
            "generation": line["generation"],
            "attempts": line["attempts"],
            "version": line["version"],
            "evidence": line["evidence"],
        }

    def summary(self, code: int, reason: str) -> dict[str, Any]:
        """The summary so far; `deadpool verify` fills in bit_identical, the demo restart_baseline_s."""
        return {
            "steps": self._written if self._count else 0,
            "exit_code": code,
            "ended": reason,
            "bit_identical": None,
            "recoveries": self.recoveries,
            "restart_baseline_s": None,
            "exposed_stall_fraction": self._stalled_s / self._seconds if self._seconds else None,
            "mean_step_s": self._seconds / self._count if self._count else None,
            "generations_skipped": self._skipped,
            "copy": self._copy_times(),
        }

    def _copy_times(self) -> dict[str, Any] | None:
        """How long generations took to be copied and replicated: medians of their slowest ranks."""
        if not self._copies:
            return None
        names = ("d2h_s", "h2h_s", "total_s")
        medians = {name: round(statistics.median(values), 6) for name, values in zip(names, zip(*self._copies, strict=True), strict=True)}
        return {**medians, "generations": len(self._copies)}

    def let_go(self) -> None:
        """The job goes on under another coordinator, which goes on with the files."""
        self._steps.close()
        self._events.close()

    def close(self, code: int, reason: str) -> None:
        """Write what still waits, and the summary."""
        self.committed(1 << 62)
        self.let_go()
        write_summary(self.run_dir, self.summary(code, reason))


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that a process may have died over: what does not end, or cannot be read, is cut off, with all behind it."""
    lines: list[dict[str, Any]] = []
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return lines
    end = 0
    for line in raw.splitlines(keepends=True):
        try:
            lines.append(json.loads(line if line.endswith(b"\n") else b""))
        except ValueError:
            os.truncate(path, end)
            break
        end += len(line)
    return lines


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """Replace summary.json, whole or not at all."""
    replace_file(run_dir / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())


def read_exit_code(run_dir: Path) -> int | None:
    """The exit code of the job that this directory is of, or None: it is not over."""
    try:
        code = json.loads((run_dir / "summary.json").read_text())["exit_code"]
    except (OSError, ValueError, KeyError):
        return None
    return code if isinstance(code, int) else None
