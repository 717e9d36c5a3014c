"""Runs benchmarks, sets each figure beside its threshold, and keeps the results with hardware, commit and date.

    python benchmarks/run.py engine     those of one suite
    python benchmarks/run.py all        every one

A benchmark is a program in this folder that prints, as its last line, a JSON object: name -> figure. A figure is a number, or
{"value": number or null, "note": text, "condition": text}; null says that it was not measured (the note says why), `condition` that
what the threshold presupposes did not hold. Anything else in the object is detail, and only kept. thresholds.json has, by suite
and name, the least or the largest figure that is good enough. Exit code 1 if one falls short or a program fails.

Figures are ratios within one run wherever that is possible: machines differ, and one machine differs from hour to hour.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

#: Suite -> its programs, in the order in which they run. One that is not there yet is not run; a threshold without a figure fails.
SUITES: dict[str, tuple[str, ...]] = {
    "engine": ("copy_engine.py", "transport.py", "stall.py", "memory.py"),
    "rebuild": ("rebuild.py",),
    "swaps": ("swaps.py",),
    "spare": ("spare.py",),
    "coordinator": ("coordinator.py", "decisions.py"),
    "recovery": ("recovery.py",),
    "goodput": ("goodput.py",),
}


@dataclass(frozen=True)
class Line:
    """One figure and what became of it."""

    name: str
    value: float | None
    threshold: dict[str, Any] | None
    note: str = ""
    condition: str | None = None

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if self.condition is not None:
            return "condition not met"
        if self.value is None:
            return "not run"
        if self.threshold is None:
            return ""
        low, high = self.threshold.get("min", float("-inf")), self.threshold.get("max", float("inf"))
        return "ok" if low <= self.value <= high else "FALLS SHORT"

    @property
    def wanted(self) -> str:
        """The threshold in words."""
        if self.threshold is None:
            return ""
        low, high = self.threshold.get("min"), self.threshold.get("max")
        if low == high:
            return f"{low:g}"
        return " and ".join(f"{word} {bound:g}" for word, bound in (("at least", low), ("at most", high)) if bound is not None)

    def as_dict(self) -> dict[str, Any]:
        """For the results."""
        kept = {"value": self.value, "threshold": self.threshold, "verdict": self.verdict, "note": self.note, "condition": self.condition}
        return {k: v for k, v in kept.items() if v not in ("", None) or k == "value"}


class ProgramFailed(Exception):
    """A benchmark ended without figures."""


def run_program(program: Path) -> dict[str, Any]:
    """Run one benchmark; its progress goes to the terminal.

    Raises:
        ProgramFailed: it failed, or printed no figures.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(program)], cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    try:
        printed = json.loads(lines[-1])
        assert isinstance(printed, dict)
    except (IndexError, ValueError, AssertionError):
        printed = None
    if done.returncode or printed is None:
        end = "\n".join(lines[-10:])
        raise ProgramFailed(f"{program.name} ended with exit code {done.returncode} and no figures; the end of its output:\n{end}")
    return printed


def figure(name: str, printed: Any, threshold: dict[str, Any] | None) -> Line | None:
    """A figure of a program's last line; None for what is detail."""
    if isinstance(printed, bool) or not isinstance(printed, int | float | dict):
        return None
    if not isinstance(printed, dict):
        return Line(name, printed, threshold)
    if "value" not in printed:
        return None
    return Line(name, printed["value"], threshold, printed.get("note", ""), printed.get("condition"))


def run_suite(suite: str, console: Console) -> tuple[list[Line], dict[str, Any], list[str]]:
    """Run a suite: its lines, what else the programs printed, and what failed."""
    thresholds: dict[str, dict[str, Any]] = json.loads((HERE / "thresholds.json").read_text())[suite]
    lines: list[Line] = []
    details: dict[str, Any] = {}
    failures: list[str] = []
    for name in SUITES[suite]:
        if not (HERE / name).is_file():
            continue
        console.print(f"== {name}", style="bold", highlight=False)
        try:
            printed = run_program(HERE / name)
        except ProgramFailed as failure:
            failures.append(str(failure))
            continue
        for key, value in printed.items():
            line = figure(key, value, thresholds.get(key))
            if line is None:
                details.setdefault(name, {})[key] = value
            else:
                lines.append(line)
    missing = thresholds.keys() - {line.name for line in lines}
    failures += [f"no program printed the figure {name!r}, which has a threshold" for name in sorted(missing)]
    return lines, details, failures


def hardware() -> dict[str, Any]:
    """What it ran on."""
    names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory.split()[1]) / (1 << 20), 1),
        "kernel": platform.release(),
        "gpu": None,
        "load_at_start": os.getloadavg()[0],
    }


def commit() -> str:
    """The checkout's commit, with a mark if files differ from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown: not a git checkout"
    return head + (" with changes" if changed else "")


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    found = {"python": platform.python_version()}
    for package in ("torch", "megatron-core"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def show(console: Console, suite: str, lines: list[Line]) -> None:
    """The table."""
    table = Table(title=f"benchmarks: {suite}", title_justify="left")
    for column, justify in (("figure", "left"), ("measured", "right"), ("threshold", "right"), ("", "left"), ("what", "left")):
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    styles = {"ok": "green", "FALLS SHORT": "bold red", "condition not met": "yellow", "not run": "yellow"}
    for line in lines:
        unit = (line.threshold or {}).get("unit", "")
        what = "; ".join(filter(None, [(line.threshold or {}).get("what", ""), line.condition, line.note]))
        measured = "" if line.value is None else f"{line.value:.4g} {unit}".strip()
        verdict = f"[{styles[line.verdict]}]{line.verdict}[/]" if line.verdict in styles else ""
        table.add_row(line.name, measured, f"{line.wanted} {unit}".strip(), verdict, what)
    console.print(table)


def measure(suite: str, console: Console) -> bool:
    """Run, show and keep one suite; returns whether nothing falls short."""
    machine = hardware()
    lines, details, failures = run_suite(suite, console)
    result = {
        "suite": suite,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": machine,
        "versions": versions(),
        "figures": {line.name: line.as_dict() for line in lines},
        "failures": failures,
        "details": details,
    }
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    (results / f"{suite}.json").write_text(json.dumps(result, indent=2) + "\n")
    show(console, suite, lines)
    short = [line.name for line in lines if line.verdict == "FALLS SHORT"]
    for failure in failures:
        console.print(f"failed: {failure}", style="bold red", markup=False)
    if short:
        console.print(f"falls short: {', '.join(short)}", style="bold red", markup=False)
    console.print(f"kept in {(results / f'{suite}.json').relative_to(ROOT)}", highlight=False)
    return not short and not failures


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=[*SUITES, "all"])
    suite = parser.parse_args().suite
    console = Console(width=None if sys.stdout.isatty() else 160)
    good = [measure(name, console) for name in (SUITES if suite == "all" else [suite])]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
