"""Megatron's state of one rank, as recovery/execute.py wants it: plain tensors, plain values, callables."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..agent import local
from ..recovery.execute import byte_tensor, load_random_state, random_state
from ..snapshot.engine import NamedTensors
from ..topology.groups import Groups, Rebuilt
from ..topology.rendezvous import RendezvousStore
from ..worker.session import end_process
from . import distrib_optimizer
from .async_save import NONE, AsyncSaves
from .tensorboard import Scalars


class ReplayIterator:
    """A data iterator that can read again what was read since some generation.

    Every item is remembered with the step it was read for (`step_of`, completed steps before it), and forgotten once no recovery
    goes back to before that step (`oldest`).
    """

    def __init__(self, source: Any, step_of: Callable[[], int], oldest: Callable[[], int]) -> None:
        self.source = source
        self._step_of = step_of
        self._oldest = oldest
        self._read: deque[tuple[int, Any]] = deque()
        self._again: deque[Any] = deque()

    def __iter__(self) -> ReplayIterator:
        return self

    def __next__(self) -> Any:
        item = self._again.popleft() if self._again else next(self.source)
        step = self._step_of()
        oldest = self._oldest()
        while self._read and self._read[0][0] < oldest:
            self._read.popleft()
        self._read.append((step, item))
        return copy.copy(item)  # the trainer may change the dictionary's entries

    def rewind(self, generation: int) -> None:
        """Read again whatever was read for steps from `generation` on."""
        items = [item for step, item in self._read if step >= generation]
        self._read = deque((step, item) for step, item in self._read if step < generation)
        self._again.extendleft(reversed(items))


class MegatronTrainer:
    """Implements recovery.execute.Trainer."""

    def __init__(
        self, groups: Groups, rendezvous_timeout: timedelta, saves: AsyncSaves, require_wanted: Callable[[], None] = lambda: None
    ) -> None:
        self._groups = groups
        self._saves = saves
        self._rendezvous_timeout = rendezvous_timeout
        self._require_wanted = require_wanted  # raises once the membership whose groups are being made is over
        self.model: list[Any] = []
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.config: Any = None  # the model's TransformerConfig, once train_step was called
        self.consumed_train_samples = 0  # at the live generation
        self.start_iteration = 0  # completed steps when the job (not this process) began to train
        self.record: dict[str, Any] | None = None  # of the live generation's step
        self.scalars = Scalars()
        self.step_of: Callable[[], int] = lambda: 0
        self.oldest: Callable[[], int] = lambda: 0  # generation that a recovery may go back to
        self._iterators: list[ReplayIterator] = []
        self._megatrons_iterators: list[tuple[Any, ...]] = []
        self.built_generation: int | None = None

    def attach(self, model: list[Any], optimizer: Any, scheduler: Any) -> None:
        """The model is built (and loaded)."""
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        distrib_optimizer.require_supported(optimizer)
        distrib_optimizer.fill_states(optimizer)

    # ---- state

    def tensors(self) -> NamedTensors:
        owned = list(distrib_optimizer.shard_tensors(self.optimizer))
        for c, chunk in enumerate(self.model):
            for name, buffer in chunk.named_buffers():
                owned.append((f"model{c}.{name}", buffer))
            for name, parameter in chunk.named_parameters():
                if not parameter.requires_grad:
                    owned.append((f"model{c}.{name}", parameter.detach()))
        return owned

    def payload_peers(self) -> tuple[int, ...]:
        from megatron.core import mpu
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        parts = distrib_optimizer.optimizers(self.optimizer)
        if any(isinstance(part, DistributedOptimizer) for part in parts) or mpu.get_expert_model_parallel_world_size() > 1:
            return ()
        mine = dist.get_rank()
        ring = dist.get_process_group_ranks(mpu.get_data_parallel_group(with_context_parallel=True))
        return tuple(rank for rank in ring if rank != mine)

    def metadata(self, generation: int) -> dict[str, Any]:
        from megatron.core.rerun_state_machine import get_rerun_state_machine
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
        from megatron.training import get_args

        args = get_args()
        machine = get_rerun_state_machine()
        return {
            "iteration": generation,
            "consumed_train_samples": self.consumed_train_samples,
            "consumed_valid_samples": args.consumed_valid_samples,
            "skipped_train_samples": args.skipped_train_samples,
            "do": [bool(getattr(args, name, False)) for name in ("do_train", "do_valid", "do_test")],
            "flops": float(getattr(args, "num_floating_point_operations_so_far", 0.0)),
            "scheduler": self.scheduler.num_steps,
            "optimizer": distrib_optimizer.scalars(self.optimizer),
            "random": random_state(),
            "tracker": {k: v.cpu().numpy().tobytes() for k, v in get_cuda_rng_tracker().get_states().items()},
            "large_values": [dict(machine.large_value_counts), dict(machine.max_values)],
            "record": self.record,
            "recoveries": self.scalars.recoveries,
            "start_iteration": self.start_iteration,
            "save_pending": self._saves.pending,
        }

    def load_metadata(self, metadata: dict[str, Any]) -> None:
        from megatron.core.rerun_state_machine import get_rerun_state_machine
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        self.consumed_train_samples = metadata["consumed_train_samples"]
        self.record = metadata["record"]
        # A durable generation of an earlier release does not say it; a survivor that steps back has counted on meanwhile.
        self.scalars.recoveries = max(self.scalars.recoveries, metadata.get("recoveries", 0))
        self.scheduler.num_steps = metadata["scheduler"]
        self.scheduler.step(
            increment=0
        )  # Megatron's own code sets the groups' learning rate and weight decay from num_steps
        distrib_optimizer.load_scalars(self.optimizer, metadata["optimizer"])
        get_cuda_rng_tracker().set_states({k: byte_tensor(v) for k, v in metadata["tracker"].items()})
        load_random_state(metadata["random"])
        self._saves.restored(metadata["iteration"], metadata.get("save_pending", NONE), dist.get_rank())
        machine = get_rerun_state_machine()
        machine.large_value_counts, machine.max_values = (dict(x) for x in metadata["large_values"])

    def forget_step(self) -> None:
        from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
        from megatron.core.tensor_parallel import random as tensor_parallel_random
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
        from megatron.training import get_timers

        machine = get_rerun_state_machine()
        machine.state = RerunState.NOT_RUNNING_YET
        machine.rerun_requested = machine.checkpoint_requested = machine.restart_again_requested = (
            machine.continue_requested
        ) = False
        for chunk in self.model:
            chunk.train()
            self._forget_buckets(chunk)
        if self.config is not None:
            self.config.timers = get_timers()
        tensor_parallel_random._unset_checkpointing()
        distrib_optimizer.forget_first_use(self.optimizer)
        get_moe_metrics_tracker().clear()

    @staticmethod
    def _forget_buckets(chunk: Any) -> None:
        """DDP's bookkeeping as before its first batch, on survivors too: so all order their collectives as the spare does."""
        for group in [*getattr(chunk, "bucket_groups", []), *getattr(chunk, "expert_parallel_bucket_groups", [])]:
            group.per_param_grad_ready_counts = {}
            group.golden_per_param_grad_ready_counts = {}
            group.is_first_batch = True
            group.is_last_microbatch = True
            group.grad_reduce_handle = None
            group.grad_reduce_finished = False
            group.param_gather_handle = None
            group.param_gather_dispatched = False
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            parameter.grad = None

    def parameters_from_main(self) -> None:
        distrib_optimizer.main_to_model(self.optimizer, self.model)

    # ---- data

    def remember_data(self, iterators: tuple[Any, ...]) -> None:
        """Make Megatron's data iterators readable again."""
        for iterator in _flat(iterators):
            iterator.iterable = ReplayIterator(iterator.iterable, lambda: self.step_of(), lambda: self.oldest())
            self._iterators.append(iterator.iterable)
        self._megatrons_iterators.append(iterators)

    def rewind_data(self, generation: int) -> None:
        if self.built_generation is not None and self.built_generation != generation:
            # Another loss during the recovery changed the goal. Its agent tells, and the next spare builds for the right one.
            end_process(3, f"this spare reads data from generation {self.built_generation} on, the job goes back to {generation}")
        self.built_generation = None
        for iterator in self._iterators:
            iterator.rewind(generation)
        for iterators in self._megatrons_iterators:
            for iterator in _flat(iterators):
                iterator.saved_microbatches, iterator.replaying, iterator.replay_pos = [], False, 0

    # ---- groups

    def prepare_rebuild(self) -> None:
        self._saves.give_up()  # first: what is pending holds groups
        self._groups.find_holders()

    def rebuild_groups(self, plan: local.Plan) -> Rebuilt:
        self._saves.give_up()  # where no halt came before the plan
        store = RendezvousStore(plan.store, self._rendezvous_timeout, self._require_wanted)
        return self._groups.rebuild(plan.version, store, plan.replaced)

    def all_joined(self) -> None:
        self._groups.settle()


def _flat(iterators: Any) -> list[Any]:
    if iterators is None:
        return []
    if isinstance(iterators, list | tuple):
        return [x for part in iterators for x in _flat(part)]
    return [iterators]


def local_sizes() -> dict[str, int]:
    """Samples that one step consumes, by Megatron's own count."""
    from megatron.core import mpu
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.training import get_args

    args = get_args()
    return {
        "samples": mpu.get_data_parallel_world_size() * args.micro_batch_size * get_num_microbatches(),
        "tokens": args.seq_length,
    }
