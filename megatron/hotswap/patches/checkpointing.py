"""megatron.training.checkpointing, as megatron.training.training calls it.

Replaced:
- `load_checkpoint`: in a spare nothing is loaded from disk, since its state comes from its holder's memory, nor where the job goes on
  from a durable generation, which the agent has put into the slots; elsewhere a checkpoint that does not fit the model is refused in
  words instead of by a wall of shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import UsageError
from ..worker.loop import is_communication


def serve_from_slots(training: Any, in_slots: Callable[[], bool]) -> None:
    """Patch the trainer's `load_checkpoint`. `in_slots`: whether this rank's state lies in its slots already."""
    original = training.load_checkpoint

    def load_checkpoint(*args: Any, **kwargs: Any) -> tuple[int, float]:
        if in_slots():
            return 0, 0.0
        try:
            result: tuple[int, float] = original(*args, **kwargs)
            return result
        except (AssertionError, KeyError, ValueError, RuntimeError) as misfit:
            from megatron.training import get_args

            if is_communication(misfit):  # a peer is gone; nothing is wrong with the checkpoint
                raise

            detail = str(misfit).strip().splitlines() or [type(misfit).__name__]
            raise UsageError(
                f"the checkpoint in --load {get_args().load} cannot be loaded into this model: {detail[0][:400]}; start with the model "
                "flags (layers, hidden size, heads, vocabulary, experts) that it was saved with, or without --load"
            ) from misfit

    training.load_checkpoint = load_checkpoint
