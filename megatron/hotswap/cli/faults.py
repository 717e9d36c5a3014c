"""Faults in words: `--kill node:node1` and `--fault segv worker:node1/0` of `deadpool inject`, `--inject kill:node:2:14:backward` of
`deadpool run`."""

from __future__ import annotations

import re

from ..control.messages import CABLE_FAULTS, PHASES, WORKER_FAULTS, Injection
from ..coordinator.service import Scheduled
from ..coordinator.wire import Status
from ..errors import UsageError

#: A scheduled fault is armed when an earlier step is reported, so it cannot strike in the very first ones.
FIRST_STEP = 3
_PROCESS_FAULTS = ("kill", "freeze")


def parse_target(action: str, target: str, at_step: int | None, phase: str | None) -> Injection:
    """An injection from `node:NAME`, `agent:NAME` or `worker:NAME/INDEX`; of a worker's own faults, from the last.

    Raises:
        UsageError: states the form.
    """
    match = re.fullmatch(r"(node|agent):([^/:]+)|(worker):([^/:]+)/(\d+)", target)
    if action not in (*_PROCESS_FAULTS, *CABLE_FAULTS, *WORKER_FAULTS):
        raise UsageError(f"--fault takes one of {', '.join(WORKER_FAULTS)} and worker:NAME/INDEX, got {action!r}")
    if action in CABLE_FAULTS and (match is None or match[1] != "node"):
        raise UsageError(f"--{action} takes node:NAME (such as node:node1), got {target!r}")
    if action in WORKER_FAULTS and (match is None or match[3] is None):
        raise UsageError(f"--fault {action} takes worker:NAME/INDEX (such as worker:node1/0), got {target!r}")
    if match is None:
        raise UsageError(
            f"--{action} takes node:NAME, agent:NAME or worker:NAME/INDEX (such as worker:node1/0), got {target!r}"
        )
    if phase is not None and at_step is None:
        raise UsageError(f"--phase {phase} needs a step: give --at-step N too, or leave --phase out to strike at once")
    check_phase(phase)
    scope, node = match[1] or match[3], match[2] or match[4]
    return Injection(action, scope, node, int(match[5] or 0), at_step, phase)  # type: ignore[arg-type]


def parse_scheduled(spec: str, world_size: int) -> Scheduled:
    """A fault of a schedule: ACTION:SCOPE:RANK:STEP[:PHASE].

    Raises:
        UsageError: states the form.
    """
    forms = f"({'|'.join(_PROCESS_FAULTS)}):(node|agent|worker)", f"({'|'.join(WORKER_FAULTS)}):(worker)", "(unplug):(node)"
    matches = [re.fullmatch(form + r":(\d+):(\d+)(?::([\w-]+))?", spec) for form in forms]
    match = next(filter(None, matches), None)
    if match is None:
        raise UsageError(
            f"--inject takes {', '.join(form + ':RANK:STEP[:PHASE]' for form in forms)}, where RANK says whose node, "
            f"agent or worker is struck (such as kill:node:2:14:backward or segv:worker:1:20), got {spec!r}"
        )
    action, scope, rank, step, phase = match[1], match[2], int(match[3]), int(match[4]), match[5] or "forward"
    check_phase(phase)
    if rank >= world_size:
        raise UsageError(
            f"--inject {spec}: this job has ranks 0 to {world_size - 1}, so there is no rank {rank}; name one of them"
        )
    if step < FIRST_STEP:
        raise UsageError(
            f"--inject {spec}: a fault can be scheduled from step {FIRST_STEP} on, got {step}; choose a later step"
        )
    return Scheduled(action, scope, rank, step, phase)


def check_phase(phase: str | None) -> None:
    """Refuse a phase that does not exist.

    Raises:
        UsageError: names those that do.
    """
    if phase is not None and phase not in PHASES:
        raise UsageError(f"a phase is one of {', '.join(PHASES)}; got {phase!r}")


def check_against(status: Status, injection: Injection) -> None:
    """Refuse a fault that could not strike in the job as it stands.

    Raises:
        UsageError: says why not.
    """
    known = sorted([*status.nodes, *status.spares])
    if injection.node not in known and injection.action != "plug":  # a node that was given up may have its cable back
        raise UsageError(f"there is no node {injection.node!r} in the job now; it has {', '.join(known) or 'none yet'}")
    workers = max(map(len, status.nodes.values()), default=1)
    if injection.worker >= workers:
        raise UsageError(
            f"every node of this job has workers 0 to {workers - 1}, so there is no {injection.node}/{injection.worker}"
        )
    if injection.at_step is not None and injection.at_step <= status.step:
        raise UsageError(
            f"--at-step {injection.at_step} is over: the job has completed step {status.step}; name a later step"
        )
    if injection.node in status.spares and injection.action in WORKER_FAULTS:
        raise UsageError(f"{injection.node} is a spare, whose training threads wait: {injection.action} needs one that trains")
    if injection.at_step is not None and injection.node in status.spares:
        raise UsageError(f"{injection.node} is a spare and runs no step; leave --at-step out to strike at once")
