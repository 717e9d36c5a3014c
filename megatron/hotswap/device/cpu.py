"""Train on CPUs, over gloo, with NVIDIA's trainer unchanged: the embedded default, the demo and CI.

The trainer asks torch.cuda for its device, streams, memory figures and random states. Here torch.cuda answers as one
GPU whose memory is the host's: there is one stream, everything on it is finished when the call returns, and its
random generator is the CPU's. What Megatron itself does that only a GPU, NCCL or Transformer Engine can do is
replaced by something equal. Each replacement says who needs it. The order is:

    os.environ.update(environment())              before torch is imported
    sys.argv[1:] += default_flags(sys.argv[1:])   refuses flags that ask for a GPU
    install()                                     before megatron.training is imported

Nothing else in the project asks which device it runs on.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import glob
import logging
import os
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from megatron.hotswap.device.wheel import use_built_dataset_helpers
from megatron.hotswap.errors import UsageError

CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # Megatron compiles its small kernels; on a CPU that costs minutes and gains nothing
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # validate_args demands it where tensor or sequence parallelism is on
    "OMP_NUM_THREADS": "1",  # many ranks share one host
}

# The compute capability reported: Ampere, the oldest on which Megatron allows bf16.
CAPABILITY = (8, 0)

# Flags without which the trainer would call a GPU kernel or NCCL, with their values.
CPU_FLAGS: dict[str, str | None] = {
    "--distributed-backend": "gloo",
    "--transformer-impl": "local",
    "--attention-backend": "unfused",
    "--use-cpu-initialization": None,
    "--no-gradient-accumulation-fusion": None,
    "--no-masked-softmax-fusion": None,
    "--no-bias-dropout-fusion": None,
    "--no-bias-gelu-fusion": None,
    "--no-bias-swiglu-fusion": None,
    "--no-rope-fusion": None,
    "--no-persist-layer-norm": None,
}

# Flags that a CPU allows with some values only, and what the others need.
ALLOWED_VALUES: dict[str, tuple[tuple[str, ...], str]] = {
    "--distributed-backend": (("gloo",), "a GPU with NCCL or another GPU library"),
    "--transformer-impl": (("local",), "Transformer Engine, so a GPU"),
    "--attention-backend": (("unfused", "local", "auto"), "an attention kernel for GPUs"),
    "--context-parallel-size": (("1",), "Transformer Engine's attention, so a GPU"),
    "--cuda-graph-impl": (("none",), "a GPU"),
    "--moe-token-dispatcher-type": (("allgather", "alltoall"), "a communication library for GPUs"),
    "--cross-entropy-fusion-impl": (("native",), "Transformer Engine, so a GPU"),
}

# Flags that ask for something only a GPU or Transformer Engine has.
GPU_FLAGS = frozenset(
    (
        "--batch-invariant-mode",
        "--enable-cuda-graph",
        "--external-cuda-graph",
        "--fine-grained-activation-offloading",
        "--fp4-format",
        "--fp4-param-gather",
        "--fp8-format",
        "--fp8-param-gather",
        "--fused-residual-rmsnorm",
        "--hierarchical-context-parallel-sizes",
        "--hybrid-context-parallel",
        "--moe-enable-deepep",
        "--moe-grouped-gemm",
        "--moe-permute-fusion",
        "--moe-router-fusion",
        "--optimizer-cpu-offload",
        "--optimizer-cuda-graph",
        "--te-rng-tracker",
        "--tp-comm-overlap",
        "--use-flash-attn",
        "--use-megatron-fsdp",
        "--use-nccl-ub",
        "--use-precision-aware-optimizer",
        "--use-sharp",
        "--use-te-activation-func",
        "--use-torch-fsdp2",
        "--use-transformer-engine-op-fuser",
    )
)

# Functions of torch that take a device and make a tensor there.
FACTORIES = (
    "tensor",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "zeros",
    "zeros_like",
    "ones",
    "ones_like",
    "full",
    "full_like",
    "arange",
    "linspace",
    "eye",
    "rand",
    "rand_like",
    "randn",
    "randn_like",
    "randint",
    "randperm",
)

_installed = False


def needed() -> bool:
    """Whether there is no GPU at all. One that torch cannot use is a fault to report, not a reason to train on CPUs."""
    import torch

    if _installed:
        return True
    if torch.cuda.is_available():
        return False
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    return hidden or not glob.glob("/dev/nvidia[0-9]*")


def environment() -> dict[str, str]:
    """Variables that a worker needs before it imports torch. What the user has set already stays."""
    return {name: os.environ.get(name, value) for name, value in CPU_ENVIRONMENT.items()}


def default_flags(argv: list[str]) -> list[str]:
    """Flags to append to argv so that the trainer runs without a GPU; those that the user gave are left out.

    Raises UsageError where argv asks for what only a GPU can do.
    """
    given = _read_flags(argv)
    _refuse_gpu_flags(given)
    flags: list[str] = []
    for flag, value in CPU_FLAGS.items():
        if flag not in given:
            flags += [flag] if value is None else [flag, value]
    return flags


def _read_flags(argv: list[str]) -> dict[str, str]:
    """Flag -> the word after it, or behind its "="; "" where there is none. The last one counts, as in argparse."""
    flags: dict[str, str] = {}
    for position, word in enumerate(argv):
        if not word.startswith("--"):
            continue
        flag, equals, value = word.partition("=")
        following = argv[position + 1] if position + 1 < len(argv) else ""
        flags[flag] = value if equals else "" if following.startswith("--") else following
    return flags


def _refuse_gpu_flags(given: dict[str, str]) -> None:
    for flag, (allowed, needs) in ALLOWED_VALUES.items():
        if flag in given and given[flag] not in allowed:
            raise UsageError(
                f"without a GPU {flag} must be {' or '.join(allowed)}, but it is {given[flag]!r}, which needs {needs}. "
                f"Drop {flag}, or start the job where torch.cuda.is_available() is true."
            )
    refused = sorted(GPU_FLAGS & given.keys())
    if refused:
        raise UsageError(
            f"without a GPU these flags cannot be used: {' '.join(refused)}. "
            "Drop them, or start the job where torch.cuda.is_available() is true."
        )


class Stream:
    """The only stream: what is put on it has run when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


class Event:
    """An event on the only stream: it has always happened already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0


def install() -> None:
    """Make the unchanged trainer run on this host's CPUs. Once per process, before megatron.training is imported."""
    global _installed
    if _installed:
        return
    _installed = True
    os.environ.update(environment())
    import torch

    # torch.compile keeps a table of torch's functions by identity, so it is made before they are replaced.
    import torch._dynamo

    torch._dynamo.config.disable = True
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    _answer_device_queries(torch)
    _answer_streams(torch)
    _answer_memory_queries(torch)
    _share_random_generator(torch)
    _keep_generator_from_loaders(torch)
    _place_tensors(torch)
    _name_tensor_types(torch)
    _skip_graph_capture_checks(torch)

    _use_cpu_generator_in_tracker(torch)
    _mark_torch_norms()
    _give_split_sizes_to_all_to_all(torch)
    _gather_unequal_parts(torch)
    _keep_adam_steps_apart(torch)
    _copy_what_async_save_writes()
    _skip_warm_up()
    use_built_dataset_helpers()


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for a call that has nothing to do on a CPU."""


def _answer(value: Any) -> Any:
    """A function that always answers this."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    return answer


def _answer_device_queries(torch: Any) -> None:
    """initialize_megatron demands CUDA; almost every module asks for current_device() to create a tensor there."""
    cuda = torch.cuda
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = SimpleNamespace(
        name="cpu",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=total,
        multi_processor_count=os.cpu_count() or 1,
        uuid="cpu",
    )
    cuda.is_available = _answer(True)
    cuda.is_initialized = _answer(True)
    cuda.device_count = _answer(1)
    cuda.current_device = _answer(torch.device("cpu"))
    cuda.set_device = _nothing
    cuda.device = contextlib.nullcontext
    cuda.get_device_name = _answer("cpu")
    cuda.get_device_capability = _answer(CAPABILITY)
    cuda.get_device_properties = _answer(properties)
    cuda._lazy_init = _nothing
    torch.accelerator.is_available = _answer(False)  # a DataLoader asks it, then page-locks memory by itself


def _answer_streams(torch: Any) -> None:
    """Streams, events and NVTX ranges: DDP, the pipeline schedules, timers and data loading use them."""
    cuda = torch.cuda
    only = Stream()
    cuda.Stream = Stream
    cuda.Event = Event
    cuda.current_stream = _answer(only)
    cuda.default_stream = _answer(only)
    cuda.stream = contextlib.nullcontext
    cuda.set_stream = _nothing
    cuda.synchronize = _nothing
    cuda.is_current_stream_capturing = _answer(False)
    cuda.nvtx.range_push = _nothing
    cuda.nvtx.range_pop = _nothing
    torch.Tensor.record_stream = _nothing


def _answer_memory_queries(torch: Any) -> None:
    """report_memory and training_log print these; 0 where a CPU has no such figure."""
    cuda = torch.cuda
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, _answer(0))
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats"):
        setattr(cuda, name, _nothing)

    def memory_stats(*args: Any) -> dict[str, int]:
        return defaultdict(int)

    def mem_get_info(*args: Any) -> tuple[int, int]:
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")

    cuda.memory_stats = memory_stats
    cuda.mem_get_info = mem_get_info


def _share_random_generator(torch: Any) -> None:
    """The GPU's generator is the CPU's default one, which is what dropout on a CPU draws from. _set_random_seed,
    checkpoints and recomputation read and set it."""
    cuda = torch.cuda

    def get_rng_state(device: Any = "cuda") -> Any:
        return torch.get_rng_state()

    def set_rng_state(new_state: Any, device: Any = "cuda") -> None:
        torch.set_rng_state(new_state)

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))  # torch.manual_seed would call this again

    for module in (cuda, cuda.random):
        module.get_rng_state = get_rng_state
        module.set_rng_state = set_rng_state
        module.get_rng_state_all = lambda: [torch.get_rng_state()]
        module.set_rng_state_all = lambda states: torch.set_rng_state(states[0])
        module.manual_seed = manual_seed
        module.manual_seed_all = _nothing  # torch.manual_seed calls it after seeding the same generator
        module.initial_seed = torch.initial_seed


def _keep_generator_from_loaders(torch: Any) -> None:
    """A data loader draws its seed from the CPU's generator when it is opened. On a GPU that does not move the
    numbers that dropout gets. Here it would: TP ranks (only the first opens a loader) would drop different elements,
    and a run continued from a checkpoint, which opens its loader later, would not repeat the run that never
    stopped."""
    loader = torch.utils.data.DataLoader
    original = loader.__iter__

    @functools.wraps(original)
    def opened(self: Any) -> Any:
        state = torch.get_rng_state()
        try:
            return original(self)
        finally:
            torch.set_rng_state(state)

    loader.__iter__ = opened


def _is_cuda(device: Any) -> bool:
    """Whether this names a GPU: "cuda", "cuda:0", torch.device("cuda") or a number."""
    return device is not None and (isinstance(device, int) or str(device).startswith("cuda"))


def _place_tensors(torch: Any) -> None:
    """Tensors that are created on, or moved to, "cuda" stay on the CPU. Page-locked memory is ordinary memory."""
    cpu = torch.device("cpu")

    def placed(factory: Any) -> Any:
        @functools.wraps(factory)
        def create(*args: Any, **kwargs: Any) -> Any:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = cpu
            return factory(*args, **kwargs)

        return create

    for name in FACTORIES:
        setattr(torch, name, placed(getattr(torch, name)))

    original_to = torch.Tensor.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(cpu if isinstance(arg, (str, torch.device)) and _is_cuda(arg) else arg for arg in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = cpu
        return original_to(self, *args, **kwargs)

    def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    torch.Tensor.to = to
    torch.Tensor.cuda = stay
    torch.nn.Module.cuda = stay
    torch.Tensor.pin_memory = stay


def _name_tensor_types(torch: Any) -> None:
    """Megatron's optimizers sort parameters by Tensor.type(), Float16Module by isinstance with
    torch.cuda.FloatTensor."""
    for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor", "DoubleTensor", "IntTensor", "LongTensor"):
        setattr(torch.cuda, name, getattr(torch, name))
    original = torch.Tensor.type

    def type_(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            if args and isinstance(args[0], str):
                args = (args[0].replace("torch.cuda.", "torch."), *args[1:])
            return original(self, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_


def _skip_graph_capture_checks(torch: Any) -> None:
    """torch.optim asks before each step whether a CUDA graph is being captured."""
    torch.optim.Optimizer._accelerator_graph_capture_health_check = _nothing


def _use_cpu_generator_in_tracker(torch: Any) -> None:
    """tensor_parallel.random reads and sets the GPU's generator by itself, not through torch.cuda."""
    from megatron.core.tensor_parallel import random as tp_random

    def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> Any:
        return torch.get_rng_state()

    def set_state(new_state: Any, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    tp_random._get_cuda_rng_state = get_state
    tp_random._set_cuda_rng_state = set_state
    # The tracker's fork() warns when the CPU's generator moved inside it: here that is the generator meant to move.
    logging.getLogger(tp_random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _mark_torch_norms() -> None:
    """WrappedTorchNorm refuses sequence parallelism, for it leaves its weights without the mark that
    finalize_model_grads looks for: each TP rank then sees a part of the tokens, so the gradients of a norm's weights
    have to be summed over the TP group. Build the same norm, and mark them."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = WrappedTorchNorm.__new__

    def build(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = build


def _give_split_sizes_to_all_to_all(torch: Any) -> None:
    """The all-to-all dispatcher turns its split sizes to numpy on their way from the GPU to the host, in
    maybe_move_tensor_to_cpu; a tensor that is on the host already stays a tensor, which all_to_all_single refuses."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = to_host
    token_dispatcher.maybe_move_tensor_to_cpu = to_host
    moe_utils.te_general_gemm = None  # Transformer Engine's gemm in the router; torch's is used where there is none


def _gather_unequal_parts(torch: Any) -> None:
    """The all-to-all dispatcher gathers, and in backward reduce-scatters, parts of unequal length where experts are
    split over tensor parallel ranks. gloo has both for equal parts only: gather padded parts; sum everything and keep
    a part."""
    from megatron.core.tensor_parallel import mappings

    gather = mappings._gather_along_first_dim
    scatter = mappings._reduce_scatter_along_first_dim

    def gather_parts(input_: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None:
            return gather(input_, group, use_global_buffer=use_global_buffer)
        longest = max(output_split_sizes)
        padded = input_.new_zeros(longest, *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = gather(padded, group).split(longest) if longest else [padded] * len(output_split_sizes)
        return torch.cat([part[:length] for part, length in zip(parts, output_split_sizes, strict=True)])

    def scatter_parts(input_: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None:
            return scatter(input_, group, use_global_buffer=use_global_buffer)
        total = input_.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].clone()

    mappings._gather_along_first_dim = gather_parts
    mappings._reduce_scatter_along_first_dim = scatter_parts


def _keep_adam_steps_apart(torch: Any) -> None:
    """DistributedOptimizer.state_dict and load_state_dict where Adam is torch's own: Transformer Engine and Apex
    count steps per group, torch per parameter, in a tensor to which each step adds 1.

    - state_dict wants exactly one step count among the parameters. Before the first step there is none: the state that
      torch would make at that step, zeros, is made now. A rank whose shard holds no parameter has none either.
    - load_state_dict gives one and the same tensor to all parameters, so that a step would count once per parameter.
      The count itself is the groups' and right: give each parameter its own.
    - _set_main_param_and_optimizer_states then puts back each tensor of the state, the count too, which some formats
      do not hold and others hold as it was before the load. It also copies into the main parameters: where the model
      is fp32 these are views of its parameters, which autograd refuses outside no_grad.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original_save = DistributedOptimizer.state_dict
    original_load = DistributedOptimizer.load_state_dict
    original_set = DistributedOptimizer._set_main_param_and_optimizer_states

    def state_dict(self: Any) -> Any:
        state = self.optimizer.state
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if not state[parameter]:
                    state[parameter]["step"] = torch.tensor(0.0)
                    for key in self.optimizer_state_keys:
                        state[parameter][key] = torch.zeros_like(parameter)
        if state:
            return original_save(self)
        state["no parameter in this shard"] = {"step": torch.tensor(0.0)}
        try:
            return original_save(self)
        finally:
            state.clear()

    def load_state_dict(self: Any, saved: Any) -> None:
        original_load(self, saved)
        for group in self.optimizer.param_groups:
            step = group.pop("step")
            for parameter in group["params"]:
                self.optimizer.state[parameter]["step"] = torch.tensor(float(step))

    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        with torch.no_grad():
            original_set(self, model_param, {**tensors, "step": None})  # what is no tensor is left as it is

    DistributedOptimizer.state_dict = state_dict
    DistributedOptimizer.load_state_dict = load_state_dict
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states


def _copy_what_async_save_writes() -> None:
    """--async-save copies the state to the host (preload_tensors) and another process writes it while training goes on.

    Here the state is on the host already, and the "copy" would be the live tensors themselves: clone them. That is
    done before the request is sent, for sending a tensor to a process moves its memory into a shared file, under the
    trainer's feet. The process that writes gets this layer too: it sets its CUDA device.
    """
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    preload = FileSystemWriterAsync.preload_tensors
    schedule = PersistentAsyncCaller.schedule_async_call

    def preload_tensors(write_buckets: list[Any], non_blocking: bool = True) -> list[Any]:
        return [
            (file, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
            for file, key, (data, tensors) in preload(write_buckets, non_blocking)
        ]

    def schedule_async_call(self: Any, request: Any) -> None:
        if request.preload_fn is not None:
            arguments = list(request.async_fn_args)
            arguments[1] = request.preload_fn()  # the second is the state, as in AsyncRequest.execute_sync
            request = request._replace(async_fn_args=tuple(arguments), preload_fn=None)
        schedule(self, request)

    FileSystemWriterAsync.preload_tensors = staticmethod(preload_tensors)
    PersistentAsyncCaller.schedule_async_call = schedule_async_call
    PersistentAsyncCaller.async_loop = staticmethod(_write_checkpoints)


def _write_checkpoints(*args: Any) -> None:
    """The process of --async-save that writes: Megatron's loop, with this layer."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    loop = PersistentAsyncCaller.async_loop
    install()
    loop(*args)


def _skip_warm_up() -> None:
    """set_jit_fusion_options warms up the fused kernels on random input. There are none here, and on a GPU its draws
    come from a generator that weight initialization does not use: taken from the only one here, they would make the
    initial weights depend on the batch and on sequence parallelism."""
    from megatron.training import initialize

    initialize._warmup_jit_function = _nothing
