"""The training part of tools/gpu_check.py: Megatron's own trainer with snapshots on and off in turn, then back to one of them.

One process and no agent, so what is measured is the worker's side alone: the copies to the host (D2H) and the fence that waits for
them. Nothing is sent to another node. Without snapshots the fence finds nothing to wait for, so both halves run the same code.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

import deadpool_ext
from megatron.hotswap.device import wheel
from megatron.hotswap.patches import distrib_optimizer
from megatron.hotswap.patches.adapter import MegatronTrainer, local_sizes
from megatron.hotswap.patches.async_save import AsyncSaves
from megatron.hotswap.patches.parallel_state import create_through
from megatron.hotswap.recovery.execute import encode_metadata
from megatron.hotswap.snapshot.engine import SnapshotEngine, layout_of
from megatron.hotswap.snapshot.layout import Header
from megatron.hotswap.snapshot.slots import OWN_SLOTS, ControlBlock, Slots, Word, require_room
from megatron.hotswap.topology.groups import Groups

RUN_ID = "gpu-check"
WARM_UP_STEPS = 3
BLOCK_STEPS = 4  # of which the first is not counted: it may still wait for a copy of the block before
BLOCKS = 6  # off, on, off, on, …
STEPS = WARM_UP_STEPS + BLOCKS * BLOCK_STEPS + 1  # the last one is made twice
_COPY_TIMEOUT_S = 60.0

#: A GPT of 1.0 billion parameters in bf16; a batch that takes about a second on a GPU of 400 TFLOP/s.
GPU_MODEL = (
    "--num-layers 24 --hidden-size 1792 --num-attention-heads 14 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 2 --global-batch-size 32 --vocab-size 50257"
)
CPU_MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 "
    "--global-batch-size 2 --vocab-size 255"
)
#: Without Transformer Engine: Megatron's own layers and no kernels that would be compiled first. Attention is not fused then, so its
#: scores are recomputed.
LOCAL_LAYERS = (
    "--transformer-impl local --attention-backend unfused --recompute-granularity selective --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-dropout-fusion --no-bias-gelu-fusion"
)
TRAINING = (
    f"--train-iters {STEPS} --lr 1e-4 --clip-grad 1.0 --bf16 --use-distributed-optimizer --tokenizer-type NullTokenizer --mock-data "
    "--split 99,1,0 --eval-iters 0 --num-workers 0 --log-interval 10 --hidden-dropout 0.1 --attention-dropout 0.1"
)


@dataclass
class Snapshotting:
    """Wraps the trainer's steps. One per process."""

    trainer: MegatronTrainer
    engine: SnapshotEngine | None = None
    slots: Slots | None = None
    control: ControlBlock = field(default_factory=ControlBlock.create)
    pending: int | None = None  # generation whose copy was begun last
    slot: int = 0  # where
    waited_s: float = 0.0
    steps: list[tuple[int, bool, float, float]] = field(default_factory=list)  # step, on, seconds, waited at the fence
    begin_s: list[float] = field(default_factory=list)  # what the training thread spends to hand a snapshot over
    slot: int = 0  # of the newest generation
    current: int = 0
    restored: dict[str, Any] = field(default_factory=dict)

    def prepare(self, built: tuple[Any, ...]) -> None:
        """The model is built: slots of its size."""
        self.trainer.attach(*built)
        layout = layout_of(self.trainer.tensors(), len(encode_metadata(self.trainer.metadata(0))))
        require_room(layout.slot_bytes * OWN_SLOTS, None, "here")
        self.slots = Slots.create(layout.slot_bytes, OWN_SLOTS)
        self.engine = SnapshotEngine(layout, self.slots, self.control, RUN_ID, 0)

    def take(self, generation: int) -> None:
        """Begin the copy of the live state."""
        assert self.engine is not None
        began = time.perf_counter()
        self.trainer.consumed_train_samples = generation * local_sizes()["samples"]
        metadata = encode_metadata(self.trainer.metadata(generation))
        self.slot = self.engine.begin(generation, self.trainer.tensors(), metadata, keep=self.engine.newest)
        self.pending = generation
        self.begin_s.append(time.perf_counter() - began)

    def fence(self) -> None:
        """As a worker's session waits before the optimizer step, for the copy alone."""
        if self.pending is None:
            return
        began = time.perf_counter()
        word = self.control.address(Word.COPIED)
        came = deadpool_ext.wait_u64_at_least(word, self.pending + 1, _COPY_TIMEOUT_S)
        assert came == 1, f"the copy of generation {self.pending} did not end in {_COPY_TIMEOUT_S} s"
        self.waited_s += time.perf_counter() - began
        self.pending = None

    def step(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of train_step."""
        done = self.current = kwargs["iteration"]
        if done == STEPS - 1:
            return self._twice(original, args, kwargs, done)
        block = (done - WARM_UP_STEPS) // BLOCK_STEPS
        on = done >= WARM_UP_STEPS and block % 2 == 1
        counted = done >= WARM_UP_STEPS and (done - WARM_UP_STEPS) % BLOCK_STEPS > 0
        self.waited_s = 0.0
        began = time.perf_counter()
        result = original(*args, **kwargs)
        # Only this stream: the engine's own is to go on copying behind the next step.
        torch.cuda.current_stream().synchronize()
        if on:
            self.take(done + 1)
        if counted:
            self.steps.append((done + 1, on, time.perf_counter() - began, self.waited_s))
        return result

    def _twice(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any], generation: int) -> Any:
        """The last step, from a snapshot, and once more after that snapshot was restored: state and results must be the same bits."""
        assert self.engine is not None
        self.fence()
        if self.engine.newest != generation:  # the last block has taken it, unless somebody changes the blocks
            self.take(generation)
            self.fence()
        checksum_s = self._finish_header(generation)
        before = [live.to("cpu", copy=True) for live in self._live()]
        first = original(*args, **kwargs)
        changed = self._different(before)
        began = time.perf_counter()
        copied = self._restore(generation)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        different = self._different(before)
        second = original(*args, **kwargs)
        self.restored = {
            "generation": generation,
            "bytes": copied,
            "restore_s": seconds,
            "checksum_s": checksum_s,
            "tensors": len(before),
            "tensors_changed_by_the_step": changed,
            "tensors_different_after_restore": different,
            "loss_first": _hex(first[0]),
            "loss_again": _hex(second[0]),
            "norm_first": _norm(first[5]),
            "norm_again": _norm(second[5]),
        }
        return second

    def _finish_header(self, generation: int) -> float:
        """What the agent does once a copy is complete; returns the seconds of the checksum."""
        assert self.slots is not None and self.engine is not None
        slot, layout = self.slot, self.engine.layout
        metadata = self.control.get(Word.METADATA_BYTES_0 + slot)
        began = time.perf_counter()
        crc = self.slots.checksum(slot, metadata, layout.payload_bytes)
        seconds = time.perf_counter() - began
        self.slots.write_header(slot, Header(RUN_ID, 0, generation, layout.hash, metadata, layout.payload_bytes, crc))
        return seconds

    def _restore(self, generation: int) -> int:
        """The steps of recovery/execute.py's restore, without a session."""
        import msgspec

        assert self.engine is not None
        metadata = msgspec.msgpack.decode(self.engine.verified_metadata(generation))
        copied = self.engine.restore(generation, self.trainer.tensors())
        self.trainer.forget_step()
        self.trainer.load_metadata(metadata)
        self.trainer.rewind_data(generation)
        self.trainer.parameters_from_main()
        return copied

    def _live(self) -> list[torch.Tensor]:
        """All that a snapshot holds, and the model's parameters, which it does not."""
        held = [tensor for _, tensor in self.trainer.tensors()]
        return held + [p.detach() for chunk in self.trainer.model for p in chunk.parameters()]

    def _different(self, before: list[torch.Tensor]) -> int:
        """How many of them have other bits than before."""
        return sum(not _same_bits(old, live.cpu()) for old, live in zip(before, self._live(), strict=True))

    def report(self, on_cpu: bool) -> dict[str, Any]:
        """The figures."""
        assert self.engine is not None
        off = [seconds for _, on, seconds, _ in self.steps if not on]
        with_snapshots = [seconds for _, on, seconds, _ in self.steps if on]
        waits = [waited for _, on, _, waited in self.steps if on]
        parameters = sum(p.numel() for chunk in self.trainer.model for p in chunk.parameters())
        return {
            "parameters": parameters,
            "snapshot_bytes": self.engine.layout.payload_bytes,
            "steps_off": len(off),
            "steps_on": len(with_snapshots),
            "step_off_s": statistics.median(off),
            "step_on_s": statistics.median(with_snapshots),
            "on_over_off": statistics.median(with_snapshots) / statistics.median(off),
            "exposed_stall_s": statistics.median(waits),
            "exposed_stall_max_s": max(waits),
            "exposed_stall_share": statistics.median(waits) / statistics.median(with_snapshots),
            "handing_over_s": statistics.median(self.begin_s),
            "peak_device_bytes": None if on_cpu else torch.cuda.max_memory_allocated(),
            "all_steps": self.steps,
            "restore": self.restored,
        }


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*raw)


def _hex(losses: dict[str, Any]) -> dict[str, str]:
    return {name: float(value.item()).hex() for name, value in losses.items()}


def _norm(value: Any) -> str | None:
    return None if value is None else float(value).hex()


def train(on_cpu: bool) -> dict[str, Any]:
    """Run the training; returns the figures, with the trainer's flags."""
    from megatron.training import training

    wheel.use_built_dataset_helpers()
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    os.environ.update(place, TORCHELASTIC_USE_AGENT_STORE="True")  # the store is ours: rank 0 is to connect to it
    timeout = timedelta(seconds=_COPY_TIMEOUT_S)
    groups = Groups(timeout, timeout)
    create_through(groups)
    trainer = MegatronTrainer(groups, timeout, AsyncSaves(lambda note: None))
    snapshots = Snapshotting(trainer)
    trainer.step_of = lambda: snapshots.current
    distrib_optimizer.put_fence(snapshots.fence, lambda phase: None)
    _hook(training, snapshots)
    sys.argv = ["pretrain_gpt.py", *flags(on_cpu)]
    import pretrain_gpt

    pretrain_gpt.main()
    figures = snapshots.report(on_cpu)
    return {"flags": " ".join(sys.argv[1:]), **figures}


def flags(on_cpu: bool) -> list[str]:
    """The trainer's flags: Transformer Engine where it is installed, Megatron's local layers where it is not."""
    import importlib.util

    words = f"{CPU_MODEL if on_cpu else GPU_MODEL} {TRAINING}".split()
    if on_cpu:
        from megatron.hotswap.device import cpu

        return words + cpu.default_flags(words)
    if importlib.util.find_spec("transformer_engine") is None:
        words += LOCAL_LAYERS.split()
    return words


def _hook(training: Any, snapshots: Snapshotting) -> None:
    setup, data, step = (
        training.setup_model_and_optimizer,
        training.build_train_valid_test_data_iterators,
        training.train_step,
    )

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        built = setup(*args, **kwargs)
        snapshots.prepare(built)
        return built

    def build_train_valid_test_data_iterators(provider: Any) -> Any:
        iterators = data(provider)
        snapshots.trainer.remember_data(iterators)
        return iterators

    training.setup_model_and_optimizer = setup_model_and_optimizer
    training.build_train_valid_test_data_iterators = build_train_valid_test_data_iterators
    training.train_step = lambda *args, **kwargs: snapshots.step(step, args, kwargs)
