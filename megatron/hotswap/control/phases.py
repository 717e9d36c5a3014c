"""The phases of a job and the changes between them, as one table; docs/architecture.md shows it as a diagram. Pure."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Where the job is."""

    RETURNING = "returning"
    GATHERING = "gathering"
    LOADING = "loading"
    TRAINING = "training"
    HALTING = "halting"
    RESUMING = "resuming"
    ENDED = "ended"


#: (from, to) -> what brings it about. Any other change is a bug of ours.
CHANGES = {
    (Phase.RETURNING, Phase.TRAINING): "a coordinator that takes the job up has heard its agents, or waited long enough for them",
    (Phase.GATHERING, Phase.TRAINING): "enough nodes are warm",
    (Phase.GATHERING, Phase.LOADING): "enough nodes are warm, and there is a durable generation to go on from",
    (Phase.LOADING, Phase.GATHERING): "a node is lost, or the generation is damaged and an older one is taken",
    (Phase.LOADING, Phase.TRAINING): "every node has filled its slots from the files",
    (Phase.TRAINING, Phase.HALTING): "a node or a process is lost or a node is unhealthy, a collective failed, or the job hangs",
    (Phase.HALTING, Phase.HALTING): "another one is lost, stuck or unhealthy: begin again with what is left",
    (Phase.HALTING, Phase.RESUMING): "every rank has reported: the plan is made",
    (Phase.RESUMING, Phase.HALTING): "another one is lost or unhealthy, or ranks did not restore in time",
    (Phase.RESUMING, Phase.TRAINING): "every rank has restored",
    (Phase.RETURNING, Phase.ENDED): "its user ends the job",
    (Phase.GATHERING, Phase.ENDED): "a worker could not begin",
    (Phase.LOADING, Phase.ENDED): "a worker could not begin, or no durable generation can be loaded",
    (Phase.TRAINING, Phase.ENDED): "training is done, or the program failed",
    (Phase.HALTING, Phase.ENDED): (
        "no spare in time and the newest generation written (75), nothing to go back to, or a failure that comes again"
    ),
    (Phase.RESUMING, Phase.ENDED): "the program failed, or resuming timed out again and again",
}


def require_change(before: Phase, after: Phase) -> None:
    """Raise AssertionError, naming both phases, if the table has no such change."""
    if (before, after) not in CHANGES:
        raise AssertionError(f"the job cannot go from {before.value} to {after.value}; control/phases.py has the table")


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {Phase.GATHERING.value}"]
    lines += [f"    {before.value} --> {after.value}: {why}" for (before, after), why in CHANGES.items()]
    return "\n".join([*lines, f"    {Phase.ENDED.value} --> [*]", "```"])
