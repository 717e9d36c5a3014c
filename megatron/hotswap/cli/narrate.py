"""What the coordinator decided, in plain words. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..control.messages import Membership
from ..control.state import Log

PHASE_WORDS = {
    "detect_s": "detect",
    "halt_s": "halt",
    "plan_s": "plan",
    "rebuild_s": "rebuild",
    "restore_s": "restore",
    "first_step_s": "first step",
}
#: Decisions that only matter to whoever reads events.jsonl: an error is either followed by a recovery or ends the job.
_SILENT = ("ignored", "push-failed", "resumed", "error", "generation-skipped")

#: What is put before the reasons of decisions that are told as they are.
_BEGINNINGS = {
    "copy-damaged": "a copy could not be used, another is looked for: ",
    "durable": "saved: ",
    "durable-refused": "cannot be gone on from: ",
    "end": "the job is over: ",
    "inject": "fault armed: ",
    "joined-as-rank": "the new process as ",
    "last-rung": "last rung: ",
    "loading": "before training: ",
    "no-spare": "no spare is left: ",
    "quarantined": "quarantine: ",
    "release-refused": "not released: ",
    "save": "durable generation: ",
    "save-failed": "not saved: ",
    "start": "training starts: ",
    "write-failed": "could not be written, tried again: ",
}


def ranks_in_words(ranks: Sequence[int]) -> str:
    """[2, 3] -> "ranks 2, 3"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def bytes_in_words(count: int) -> str:
    """1234567 -> "1.2 MB"."""
    value = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def narrate(log: Log) -> str | None:
    """One decision as a sentence, or None if it is of no interest while it happens."""
    data = log.data
    if log.kind in _SILENT or (log.kind == "waiting" and log.reason.startswith("0 ")):
        return None
    if log.kind == "node-lost" and data.get("left"):
        return f"node let go, its ranks are elsewhere: {log.reason}"
    if log.kind == "node-lost":
        return f"{'spare' if data['spare'] else 'node'} lost: {log.reason}"
    if log.kind == "worker-lost":
        return f"process lost: {log.reason}; its node starts it again"
    if log.kind == "recovery":
        return log.reason + ("; every rank stops where it is" if data.get("rung") != "restart" else "")
    if log.kind == "assign":
        return f"spare {data['node']} takes {ranks_in_words(data['ranks'])}"
    if log.kind == "plan":
        return _plan_in_words(data)
    if log.kind == "recovered":
        return None  # the time line follows, from what the recorder made of it
    if log.kind == "end" and data["code"] != 0:
        return None  # said once, at the very end, with the log that has more
    if log.kind == "metrics":  # an agent's are in their target file
        return None if "node" in log.data else f"metrics: {log.reason}"
    return _BEGINNINGS.get(log.kind, "") + log.reason


def _plan_in_words(data: Mapping[str, Any]) -> str:
    fetched = data["fetch"]
    source = f"; {ranks_in_words(fetched)} fetched from memory of the holders" if fetched else ""
    return f"going on from step {data['generation']}, the newest that every rank still has{source}"


def what_was_lost(recovery: Mapping[str, Any]) -> str:
    """"the loss of node1", "the loss of the process of rank 2", or "a broken collective"."""
    processes = recovery["ranks_respawned"]
    lost = list(recovery["nodes_lost"])
    if processes:
        lost.append(f"the process{'es' if len(processes) > 1 else ''} of {ranks_in_words(processes)}")
    return f"the loss of {' and '.join(lost)}" if lost else "a broken collective"


def time_line(recovery: Mapping[str, Any]) -> str:
    """Where the seconds of one recovery went."""
    parts = " + ".join(f"{words} {recovery['phases'][name]:.2f}" for name, words in PHASE_WORDS.items())
    rerun = recovery["steps_rerun"]
    again = (
        "no completed step ran again" if not rerun else f"{rerun} completed step{'s' if rerun > 1 else ''} ran again"
    )
    return (
        f"recovered from {what_was_lost(recovery)} in {recovery['total_s']:.2f} s: {parts} - a normal step "
        f"{recovery['normal_step_s']:.2f}; {bytes_in_words(recovery['bytes_restored'])} restored, {again}"
    )


def placement_lines(membership: Membership) -> list[str]:
    """Which node trains which ranks, and holds whose replicas."""
    ranks: dict[str, list[int]] = {}
    held: dict[str, list[int]] = {}
    for rank, member in enumerate(membership.members):
        ranks.setdefault(member.node, []).append(rank)
        for holder in membership.holders_of(rank):
            held.setdefault(holder.node, []).append(rank)
    return [
        f"{node}: {ranks_in_words(mine)}"
        + (f"; holds the replicas of {ranks_in_words(held[node]) if node in held else 'nobody'}" if held else "")
        for node, mine in ranks.items()
    ]
