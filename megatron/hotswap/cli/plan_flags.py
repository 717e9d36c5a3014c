"""Megatron's flags as `deadpool plan` reads them: the model's shape, its splits and its optimizer, without importing Megatron.

A flag that changes what a snapshot holds in a way that sizing/ does not know is refused, not ignored.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from .. import config
from ..errors import UsageError
from ..sizing.model import ModelShape, Split
from ..sizing.shards import OptimizerKind
from .checks import PlainParser

_NUMBERS = (
    "num-layers",
    "hidden-size",
    "num-attention-heads",
    "ffn-hidden-size",
    "kv-channels",
    "max-position-embeddings",
    "seq-length",
    "vocab-size",
    "padded-vocab-size",
    "micro-batch-size",
    "global-batch-size",
    "num-experts",
    "moe-ffn-hidden-size",
    "moe-shared-expert-intermediate-size",
    "num-layers-per-virtual-pipeline-stage",
    "num-virtual-stages-per-pipeline-rank",
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
    "expert-tensor-parallel-size",
    "ddp-bucket-size",
    "ddp-num-buckets",
)
_NUMBERS_WITH_DEFAULT = {
    "tensor-model-parallel-size": 1,
    "pipeline-model-parallel-size": 1,
    "context-parallel-size": 1,
    "expert-model-parallel-size": 1,
    "num-query-groups": 1,
    "moe-router-topk": 2,
    "make-vocab-size-divisible-by": 128,
    "num-distributed-optimizer-instances": 1,
}
_SWITCHES = (
    "group-query-attention",
    "swiglu",
    "disable-bias-linear",
    "add-qkv-bias",
    "qk-layernorm",
    "untie-embeddings-and-output-weights",
    "use-rotary-position-embeddings",
    "no-pad-vocab-size",
    "disable-pad-vocab-size",
    "moe-router-enable-expert-bias",
    "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split",
    "use-distributed-optimizer",
    "overlap-grad-reduce",
    "ddp-pad-buckets-for-high-nccl-busbw",
    "bf16",
    "fp16",
)
_LAYERS_MAX = 4096  # a longer --moe-layer-freq is a mistake
#: Flags whose parameters, state or shards sizing/ does not know.
_UNKNOWN_SIZES = (
    "attention-output-gate",
    "experimental-attention-variant",
    "expert-tensor-parallel-num-weight-shards",
    "fp4-param-gather",
    "fp8-param-gather",
    "freeze-all-layers",
    "heterogeneous-layers-config-encoded-json",
    "heterogeneous-layers-config-path",
    "hybrid-layer-pattern",
    "hybrid-override-pattern",
    "is-hybrid-model",
    "moe-latent-size",
    "moe-shared-expert-gate",
    "mtp-num-layers",
    "multi-latent-attention",
    "no-position-embedding",
    "optimizer-cpu-offload",
    "overlap-param-gather-with-optimizer-step",
    "pipeline-model-parallel-layout",
    "quick-geglu",
    "spec",
    "tensor-parallel-num-weight-shards",
    "use-checkpoint-args",
    "use-megatron-fsdp",
    "use-precision-aware-optimizer",
    "use-torch-fsdp2",
    "use-tp-pp-dp-mapping",
    "yaml-cfg",
)


@dataclass(frozen=True)
class TrainingFlags:
    """What the plan needs of a Megatron command line."""

    shape: ModelShape
    split: Split
    optimizer: OptimizerKind
    sequence: int
    global_batch: int | None  # samples a step; None: one micro-batch of each data-parallel rank
    micro_batch: int
    hot_swap: config.HotSwapConfig


def read_training_flags(argv: Sequence[str], vocabulary: int | None, step_tensor: bool) -> TrainingFlags:
    """Read a Megatron command line.

    Args:
        argv: everything after the script's name.
        vocabulary: the tokenizer's size, where the flags alone do not tell it.
        step_tensor: Adam keeps a step beside each piece of a parameter, as torch's does on CPUs.

    Raises:
        UsageError: a flag is missing, does not fit another, or is one whose effect on a snapshot is not known here.
    """
    _refuse_unknown_sizes(argv)
    args = _parse(argv)
    if args.num_distributed_optimizer_instances != 1:
        raise UsageError("hot-swap does not cover --num-distributed-optimizer-instances above 1 yet; leave it out")
    for flag in ("num-layers", "hidden-size", "num-attention-heads", "max-position-embeddings", "micro-batch-size"):
        if _value(args, flag) is None:
            raise UsageError(f"the plan needs --{flag} among Megatron's flags after --, as Megatron itself does; add it")
    split = _split(args)
    shape = _shape(args, _padded_vocabulary(args, vocabulary))
    sequence = args.seq_length or args.max_position_embeddings
    optimizer = _optimizer(args, step_tensor)
    return TrainingFlags(shape, split, optimizer, sequence, args.global_batch_size, args.micro_batch_size, _hot_swap(argv))


def _hot_swap(argv: Sequence[str]) -> config.HotSwapConfig:
    swap = config.parse(argv)
    if swap.failure_domain not in ("node", "switch"):
        raise UsageError(
            f"the plan knows --hot-swap-failure-domain node and switch, got {swap.failure_domain!r}; for a plan say switch, and "
            "--nodes-per-switch before --"
        )
    return swap


def _value(args: argparse.Namespace, flag: str) -> int | None:
    found: int | None = getattr(args, flag.replace("-", "_"))
    return found


def _refuse_unknown_sizes(argv: Sequence[str]) -> None:
    given = sorted({w.split("=")[0] for w in argv if w.startswith("--") and w.split("=")[0][2:] in _UNKNOWN_SIZES})
    if given:
        raise UsageError(
            f"the plan does not know what {', '.join(given)} does to the size of a snapshot; plan without it for an estimate, or start "
            "the job: `deadpool run` shows the host memory it takes"
        )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = PlainParser(allow_abbrev=False, add_help=False)
    for flag in _NUMBERS:
        parser.add_argument(f"--{flag}", type=int)
    for flag, default in _NUMBERS_WITH_DEFAULT.items():
        parser.add_argument(f"--{flag}", type=int, default=default)
    for flag in _SWITCHES:
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--position-embedding-type", default="learned_absolute")
    parser.add_argument("--normalization", default="LayerNorm")
    parser.add_argument("--softmax-type", default="vanilla")
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--sgd-momentum", type=float, default=0.9)
    parser.add_argument("--moe-layer-freq", default="1")
    parser.add_argument("--moe-router-load-balancing-type", nargs="+", default=["aux_loss"])
    parser.add_argument("--tokenizer-type")
    parser.add_argument("--vocab-file")
    parser.add_argument("--vocab-extra-ids", type=int, default=0)
    args, _ = parser.parse_known_args(list(argv))
    for flag in (*_NUMBERS, *_NUMBERS_WITH_DEFAULT):
        value = _value(args, flag)
        if value is not None and value < 1:
            raise UsageError(f"--{flag} must be at least 1, got {value}")
    known = {
        "position-embedding-type": ("learned_absolute", "rope", "none"),
        "normalization": ("LayerNorm", "RMSNorm"),
        "softmax-type": ("vanilla", "off-by-one"),
        "optimizer": ("adam", "sgd"),
    }
    for flag, values in known.items():
        given = getattr(args, flag.replace("-", "_"))
        if given not in values:
            raise UsageError(f"the plan knows --{flag} {', '.join(values)}, got {given}; plan with one of them for an estimate")
    if set(args.moe_router_load_balancing_type) & {"global_aux_loss", "quantile_balancing"}:
        raise UsageError("the plan does not know the buffers of --moe-router-load-balancing-type global_aux_loss or quantile_balancing")
    return args


def _padded_vocabulary(args: argparse.Namespace, vocabulary: int | None) -> int:
    if args.padded_vocab_size is not None:
        padded: int = args.padded_vocab_size
        return padded
    size = vocabulary
    if size is None and args.tokenizer_type == "NullTokenizer":
        size = args.vocab_size
    elif size is None and args.tokenizer_type in (None, "GPT2BPETokenizer") and args.vocab_file is not None:
        size = _entries(args.vocab_file)
    if size is None:
        raise UsageError(
            f"the size of the vocabulary is the tokenizer's ({args.tokenizer_type or 'GPT2BPETokenizer'}), which the plan does not load; "
            "give it before --, as --vocabulary 50257"
        )
    size += int(args.vocab_extra_ids)
    if args.no_pad_vocab_size or args.disable_pad_vocab_size:
        return size
    multiple = int(args.make_vocab_size_divisible_by * args.tensor_model_parallel_size)
    return -(-size // multiple) * multiple


def _entries(path: str) -> int:
    try:
        with open(path) as file:
            return len(json.load(file))
    except (OSError, ValueError) as fault:
        raise UsageError(f"--vocab-file {path} cannot be read ({fault}); correct the path, or give --vocabulary before --") from fault


def _split(args: argparse.Namespace) -> Split:
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    virtual = args.num_virtual_stages_per_pipeline_rank or 1
    if args.num_layers_per_virtual_pipeline_stage is not None:
        if args.num_virtual_stages_per_pipeline_rank is not None or first is not None or last is not None:
            raise UsageError(
                "--num-layers-per-virtual-pipeline-stage goes with neither --num-virtual-stages-per-pipeline-rank nor uneven stages; "
                "give --num-virtual-stages-per-pipeline-rank alone"
            )
        dealt = args.num_layers + args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
        per_stage = args.pipeline_model_parallel_size * args.num_layers_per_virtual_pipeline_stage
        if dealt % per_stage:
            raise UsageError(
                f"{dealt} layers cannot be dealt to {args.pipeline_model_parallel_size} pipeline stages in chunks of "
                f"{args.num_layers_per_virtual_pipeline_stage}; change one of them"
            )
        virtual = dealt // per_stage
    return Split(
        tensor=args.tensor_model_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        context=args.context_parallel_size,
        expert=args.expert_model_parallel_size,
        expert_tensor=args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
        virtual=virtual,
        first_stage_layers=first,
        last_stage_layers=last,
        embedding_as_layer=args.account_for_embedding_in_pipeline_split,
        loss_as_layer=args.account_for_loss_in_pipeline_split,
    )


def _shape(args: argparse.Namespace, vocabulary: int) -> ModelShape:
    hidden, heads = args.hidden_size, args.num_attention_heads
    if args.kv_channels is None and hidden % heads:
        raise UsageError(f"--hidden-size must be a multiple of --num-attention-heads: {hidden} is not one of {heads}; change one")
    # As Megatron's validate_args: with a gate two thirds of 4 x hidden, rounded down to a multiple of 64.
    ffn = args.ffn_hidden_size or (int(4 * hidden * 2 / 3 / 64) * 64 if args.swiglu else 4 * hidden)
    learned = args.position_embedding_type == "learned_absolute" and not args.use_rotary_position_embeddings
    return ModelShape(
        layers=args.num_layers,
        hidden=hidden,
        heads=heads,
        query_groups=args.num_query_groups if args.group_query_attention else heads,
        head_width=args.kv_channels or hidden // heads,
        ffn=ffn,
        vocabulary=vocabulary,
        positions=args.max_position_embeddings if learned else None,
        gated=args.swiglu,
        bias=not args.disable_bias_linear,
        qkv_bias=args.add_qkv_bias,
        norm_bias=args.normalization == "LayerNorm",
        qk_norm=args.qk_layernorm,
        tied=not args.untie_embeddings_and_output_weights,
        experts=args.num_experts or 0,
        moe_layers=_moe_layers(args.moe_layer_freq, args.num_layers) if args.num_experts else (),
        expert_ffn=args.moe_ffn_hidden_size or ffn,
        shared_expert_ffn=args.moe_shared_expert_intermediate_size or 0,
        experts_per_token=args.moe_router_topk,
        expert_bias=args.moe_router_enable_expert_bias,
    )


def _moe_layers(frequency: str, layers: int) -> tuple[bool, ...]:
    """--moe-layer-freq: a number (every so many layers, the first of them) or a list with a 0 or 1 a layer, as "([1]*3+[0]*1)*2"."""
    if frequency.isdigit():
        return tuple(n % int(frequency) == 0 for n in range(layers))
    try:
        pattern = _pattern(ast.parse(frequency, mode="eval").body)
    except SyntaxError:
        pattern = []
    if len(pattern) != layers:
        raise UsageError(f"--moe-layer-freq must be a number or a list of a 0 or 1 for each of {layers} layers, got {frequency!r}")
    return tuple(bool(n) for n in pattern)


def _pattern(node: ast.expr) -> list[int]:
    """A list of 0 and 1, sums of such lists and their multiples; nothing else is evaluated, and nothing long."""
    found: list[int] | None = None
    if isinstance(node, ast.List):
        values = [e.value for e in node.elts if isinstance(e, ast.Constant) and isinstance(e.value, int)]
        found = values if len(values) == len(node.elts) and set(values) <= {0, 1} else None
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        found = _pattern(node.left) + _pattern(node.right)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.right, ast.Constant):
        times = node.right.value
        found = _pattern(node.left) * min(times, _LAYERS_MAX) if isinstance(times, int) else None
    if found is None or len(found) > _LAYERS_MAX:
        raise UsageError(
            f'--moe-layer-freq must be a list of 0 and 1 (sums and multiples of such lists too, as "([1]*3+[0]*1)*2") of at most '
            f"{_LAYERS_MAX} layers"
        )
    return found


def _optimizer(args: argparse.Namespace, step_tensor: bool) -> OptimizerKind:
    if args.optimizer == "sgd" and args.use_distributed_optimizer:
        raise UsageError("Megatron's distributed optimizer goes with --optimizer adam only; leave --use-distributed-optimizer out")
    sgd_tensors = 2 if args.sgd_momentum else 1
    return OptimizerKind(
        distributed=args.use_distributed_optimizer,
        fp32_tensors=3 if args.optimizer == "adam" else sgd_tensors,
        step_tensor=step_tensor and args.optimizer == "adam",
        overlap_grad_reduce=args.overlap_grad_reduce,
        bucket_elements=args.ddp_bucket_size,
        buckets=args.ddp_num_buckets,
        high_bandwidth_padding=args.ddp_pad_buckets_for_high_nccl_busbw,
        element_bytes=2 if args.bf16 or args.fp16 else 4,
    )


def samples_per_step(flags: TrainingFlags, data_parallel: int) -> int:
    """Sequences of one optimizer step.

    Raises:
        UsageError: the global batch cannot be cut into micro-batches.
    """
    per_pass = flags.micro_batch * data_parallel
    samples = flags.global_batch or per_pass
    if math.gcd(samples, per_pass) != per_pass:
        raise UsageError(
            f"--global-batch-size must be a multiple of --micro-batch-size x data-parallel size: {samples} is not one of {per_pass}"
        )
    return samples
