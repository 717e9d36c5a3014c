"""Megatron's --async-save (megatron.training.async_utils): checkpoints that another process writes while training goes on.

Megatron counts saves on every rank, and every step asks all ranks whether the oldest pending one is written. A spare has counted none and
has none pending. So at a recovery all ranks give up what is pending and count from the start again. A checkpoint that was given up is not
named by Megatron's tracker file; the whole job saves again after the next step. Every rank knows of that by itself: from the
snapshot's metadata, and from whether a save was due right behind it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ..control import messages as m

NONE = -1


class AsyncSaves:
    """What this rank has pending, and whether the job has to save again. Nothing of it is in use without --async-save."""

    def __init__(self, say: Callable[[m.Note], None]) -> None:
        self._say = say
        self._last = NONE  # iteration of the newest save that was handed to the writer
        self._again = NONE  # iteration of the one that was given up

    @property
    def pending(self) -> int:
        """Iteration of a checkpoint that is not on disk yet and has to get there, or NONE: a part of the generation."""
        if self._again != NONE:
            return self._again
        queue = _queue()
        return self._last if queue is not None and queue.get_num_unfinalized_calls() else NONE

    def give_up(self) -> None:
        """The membership is over: nothing that was begun in it is finished. May be called again."""
        queue = _queue()
        if queue is None:
            return
        queue.call_idx = NONE
        if not queue.async_calls:
            return
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        for call in queue.async_calls:
            process = call.async_caller.process
            call.async_caller.close(abort=True)
            if process is not None:
                process.join()
        queue.async_calls.clear()
        type(queue)._persistent_caller = None
        if filesystem_async._results_queue is not None:  # what a writer has answered is for nobody any more
            filesystem_async._results_queue._manager.shutdown()
            filesystem_async._results_queue = None

    def restored(self, generation: int, pending: int, rank: int) -> None:
        """The state is a generation's again. `pending`: of its metadata, which were taken before it was saved itself."""
        from megatron.training import get_args

        args = get_args()
        if not args.async_save:
            return
        every = [interval for interval in (args.save_interval, args.non_persistent_save_interval) if interval]
        due = bool(args.save) and any(generation % interval == 0 for interval in every)
        self._again = generation if due else pending
        if self._again != NONE and rank == 0:
            text = f"the checkpoint of step {self._again} was being written and is given up; the job saves again"
            self._say(m.Note("save-again", text))

    @property
    def due(self) -> bool:
        """Whether the job is to save now."""
        return self._again != NONE

    def begins(self, iteration: int) -> None:
        """Megatron saves. If the writer was ended, have a new one, as megatron.training.initialize starts it."""
        from megatron.training import get_args

        self._again, self._last = NONE, iteration
        args, queue = get_args(), _queue()
        if args.async_save and queue is not None and queue.persistent:
            queue.warmup_persistent_caller(
                args.rank, mp_mode="forkserver", cpu_priority=args.async_ckpt_cpu_priority, io_priority=args.async_ckpt_io_priority
            )


def _queue() -> Any:
    """Megatron's queue of saves, None before the first."""
    module = sys.modules.get("megatron.training.async_utils")
    return None if module is None else module._async_calls_queue
