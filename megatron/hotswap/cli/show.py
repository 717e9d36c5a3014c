"""What `deadpool run` shows while a job runs: Megatron's log once, decisions in words, and the progress line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..control.state import ControlConfig, Log, Phase
from .launch import VirtualNodes
from .log_filter import LogFilter
from .log_tail import LogTail
from .narrate import bytes_in_words, narrate, placement_lines, time_line
from .progress import Progress

#: Without a terminal, a progress line this often is enough.
_PLAIN_INTERVAL_S = 5.0
#: Of a traceback: the last frame's place and source line, its marks, and the exception.
_TRACEBACK_LINES = 4
_STYLES = {
    "node-lost": "bold red",
    "worker-lost": "bold red",
    "recovery": "yellow",
    "recovered": "bold green",
    "error": "bold red",
    "no-spare": "bold yellow",
    "last-rung": "bold yellow",
    "durable": "bold green",
    "write-failed": "bold red",
    "save-failed": "bold red",
    "durable-refused": "bold red",
    "unhealthy": "bold red",
    "quarantined": "bold yellow",
}


class Shown(Protocol):
    """What is shown of a job: its coordinator, or what that has written of it (follow.py)."""

    @property
    def control(self) -> Any:
        """Of it: phase, version, committed, membership, exit_code."""

    @property
    def recorder(self) -> Any:
        """Of it: last_step, recoveries."""

    @property
    def notices(self) -> list[Log]:
        """What was decided."""


class Show:
    """A context; call it with the job as often as the display is to be fresh."""

    def __init__(
        self,
        run_dir: Path,
        console: Console,
        verbose: bool = False,
        steps_total: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._tail = LogTail(run_dir / "logs")
        self._filter = LogFilter(verbose)
        self._steps_total = steps_total
        self._clock = clock
        self._began_s = clock()
        self._notices_seen = 0
        self._recoveries_seen = 0
        self._plain_due_s = clock() + _PLAIN_INTERVAL_S
        self._plain_last = ""
        self._memory_shown = False
        self._nodes: VirtualNodes | None = None
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Show:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def started(self, control: ControlConfig, nodes: VirtualNodes) -> None:
        """The nodes have been started."""
        self._nodes = nodes
        self.say(
            f"starting {control.nodes} nodes with {control.ranks_per_node} ranks each and {control.spares} spare"
            f"{'' if control.spares == 1 else 's'}; a node is given up after {control.lease_s:g} s of silence"
        )

    def __call__(self, coordinator: Shown) -> None:
        """Show what is new."""
        over = coordinator.control.phase is Phase.ENDED or coordinator.control.exit_code is not None
        for source, line in self._tail.read(final=over):
            shown = self._filter.take(source, line)
            if shown is not None:
                self._print(Text(shown))
        for notice in coordinator.notices[self._notices_seen :]:
            self._notice(coordinator, notice)
        self._notices_seen = len(coordinator.notices)
        self._memory(coordinator)
        self._progress(coordinator, over)

    def say(self, text: str, style: str = "cyan") -> None:
        """A line of ours, with the seconds since the start."""
        head = f"deadpool {self._clock() - self._began_s:6.1f} s  "
        self._print(Text(head, style="dim").append(text, style=style))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)

    def _notice(self, coordinator: Shown, notice: Log) -> None:
        text = narrate(notice)
        if text is not None:
            self.say(text, _STYLES.get(notice.kind, "cyan"))
        if notice.kind == "start" and coordinator.control.membership is not None:
            for line in placement_lines(coordinator.control.membership):
                self.say(f"  {line}")
        if notice.kind == "recovered":
            self.say(time_line(coordinator.recorder.recoveries[self._recoveries_seen]), _STYLES["recovered"])
            self._recoveries_seen += 1

    def _memory(self, coordinator: Shown) -> None:
        if self._memory_shown or self._nodes is None or coordinator.control.committed < 0:
            return
        self._memory_shown = True
        taken = {node: count for node, count in self._nodes.host_memory_bytes().items() if count}
        if taken:
            self.say("host memory for snapshots: " + ", ".join(f"{n} {bytes_in_words(c)}" for n, c in taken.items()))

    def _progress(self, coordinator: Shown, over: bool) -> None:
        control = coordinator.control
        line = Progress(
            control.phase.value, control.version, control.committed, coordinator.recorder.last_step, self._steps_total
        ).line()
        if self._live is not None:
            self._live.update(Text("" if over else line, style="bold", no_wrap=True, overflow="ellipsis"), refresh=True)
        elif self._clock() >= self._plain_due_s and not over:
            self._plain_due_s = self._clock() + _PLAIN_INTERVAL_S
            if line != self._plain_last:
                self._plain_last = line
                self._print(Text(line))


def end_lines(run_dir: Path, code: int, reason: str, log: Path) -> list[str]:
    """How a job has ended, in words, from its summary. `log` is that of the failure, if there was one."""
    summary = json.loads((run_dir / "summary.json").read_text())
    recoveries, stall = summary["recoveries"], summary["exposed_stall_fraction"]
    lines = []
    if code == 75:
        lines.append(f"deadpool: the job ends to be started again (code 75): {reason}")
    elif code not in (0, 130):
        lines.append(f"deadpool: the job failed: {reason}")
        lines += [f"  {line}" for line in last_traceback(log)]
        lines.append(f"deadpool: its log: {log}")
    lines.append(
        f"deadpool: {'done' if code == 0 else reason if code == 130 else f'exit code {code}'} after step "
        f"{summary['steps']}; "
        f"{len(recoveries)} recover{'y' if len(recoveries) == 1 else 'ies'}"
        + (f" ({', '.join(format(r['total_s'], '.2f') + ' s' for r in recoveries)})" if recoveries else "")
        + (f"; exposed stall {100 * stall:.2f} % of the step time" if stall is not None else "")
        + (f"; {skipped} generations skipped" if (skipped := summary["generations_skipped"]) else "")
    )
    return lines


def log_of_failure(failed: tuple[str, int] | None, run_dir: Path) -> Path:
    """The log of the worker whose failure ended the job, or the folder of all."""
    logs = run_dir / "logs"
    return logs if failed is None else logs / f"{failed[0]}-{failed[1]}.log"


def last_traceback(log: Path) -> list[str]:
    """The last place that a log's last traceback names, and the exception; empty where there is none."""
    if not log.is_file():
        return []
    lines = log.read_text(errors="replace").splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last):")]
    if not starts:
        return []
    frames = [i for i in range(starts[-1], len(lines)) if lines[i].startswith('  File "')]
    return lines[frames[-1] : frames[-1] + _TRACEBACK_LINES] if frames else []
