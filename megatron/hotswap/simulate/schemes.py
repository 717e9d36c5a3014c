"""The ways to survive a failure that are compared, as values. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from .inputs import Inputs
from .theory import daly_interval

CHECKPOINT = "checkpoint-restart"
CHECKPOINT_BEST = "checkpoint-restart, best interval"
IN_MEMORY = "in-memory checkpoints"
EXCLUDE = "exclude-and-run"
IN_PROCESS = "in-process restart"
HOT_SWAP = "hot swap"


@dataclass(frozen=True)
class Scheme:
    """What a failure costs, and what is paid for it while nothing fails.

    Three kinds: state comes from durable checkpoints (memory_interval_steps None); from memory, with durable checkpoints as the last
    resort; or it is still on the nodes that go on (shrinks).
    """

    name: str
    recover_s: float  # where the state comes from where it should
    last_resort_s: float  # where it comes from a durable checkpoint although it should not
    durable_steps: int  # from one durable checkpoint to the next
    memory_interval_steps: int | None = None
    stall_s: float = 0.0
    shrinks: bool = False

    @property
    def uses_spares(self) -> bool:
        """Whether a lost node is replaced, so that a job without spares waits for its repair."""
        return not self.shrinks


def all_schemes(inputs: Inputs) -> tuple[Scheme, ...]:
    """All that are compared, hot swap last."""
    best = inputs.steps_of(daly_interval(inputs.save_s, inputs.job_mtbf_s))
    safety = inputs.steps_of(inputs.safety_interval_s)
    restart = inputs.restart_s
    memory = inputs.memory_interval_steps
    return (
        Scheme(CHECKPOINT, restart, restart, inputs.steps_of(inputs.interval_s)),
        Scheme(CHECKPOINT_BEST, restart, restart, best),
        Scheme(IN_MEMORY, inputs.derived("in_memory_s"), restart, safety, memory, inputs.stall_s),
        Scheme(EXCLUDE, inputs.derived("exclude_s"), restart, safety, shrinks=True),
        Scheme(IN_PROCESS, inputs.derived("in_process_s"), inputs.derived("in_process_s"), best),
        Scheme(HOT_SWAP, inputs.swap_s, restart, safety, memory, inputs.stall_s),
    )


def scheme_of(inputs: Inputs, name: str) -> Scheme:
    """The one of that name."""
    return next(scheme for scheme in all_schemes(inputs) if scheme.name == name)
