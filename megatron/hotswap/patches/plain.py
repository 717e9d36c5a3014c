"""Megatron as it is, watched: what `--on-failure restart` trains with. No snapshots, no fence, no groups of ours.

Replaced, all by the original with something said before or after it:
- megatron.training.arguments `parse_args`: the hot-swap flags join the parser and a warm worker waits for its rank (arguments.py); a
  life after the first loads from --save.
- megatron.training.training `pretrain`: torch.distributed meets at the membership's store, a torch TCPStore.
- `setup_model_and_optimizer`, `load_checkpoint`: how long they take; a checkpoint that does not fit is refused in words.
- `train_step`: the step is recorded.
- `save_checkpoint_and_time`: said when it is written.
- `training_log`, `evaluate_and_print_results`, `finalize_model_grads`, schedules' backward_step, the optimizers' step and
  `start_param_sync`: progress is noted, and faults on purpose strike.
"""

from __future__ import annotations

import functools
import time
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .. import environment
from ..agent import local
from ..config import HotSwapConfig
from ..control import messages as m
from ..snapshot.slots import Word
from ..worker.session import Session
from . import arguments, checkpointing, distrib_optimizer, guard
from . import training as training_patches
from .adapter import local_sizes

_TRACKER = "latest_checkpointed_iteration.txt"


class PlainTraining:
    """The life of a worker as Megatron's calls see it, in the order in which they come."""

    def __init__(self, session: Session, config: HotSwapConfig) -> None:
        from megatron.training import training

        guard.require_known_megatron()
        self._session = session
        self._training = training
        self._timeout = timedelta(seconds=config.resume_timeout_s)
        self._served: Any = None  # the store that this process serves, for as long as it lives
        self._given: local.Given | None = None
        self._assigned_s = 0.0  # time.perf_counter()
        self._load_s = 0.0
        self._step: int | None = None  # that is running, or ran last; None before the first
        for word in (Word.STEP, Word.PHASE):
            session.control.set(word, 0)  # of the process before this one
        self._install()

    def _install(self) -> None:
        t = self._training
        arguments.join_parser(self._await_rank, self._load_what_was_saved)
        checkpointing.serve_from_slots(t, lambda: False)
        distrib_optimizer.put_fence(lambda: self._enter("optimizer"), self._enter)
        training_patches.note_phases(t, self._enter)
        t.load_checkpoint = self._timed_load(t.load_checkpoint)
        t.train_step = self._recorded(t.train_step)
        t.save_checkpoint_and_time = self._told(t.save_checkpoint_and_time)
        t.training_log = self._noted(t.training_log, "log", lambda args: int(args[3]))
        t.evaluate_and_print_results = self._noted(t.evaluate_and_print_results, "eval", lambda args: int(args[4]))
        import megatron.training

        megatron.training.pretrain = t.pretrain = self._pretrain(t.pretrain)

    # ---- in the order of the calls

    def _await_rank(self) -> None:
        self._served = dist.TCPStore(self._session.place.address, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        self._given = given = self._session.await_rank(f"{self._served.host}:{self._served.port}")
        self._assigned_s = time.perf_counter()
        environment.say_rank(given.rank, given.world_size, given.local_rank, given.local_world_size)

    def _load_what_was_saved(self, args: Namespace) -> None:
        assert self._given is not None
        if self._given.version > 1:
            load_newest(args)

    def _pretrain(self, original: Any) -> Any:
        @functools.wraps(original)
        def pretrain(*args: Any, **kwargs: Any) -> None:
            assert self._given is not None
            if kwargs.get("store") is None:
                host, port = self._given.store.rsplit(":", 1)
                kwargs["store"] = dist.TCPStore(host, int(port), self._given.world_size, is_master=False, timeout=self._timeout)
            original(*args, **kwargs)

        return pretrain

    def _timed_load(self, original: Any) -> Any:
        @functools.wraps(original)
        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            loaded = original(*args, **kwargs)
            self._load_s += time.perf_counter() - began
            return loaded

        return load_checkpoint

    def _recorded(self, original: Any) -> Any:
        @functools.wraps(original)
        def train_step(forward_step: Any, *args: Any, iteration: int, **kwargs: Any) -> Any:
            from megatron.training import get_args

            given, session, first = self._given, self._session, self._step is None
            assert given is not None
            self._step = iteration + 1
            again = first and given.version > 1
            if again:
                build_s = time.perf_counter() - self._assigned_s - self._load_s
                session.say(m.Restored(given.version, given.rank, build_s, self._load_s, 0, 0, generation=iteration))
            consumed = get_args().consumed_train_samples + local_sizes()["samples"]
            began = time.perf_counter()
            result = original(self._noted(forward_step, "forward", lambda _: iteration + 1), *args, iteration=iteration, **kwargs)
            seconds = time.perf_counter() - began
            record = training_patches.step_record(result, iteration + 1, given.version, consumed, seconds)
            if record is not None:
                session.say(m.StepDone(record))
            if again:
                session.say(m.FirstStep(given.version, given.rank))
            return result

        return train_step

    def _told(self, original: Any) -> Any:
        @functools.wraps(original)
        def save_checkpoint_and_time(iteration: int, *args: Any, **kwargs: Any) -> Any:
            assert self._given is not None
            self._session.enter("save", iteration)
            result = original(iteration, *args, **kwargs)
            self._session.say(m.Acknowledged(self._given.rank, iteration, self._given.version))
            return result

        return save_checkpoint_and_time

    def _noted(self, original: Any, phase: str, step_of: Callable[[tuple[Any, ...]], int]) -> Any:
        @functools.wraps(original)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._session.check()  # here a collective fails on purpose
            self._session.enter(phase, step_of(args))
            return original(*args, **kwargs)

        return noted

    def _enter(self, phase: str) -> None:
        if self._step is not None:
            self._session.enter(phase, self._step)


def load_newest(args: Namespace) -> None:
    """Have Megatron go on from its newest checkpoint in --save, whole, whatever the job began from. Without one it begins as it did."""
    if not Path(args.save, _TRACKER).is_file():
        return
    args.load, args.ckpt_step = args.save, None
    args.finetune = args.no_load_optim = args.no_load_rng = False
