"""megatron.training.training.

Replaced, each because train() or pretrain() calls it by its module's global name:
- `pretrain`: starts torch.distributed on the membership's own store.
- `setup_model_and_optimizer`: the model is built; slots are asked for; a spare waits here for the plan and takes iteration and
  samples from its snapshot.
- `build_train_valid_test_data_iterators`: what is read can be read again.
- `train_step`: the recovery loop.
- `training_log`, `evaluate_and_print_results`, `save_checkpoint_and_time`, `checkpoint_and_decide_exit`,
  `post_training_step_callbacks`, `enable/disable_forward_pre_hook`, `calc_params_l2_norm`, `print_datetime`,
  `maybe_finalize_async_save` and megatron.core.timers.Timer.start/stop with a barrier: sections between steps.
- `finalize_model_grads`, megatron.core.pipeline_parallel.schedules.backward_step and _ParamAndGradBucketGroup.start_param_sync:
  progress is noted.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ..control import messages as m
from ..worker.loop import Loop, StepCall
from ..worker.session import Session
from .adapter import MegatronTrainer, local_sizes
from .async_save import AsyncSaves


class StepRunner:
    """Implements worker.loop.StepRunner on Megatron's train_step."""

    def __init__(self, original: Callable[..., Any], trainer: MegatronTrainer, session: Session) -> None:
        self._original = original
        self._trainer = trainer
        self._session = session
        self._seconds = 0.0

    def run(self, call: StepCall, again: bool, first: bool) -> Any:
        from megatron.core.num_microbatches_calculator import update_num_microbatches
        from megatron.core.rerun_state_machine import get_rerun_state_machine
        from megatron.training import get_args

        began = time.perf_counter()
        model, config = call.args[2], call.args[5]
        args = get_args()
        self._trainer.config = config
        consumed_before = call.kwargs["consumed_before"]
        if again:
            get_rerun_state_machine().current_iteration = call.iteration
            args.curr_iteration = call.iteration
            update_num_microbatches(consumed_before, consistency_check=False)
        param_sync_func = config.param_sync_func
        if first:
            set_hooks(model, False)
            config.param_sync_func = None
        kwargs = {k: v for k, v in call.kwargs.items() if k != "consumed_before"}
        try:
            result = self._original(self._noting(call), *call.args[1:], **kwargs)
        finally:
            config.param_sync_func = param_sync_func
        self._trainer.consumed_train_samples = consumed_before + local_sizes()["samples"]
        if first:
            set_hooks(model, call.hooks_enabled)
        if again and args.consumed_train_samples != consumed_before:
            update_num_microbatches(args.consumed_train_samples, consistency_check=False)
        self._seconds = time.perf_counter() - began
        return result

    def _noting(self, call: StepCall) -> Callable[..., Any]:
        """The user's forward step, with progress noted and the halt looked at before each micro-batch."""
        forward_step, step, session = call.args[0], call.iteration + 1, self._session

        @functools.wraps(forward_step)
        def noted(*args: Any, **kwargs: Any) -> Any:
            session.check()
            session.enter("forward", step)
            return forward_step(*args, **kwargs)

        return noted

    def record(self, call: StepCall, result: Any, stall_s: float) -> m.StepRecord | None:
        consumed = self._trainer.consumed_train_samples
        record = step_record(result, call.iteration + 1, self._session.version, consumed, self._seconds, stall_s)
        if record is not None:
            self._trainer.record = msgspec.to_builtins(record)
        return record

    def write_scalars(self, iteration: int) -> None:
        """Beside Megatron's own in TensorBoard, as often as it writes those."""
        from megatron.training import get_args, get_tensorboard_writer

        writer = get_tensorboard_writer()
        if writer is None or iteration % get_args().tensorboard_log_interval:
            return
        record = self._trainer.record
        stall_s = record["exposed_stall_s"] if record is not None and record["step"] == iteration else None
        self._trainer.scalars.write(writer, iteration, stall_s, self._session.committed)

    def timers(self) -> dict[str, bool]:
        from megatron.training import get_timers

        return {name: timer._started for name, timer in get_timers()._timers.items()}

    def set_timers(self, running: dict[str, bool]) -> None:
        from megatron.training import get_timers

        for name, timer in get_timers()._timers.items():
            timer._started = running.get(name, False)
            timer._start_time = time.time()


def step_record(
    result: Any, step: int, version: int, consumed_samples: int, seconds: float, exposed_stall_s: float = 0.0
) -> m.StepRecord | None:
    """What a step looked like, from what Megatron's train_step returned; None on ranks that do not log.

    Args:
        result: of train_step: the losses by name first, the gradient norm sixth.
        step: that is complete; 1 is the first.
        version: of the membership.
        consumed_samples: after it.
        seconds: that it took.
        exposed_stall_s: of these, waited for snapshots.
    """
    import torch.distributed as dist

    losses, grad_norm = result[0], result[5]
    if dist.get_rank() != dist.get_world_size() - 1:
        return None
    return m.StepRecord(
        step=step,
        version=version,
        consumed_samples=consumed_samples,
        seconds=seconds,
        exposed_stall_s=exposed_stall_s,
        loss={name: float(value.item()).hex() for name, value in losses.items()},
        grad_norm=None if grad_norm is None else float(grad_norm).hex(),
        tokens=local_sizes()["samples"] * local_sizes()["tokens"],
    )


def set_hooks(model: list[Any], on: bool) -> None:
    """DDP's forward pre-hooks, which gather parameters behind the forward pass."""
    for chunk in model:
        if getattr(chunk, "use_forward_hook", False) and bool(chunk.remove_forward_pre_hook_handles) != on:
            if on:
                chunk.enable_forward_pre_hook()
            else:
                chunk.disable_forward_pre_hook(param_sync=False)


def hooks_enabled(model: list[Any]) -> bool:
    """Whether they are on."""
    return bool(getattr(model[0], "remove_forward_pre_hook_handles", None))


class Sections:
    """Wraps what train() calls between steps."""

    def __init__(
        self, training: Any, loop: Callable[[], Loop | None], session: Session, saves: AsyncSaves, logged: Callable[[int], None]
    ) -> None:
        """`logged` is called with the iteration after Megatron has logged it."""
        self._training = training
        self._logged = logged
        self._loop = loop
        self._session = session
        self._saves = saves

    def install(self, start_iteration: Callable[[], int]) -> None:
        t = self._training
        self._wrap_log(t, start_iteration)
        t.checkpoint_and_decide_exit = self._saving_again(t.checkpoint_and_decide_exit)
        self._wrap("evaluate_and_print_results", "eval", lambda args, kwargs: None, self._undo_eval)
        self._wrap("save_checkpoint_and_time", "save", lambda args, kwargs: None)
        self._wrap("checkpoint_and_decide_exit", "checkpoint", lambda args, kwargs: False)
        self._wrap("post_training_step_callbacks", "callbacks", lambda args, kwargs: args[5])
        # The hooks are this rank's own: where the work around them is skipped, they are set all the same.
        self._wrap("enable_forward_pre_hook", "hooks-on", lambda args, kwargs: set_hooks(args[0], True))
        self._wrap("disable_forward_pre_hook", "hooks-off", lambda args, kwargs: set_hooks(args[0], False))
        for name in ("calc_params_l2_norm", "print_datetime", "maybe_finalize_async_save"):
            self._wrap(name, name, lambda args, kwargs: None)
        self._wrap_timers()

    def _wrap(
        self,
        function: str,
        name: str,
        skipped: Callable[[Any, Any], Any],
        undo: Callable[[], Callable[[], None]] | None = None,
    ) -> None:
        original = getattr(self._training, function)

        @functools.wraps(original)
        def section(*args: Any, **kwargs: Any) -> Any:
            loop = self._loop()
            if loop is None:
                return original(*args, **kwargs)

            def run() -> Any:
                if name == "save":
                    self._session.enter(name, loop.position.generation)
                    self._saves.begins(loop.position.generation)
                return original(*(self._noting_eval(loop, args) if name == "eval" else args), **kwargs)

            if loop.in_section is not None:
                return run()
            return loop.section(name, run, lambda: skipped(args, kwargs), undo() if undo else lambda: None)

        setattr(self._training, function, section)

    def _saving_again(self, decide: Callable[..., bool]) -> Callable[..., bool]:
        """Megatron's checkpoint_and_decide_exit, which also saves where a recovery has given up a checkpoint."""

        @functools.wraps(decide)
        def decide_or_save(
            model: Any, optimizer: Any, scheduler: Any, iteration: int, operations: float, context: Any, iterator: Any
        ) -> bool:
            leave = decide(model, optimizer, scheduler, iteration, operations, context, iterator)
            if self._saves.due and not leave:
                self._training.save_checkpoint_and_time(
                    iteration, model, optimizer, scheduler, operations, context, train_data_iterator=iterator
                )
            return leave

        return decide_or_save

    def _noting_eval(self, loop: Loop, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of an evaluation, its forward step noting progress: faults on purpose strike in its middle."""
        prefix, forward_step, *rest = args

        @functools.wraps(forward_step)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._session.check()
            self._session.enter("eval", loop.position.generation)
            return forward_step(*args, **kwargs)

        return prefix, noted, *rest

    @staticmethod
    def _undo_eval() -> Callable[[], None]:
        """What an evaluation changes besides its data iterator, put back before it is run again."""
        from megatron.core.rerun_state_machine import get_rerun_state_machine
        from megatron.training import get_args

        args, machine = get_args(), get_rerun_state_machine()
        consumed, mode = args.consumed_valid_samples, machine.mode

        def undo() -> None:
            args.consumed_valid_samples, machine.mode = consumed, mode

        return undo

    def _wrap_log(self, training: Any, start_iteration: Callable[[], int]) -> None:
        original = training.training_log

        @functools.wraps(original)
        def training_log(*args: Any, **kwargs: Any) -> Any:
            loop = self._loop()
            if loop is None:
                return original(*args, **kwargs)
            iteration, totals, report_memory = args[3], args[1], args[5]
            first = start_iteration() + 1
            # A spare's own train() would take its first step for the job's first, and log alone; all go by the job's.
            kwargs["is_first_iteration"] = iteration == first
            args = (*args[:5], report_memory and _first_logs(iteration, first), *args[6:])
            before = dict(totals)

            def undo() -> None:
                totals.clear()
                totals.update(before)

            def run() -> Any:
                self._session.enter("log", iteration)
                result = original(*args, **kwargs)
                self._logged(iteration)
                return result

            return loop.section("log", run, lambda: args[5], undo)

        training.training_log = training_log

    def _wrap_timers(self) -> None:
        from megatron.core.timers import Timer

        for name in ("start", "stop"):
            original = getattr(Timer, name)

            def timed(timer: Any, barrier: bool = False, _original: Any = original, _name: str = name) -> None:
                loop = self._loop()
                if not barrier or loop is None or loop.in_section is not None:
                    return _original(timer, barrier)
                return loop.section(
                    f"timer-{_name}", lambda: _original(timer, barrier), lambda: _original(timer, False)
                )

            setattr(Timer, name, timed)


def _first_logs(iteration: int, first: int) -> bool:
    """Whether memory is reported at this iteration, as Megatron does it: in the first, and the next one that is logged."""
    from megatron.training import get_args

    interval = get_args().log_interval
    return iteration == first or not any(k % interval == 0 for k in range(first + 1, iteration))


def note_phases(training: Any, enter: Callable[[str], None]) -> None:
    """Note progress inside a step where Megatron's own code is not handed in by the caller."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.core.pipeline_parallel import schedules

    for owner, function, phase in (
        (training, "finalize_model_grads", "grad-sync"),
        (schedules, "backward_step", "backward"),
        (_ParamAndGradBucketGroup, "start_param_sync", "param-gather"),
    ):
        original = getattr(owner, function)

        def noted(*args: Any, _original: Any = original, _phase: str = phase, **kwargs: Any) -> Any:
            enter(_phase)
            return _original(*args, **kwargs)

        setattr(owner, function, functools.wraps(original)(noted))
