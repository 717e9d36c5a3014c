"""Puts hot-swap into Megatron in a worker: every patch, and what they share."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec

from .. import environment
from ..agent import local
from ..config import HotSwapConfig
from ..control import messages as m
from ..recovery.execute import Recovery, Snapshots
from ..topology.groups import Groups
from ..topology.rendezvous import RendezvousStore
from ..worker.abort import Aborter, device_idle
from ..worker.loop import Loop, Schedule, StepCall
from ..worker.session import Session
from . import arguments, checkpointing, distrib_optimizer, guard, parallel_state
from . import training as training_patches
from .adapter import MegatronTrainer
from .async_save import AsyncSaves

#: What pretrain() imports only when it comes to it.
_USED_LATER = (
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.helpers",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.models.mimo",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tokenizers.text.models",
    "megatron.core.tokenizers.text.text_tokenizer",
    "megatron.training.checkpointing",
    "torch.profiler._cupti_monitor",
)


class HotSwap:
    """The life of a worker as Megatron's calls see it, in the order in which they come."""

    def __init__(self, session: Session, config: HotSwapConfig, new_store: Callable[[], str]) -> None:
        from megatron.training import training

        guard.require_known_megatron()
        self._session = session
        self._training = training
        collective, rendezvous = (timedelta(seconds=s) for s in (config.collective_timeout_s, config.resume_timeout_s))
        self._groups = Groups(
            collective,
            rendezvous,
            address=session.place.address,
            selective=config.rebuild == "selective",
            check=config.check_groups == "yes",
            device_idle=device_idle,
            require_wanted=session.check,
        )
        parallel_state.create_through(self._groups)
        self._aborter = Aborter(session, self._groups)
        self._config = config
        self._saves = AsyncSaves(session.say)
        self._trainer = MegatronTrainer(self._groups, rendezvous, self._saves, session.check)
        self._snapshots = Snapshots(session, self._trainer)
        self._trainer.oldest = lambda: self._snapshots.oldest
        self._recovery = Recovery(session, self._aborter, self._trainer, self._snapshots, new_store)
        self._rendezvous_timeout = rendezvous
        self._loop: Loop | None = None
        self._given: local.Given | None = None
        self._plan: local.Plan | None = None  # a spare's, until it has joined
        self._milestones: list[tuple[str, float]] = []  # of a spare's start, told when it has joined
        self._runner = training_patches.StepRunner(training.train_step, self._trainer, session)
        self._install()

    def _install(self) -> None:
        t = self._training
        arguments.join_parser(self._await_rank)
        checkpointing.serve_from_slots(t, lambda: self._from_slots)
        distrib_optimizer.put_fence(self._fence, self._enter)
        training_patches.note_phases(t, self._enter)
        sections = training_patches.Sections(t, lambda: self._loop, self._session, self._saves, self._runner.write_scalars)
        sections.install(lambda: self._trainer.start_iteration)
        t.train_step = self._train_step
        t.setup_model_and_optimizer = self._setup(t.setup_model_and_optimizer)
        t.build_train_valid_test_data_iterators = self._data(t.build_train_valid_test_data_iterators)
        import megatron.training

        megatron.training.pretrain = t.pretrain = self._pretrain(t.pretrain)

    @property
    def _spare(self) -> bool:
        return self._given is not None and self._given.fake

    @property
    def _loaded(self) -> bool:
        return self._given is not None and self._given.loaded

    @property
    def _from_slots(self) -> bool:
        """Whether all weights and states come from a snapshot."""
        return self._spare or self._loaded

    # ---- in the order of the calls

    def _await_rank(self) -> None:
        if self._given is None:
            self._given = given = self._session.await_rank(self._recovery.serve_store())
            environment.say_rank(given.rank, given.world_size, given.local_rank, given.local_world_size)
            self._groups.fake = given.fake
            self._groups.version = 0 if given.fake else given.version
            self._reached("assigned")

    def _pretrain(self, original: Any) -> Any:
        def pretrain(*args: Any, **kwargs: Any) -> None:
            assert self._given is not None
            self._aborter.building_groups()
            if not self._spare and kwargs.get("store") is None:
                kwargs["store"] = RendezvousStore(self._given.store, self._rendezvous_timeout, self._session.check)
            original(*args, **kwargs)

        return pretrain

    def _setup(self, original: Any) -> Any:
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            from megatron.training import get_args

            self._reached("arguments and stand-in groups")
            margs = get_args()
            initialize = margs.perform_initialization
            margs.perform_initialization = initialize and not self._from_slots
            built = original(*args, **kwargs)
            margs.perform_initialization = initialize  # as checkpoints will have it
            self._trainer.attach(*built)
            self._reached("model and optimizer")
            if self._from_slots:
                self._take_over(margs)
            else:
                self._trainer.start_iteration = margs.iteration
                self._trainer.consumed_train_samples = margs.consumed_train_samples
                self._snapshots.attach(margs.iteration)
            proven = distrib_optimizer.step_proves_commit(built[1], margs.world_size)
            schedule = Schedule(self._config.interval, self._config.when_late == "skip", proven)
            self._loop = Loop(self._session, self._recovery, self._snapshots, self._runner, margs.iteration, schedule)
            self._loop.recovered = self._trainer.scalars.recovered
            self._trainer.step_of = lambda: self._loop.current_step if self._loop is not None else 0
            return built

        return setup_model_and_optimizer

    def _take_over(self, margs: Any) -> None:
        """Iteration, samples and flags of the generation that the job goes back to, or begins from, as a checkpoint would bring them."""
        self._plan = self._recovery.await_plan() if self._spare else self._recovery.first_plan()
        self._snapshots.attach(self._plan.generation)
        self._snapshots.adopt(self._plan)
        self._set_progress(margs)
        self._reached("plan and snapshot")

    def _set_progress(self, margs: Any) -> None:
        assert self._plan is not None
        metadata = self._snapshots.metadata(self._plan.generation)
        generation = metadata["iteration"]
        margs.iteration = margs.curr_iteration = generation
        margs.consumed_train_samples = metadata["consumed_train_samples"]
        margs.skipped_train_samples = metadata["skipped_train_samples"]
        margs.num_floating_point_operations_so_far = metadata["flops"]
        margs.do_train, margs.do_valid, margs.do_test = metadata["do"]
        self._trainer.start_iteration = metadata["start_iteration"]
        self._trainer.built_generation = generation
        # The snapshot was taken at the end of the step; this rank begins after the evaluation that followed it.
        evaluated = (
            margs.do_valid
            and margs.eval_interval
            and generation > self._trainer.start_iteration
            and generation % margs.eval_interval == 0
        )
        if evaluated and (margs.start_eval_at_iter is None or generation >= margs.start_eval_at_iter):
            batch = getattr(margs, "eval_global_batch_size", None) or margs.global_batch_size
            metadata["consumed_valid_samples"] += margs.eval_iters * batch
        margs.consumed_valid_samples = metadata["consumed_valid_samples"]
        if self._loaded:
            self._trainer.start_iteration = generation

    def _data(self, original: Any) -> Any:
        def build_train_valid_test_data_iterators(provider: Any) -> Any:
            iterators = original(provider)
            self._trainer.remember_data(iterators)
            return iterators

        return build_train_valid_test_data_iterators

    def _train_step(self, *args: Any, iteration: int, **kwargs: Any) -> Any:
        from megatron.training import get_args

        loop = self._loop
        assert loop is not None
        call = StepCall(
            iteration,
            args,
            {**kwargs, "iteration": iteration, "consumed_before": get_args().consumed_train_samples},
            self._runner.timers(),
            training_patches.hooks_enabled(args[2]),
        )
        if self._plan is not None and self._loaded:
            self._begin_from_files(loop)
        elif self._plan is not None:
            self._join(loop)
        elif self._trainer.built_generation is None and not loop.began:
            self._aborter.groups_built()
            loop.first_snapshot()
        return loop.step(call)

    def _begin_from_files(self, loop: Loop) -> None:
        assert self._plan is not None
        self._aborter.groups_built()
        loop.begin_from(self._plan)
        self._plan, self._session.loading = None, False

    def _join(self, loop: Loop) -> None:
        plan = self._plan
        assert plan is not None
        self._reached("data")
        self._trainer.config = None
        self._session.building = False
        loop.join(plan)
        self._plan = None
        if self._trainer.record is not None:  # the rank that was lost may not have had the time to say it
            record = msgspec.convert({**self._trainer.record, "version": self._session.version}, m.StepRecord)
            self._session.say(m.StepDone(record))
        self._reached("rebuild and restore")
        self._trainer.scalars.recovered(self._milestones[-1][1] - self._milestones[0][1])
        spans = zip(self._milestones, self._milestones[1:], strict=False)
        told = ", ".join(f"{name} {at - before:.3f} s" for (_, before), (name, at) in spans)
        self._session.say(m.Note("joined-as-rank", f"rank {self._session.rank}: {told}"))

    def _reached(self, milestone: str) -> None:
        self._milestones.append((milestone, time.perf_counter()))

    # ---- inside a step

    def _fence(self) -> None:
        if self._loop is not None:
            self._loop.fence()

    def _enter(self, phase: str) -> None:
        if self._loop is not None and self._loop.began and self._loop.in_section is None:
            self._session.enter(phase, self._loop.position.generation + 1)


def warm() -> None:
    """Import what the trainer will use and touch the device, so that a spare has done so before it has a rank."""
    import torch

    for name in _USED_LATER:
        # One that another release does not have is no error: then nothing there uses it.
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    torch.zeros(1, device=torch.cuda.current_device())
