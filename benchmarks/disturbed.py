"""Jobs that lose nodes, for benchmarks: the same Megatron command under hot swap and under checkpoint-restart, its faults, its files.

Faults strike one at a time, by `deadpool inject`'s own call, and only while the job is at rest: every node is warm, the spare too, and
some steps have gone by. So a recovery is not measured while the machine still starts processes for the one before.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jobs import SCRIPT, JobFailed, recorded_steps

from megatron.hotswap.cli.client import call
from megatron.hotswap.cli.launch import Launch
from megatron.hotswap.control.messages import Injection
from megatron.hotswap.control.state import Phase
from megatron.hotswap.coordinator.service import Coordinator
from megatron.hotswap.errors import UsageError

#: Steps at rest before a fault, and from the order to its step: an agent must hear of it.
REST_STEPS, AHEAD_STEPS = 3, 2

Kind = Literal["node killed", "node silent", "process killed", "collective failed"]
#: What is asked of `deadpool inject`: action, scope.
ACTIONS: dict[Kind, tuple[str, str]] = {
    "node killed": ("kill", "node"),
    "node silent": ("freeze", "node"),
    "process killed": ("kill", "worker"),
    "collective failed": ("fail-collective", "worker"),
}


@dataclass
class Faults:
    """Faults that strike one after another; call it with the coordinator, as `run`'s show. The job is ended after the last."""

    kinds: Sequence[Kind]
    run_dir: Path
    nodes: int  # spares included, that must be warm before the next one
    spread_steps: int = 1  # a fault's step is put off by 0 to so many less one, by chance
    seed: int = 1
    struck: int = 0
    _quiet_from: int | None = None
    _asked: asyncio.Future[Any] | None = None
    _chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)

    def __call__(self, coordinator: Coordinator) -> None:
        """Look whether the next one is due."""
        control, last = coordinator.control, coordinator.recorder.last_step
        warm = [a for a in control.agents.values() if a.warm]
        complete = len(coordinator.recorder.recoveries)
        rest = control.phase is Phase.TRAINING and control.recovery is None and len(warm) == self.nodes and complete == self.struck
        if not rest or last is None or last.step < control.newest_step:  # what a restart has lost is being run again
            self._quiet_from = None
            return
        self._quiet_from = last.step if self._quiet_from is None else self._quiet_from
        if last.step < self._quiet_from + REST_STEPS or (self._asked is not None and not self._asked.done()):
            return
        if self._asked is not None and (failure := self._asked.exception()) is not None:
            raise failure
        if self.struck == len(self.kinds):
            coordinator.end_job(0, "measured")
            return
        assert control.membership is not None
        member = control.membership.members[-1 if self.struck % 2 == 0 else 0]
        action, scope = ACTIONS[self.kinds[self.struck]]
        at_step = last.step + AHEAD_STEPS + self._chance.randrange(self.spread_steps)
        injection = Injection(action, scope, member.node, member.worker, at_step, "backward")  # type: ignore[arg-type]
        self.struck += 1
        print(f"{self.run_dir.name}: fault {self.struck} of {len(self.kinds)}: {injection}", file=sys.stderr, flush=True)
        self._asked = asyncio.get_running_loop().run_in_executor(None, self._ask, injection)

    def _ask(self, injection: Injection) -> None:
        try:
            call(self.run_dir, injection)
        except UsageError as refusal:
            raise JobFailed(f"{injection} was refused: {refusal}") from refusal


def launch(run_dir: Path, argv: list[str], spares: int, **settings: Any) -> Launch:
    """Two nodes of two ranks; a lost node comes back at once, as the next spare, unless told otherwise."""
    return Launch(2, 2, spares, str(SCRIPT), argv, run_dir, **{"return_lost_nodes_after_s": 0.0, **settings})


def bits(run_dir: Path) -> dict[int, tuple[Any, ...]]:
    """Step -> loss, gradient norm and samples, exactly."""
    return {x["step"]: (x["loss_hex"], x["grad_norm_hex"], x["consumed_samples"]) for x in recorded_steps(run_dir)}


def difference(runs: Sequence[Path]) -> tuple[int, int]:
    """Of the steps that more than one of these runs has: how many were compared, and how many differ somewhere; steps that ran again and
    came out otherwise than before count too."""
    found: dict[int, set[str]] = {}
    seen: dict[int, int] = {}
    differ = 0
    for run_dir in runs:
        for step, value in bits(run_dir).items():
            found.setdefault(step, set()).add(repr(value))
            seen[step] = seen.get(step, 0) + 1
        differ += sum(x.get("same_bits") is False for x in recorded_steps(run_dir))
    compared = [step for step, count in seen.items() if count > 1]
    return len(compared), differ + sum(len(found[step]) > 1 for step in compared)
