"""`deadpool status`: where a running job stands, once or again and again, for people or for programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..coordinator import wire
from ..errors import UsageError
from .client import call
from .narrate import PHASE_WORDS, ranks_in_words, what_was_lost

_WATCH_INTERVAL_S = 1.0
#: Lines of nodes, and of losses and recoveries, that fit a screen. --json has more.
_NODES_SHOWN, _EVENTS_SHOWN = 32, 5


def show_status(run_dir: Path, as_json: bool, watch: bool, console: Console) -> None:
    """Ask and show; with `watch` every second, until the job ends.

    Raises:
        UsageError: no job runs there, or it does not answer.
    """
    answer = call(run_dir, detail=True)
    if not watch:
        _print(answer, as_json)
        return
    if console.is_terminal and not as_json:
        with Live(console=console, auto_refresh=False) as live:  # what is printed inside becomes part of the picture
            ended = _follow(run_dir, answer, lambda status: live.update(Text(describe(status)), refresh=True))
    else:
        ended = _follow(run_dir, answer, lambda status: _print(status, as_json))
    print(f"deadpool: {ended}", file=sys.stderr)


def _print(status: wire.Status, as_json: bool) -> None:
    print(msgspec.json.encode(status).decode() if as_json else describe(status), flush=True)


def _follow(run_dir: Path, answer: wire.Status, show: Callable[[wire.Status], None]) -> UsageError:
    """Until the job does not answer any more; returns why."""
    while True:
        show(answer)
        time.sleep(_WATCH_INTERVAL_S)
        try:
            answer = call(run_dir, detail=True)
        except UsageError as ended:
            return ended


def describe(status: wire.Status) -> str:
    """A status in words."""
    behind = f" ({status.generation_lag} behind)" if status.generation_lag else ""
    committed = f"{status.committed}{behind}" if status.committed >= 0 else "none yet"
    lines = [f"step {status.step} | committed {committed} | membership {status.version} | {status.phase}"]
    if status.step_s is not None:
        stall_ms = 1000 * (status.exposed_stall_s or 0.0)
        lines.append(f"  a step takes {status.step_s:.2f} s, {stall_ms:.2f} ms of it exposed stall")
    lines += _nodes(status)
    lines.append(f"  spares: {', '.join(status.spares) or 'none'}")
    starting = [agent.node for agent in status.agents if agent.state == "starting"]
    if starting:
        lines.append(f"  starting: {', '.join(starting[:_NODES_SHOWN])}")
    if status.saving or status.durable >= 0:
        newest = f"generation {status.durable} is whole" if status.durable >= 0 else "none yet"
        lines.append(f"  durable: {newest}{'; another is being written' if status.saving else ''}")
    if status.generations_skipped:
        lines.append(f"  generations skipped: {status.generations_skipped}")
    lines += _losses(status)
    if status.metrics:
        lines.append(f"  metrics: http://{status.metrics}/metrics")
    return "\n".join(lines)


def _nodes(status: wire.Status) -> list[str]:
    held: dict[str, list[int]] = {}
    for rank in status.ranks:
        for holder in rank.holders:
            held.setdefault(holder, []).append(rank.rank)
    heard = {agent.node: agent.heard_s for agent in status.agents}
    lines = []
    for node, ranks in sorted(status.nodes.items()):
        line = f"  {node}: {ranks_in_words(ranks)}"
        if node in held:
            line += f"; holds the replicas of {ranks_in_words(held[node])}"
        if node in heard:
            line += f"; heard {heard[node]:.1f} s ago"
        lines.append(line)
    more = len(lines) - _NODES_SHOWN
    return lines if more <= 0 else [*lines[:_NODES_SHOWN], f"  … and {more} more nodes (--json has them)"]


def _losses(status: wire.Status) -> list[str]:
    lines = []
    if status.nodes_lost_total:
        lines.append(f"  nodes lost: {status.nodes_lost_total}")
        lines += [f"    {_clock(lost.t)} {lost.reason}" for lost in status.lost[-_EVENTS_SHOWN:]]
    lines += [f"  {reason}" for reason in status.quarantined.values()]
    lines.append(f"  recoveries: {status.recoveries_total or 'none'}")
    for done in status.recoveries[-_EVENTS_SHOWN:]:
        what = what_was_lost({"nodes_lost": done.nodes_lost, "ranks_respawned": done.ranks_respawned})
        phases = " + ".join(f"{PHASE_WORDS.get(name, name)} {seconds:.2f}" for name, seconds in done.phases.items())
        again = f"; {done.steps_rerun} completed steps ran again" if done.steps_rerun else ""
        lines.append(f"    {_clock(done.t)} {done.kind}: {what}, {done.total_s:.2f} s ({phases}), from generation {done.generation}{again}")
        lines += [f"      because {reason}" for reason in done.reasons]
    return lines


def _clock(t: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(t))
