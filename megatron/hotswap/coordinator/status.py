"""The answer to `deadpool status`, from the core's state and what the recorder knows. Bounded: it must fit into one message."""

from __future__ import annotations

from ..control.state import Control
from . import wire
from .recorder import Recorder

#: Of a long job the last ones, of a large one the first: some 100 bytes a rank and 60 a node, of 4 MiB.
RANKS_MAX, AGENTS_MAX = 16384, 8192
RECOVERIES_MAX = 10
_REASONS_MAX, _REASON_CHARS_MAX = 8, 300
_QUARANTINED_MAX = 200


def status_of(control: Control, recorder: Recorder, now: float, text: str = "", detail: bool = False, metrics: str = "") -> wire.Status:
    """Where the job stands. `now` is of the clock by which the core is told the time; `detail`: with the lists."""
    last = recorder.last_step
    nodes: dict[str, list[int]] = {}
    spares = []
    for agent in control.agents.values():
        if agent.state == "active":
            nodes[agent.node] = [r for r in agent.ranks if r is not None]
        elif agent.state == "spare":
            spares.append(agent.node)
    return wire.Status(
        True,
        text,
        control.phase.value,
        control.version,
        control.committed,
        last.step if last else 0,
        nodes,
        sorted(spares),
        control.durable_generation,
        control.save_wanted or control.saving is not None,
        control.save_text,
        run_id=control.config.run_id,
        world_size=control.config.grid.world_size,
        step_s=last.seconds if last else None,
        exposed_stall_s=last.exposed_stall_s if last else None,
        generation_lag=control.generation_lag,
        generations_skipped=control.commits.skipped_generations,
        recoveries_total=len(recorder.recoveries),
        nodes_lost_total=recorder.nodes_lost,
        metrics=metrics,
        ranks=_ranks(control) if detail else [],
        agents=_agents(control, now) if detail else [],
        lost=[wire.LostStatus(t, node, reason[:_REASON_CHARS_MAX]) for t, node, reason in recorder.lost] if detail else [],
        recoveries=_recoveries(recorder) if detail else [],
        quarantined=_quarantined(control, now) if detail else {},
    )


def _ranks(control: Control) -> list[wire.RankStatus]:
    membership, progress = control.membership, control.hang.progress
    if membership is None:
        return []
    found = []
    for rank, member in enumerate(membership.members[:RANKS_MAX]):
        now = progress.get(rank)
        step, phase = (now.step, now.phase_name) if now is not None else (None, "")
        holders = [holder.node for holder in membership.holders_of(rank)]
        found.append(wire.RankStatus(rank, member.node, member.worker, step, phase, holders))
    return found


def _agents(control: Control, now: float) -> list[wire.NodeStatus]:
    agents = list(control.agents.values())[:AGENTS_MAX]
    return [wire.NodeStatus(agent.node, agent.state, round(max(0.0, now - agent.last_heard_s), 3)) for agent in agents]


def _quarantined(control: Control, now: float) -> dict[str, str]:
    held = list(control.quarantine.all(now).items())[:_QUARANTINED_MAX]
    return {node: reason[:_REASON_CHARS_MAX] for node, reason in held}


def _recoveries(recorder: Recorder) -> list[wire.RecoveryStatus]:
    return [
        wire.RecoveryStatus(
            line["t"],
            line["kind"],
            line["nodes_lost"],
            line["ranks_respawned"],
            [reason[:_REASON_CHARS_MAX] for reason in line["evidence"][:_REASONS_MAX]],
            line["generation"],
            line["steps_rerun"],
            line["total_s"],
            line["phases"],
        )
        for line in recorder.recoveries[-RECOVERIES_MAX:]
    ]
