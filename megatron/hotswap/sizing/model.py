"""Parameters of a GPT on each pipeline stage, in the order in which Megatron's modules list them. Pure.

Order matters: DistributedOptimizer lays parameters out back to front and cuts the result into shards. It is that of Megatron's local
layers. Transformer Engine's layers hold the same parameters but list the norm of a layer with the matrix behind it, so there a single
rank's shard may differ from this by the alignment of a parameter (63 elements for each), never their sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import UsageError


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model, as Megatron's flags give them. `vocabulary` is padded already."""

    layers: int
    hidden: int
    heads: int
    query_groups: int
    head_width: int
    ffn: int
    vocabulary: int
    positions: int | None  # learned position embeddings; None: rotary or none
    gated: bool = False  # SwiGLU
    bias: bool = True  # of linear layers
    qkv_bias: bool = False  # of the QKV matrix alone
    norm_bias: bool = True  # LayerNorm has one, RMSNorm has not
    qk_norm: bool = False
    tied: bool = True  # the output layer is the word embedding
    experts: int = 0
    moe_layers: tuple[bool, ...] = ()  # per layer, where there are experts
    expert_ffn: int = 0
    shared_expert_ffn: int = 0
    experts_per_token: int = 0
    expert_bias: bool = False  # of the router: a buffer, not a parameter


@dataclass(frozen=True)
class Split:
    """How the model is cut. `expert_tensor` is the tensor-parallel size of experts."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual: int = 1  # model chunks of each pipeline rank
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    embedding_as_layer: bool = False  # it counts as one when layers are dealt out
    loss_as_layer: bool = False


@dataclass(frozen=True)
class Parameter:
    """One parameter of this rank: elements, and how DDP treats it."""

    name: str
    count: int
    expert: bool = False  # reduced over the expert-data-parallel group
    shared_embedding: bool = False  # first and last stage both have it: a bucket of its own


def require_divisible(shape: ModelShape, split: Split) -> None:
    """Check that the model can be cut so.

    Raises:
        UsageError: states the rule and the values.
    """

    def divides(what: str, value: int, by_what: str, by: int) -> None:
        if by < 1 or value % by:
            raise UsageError(f"{what} must be a multiple of {by_what}: {value} is not a multiple of {by}; change one of them")

    divides("the number of attention heads", shape.heads, "the tensor-parallel size", split.tensor)
    divides("the number of attention heads", shape.heads, "the number of query groups", shape.query_groups)
    if shape.query_groups >= split.tensor:
        divides("the number of query groups", shape.query_groups, "the tensor-parallel size", split.tensor)
    else:
        divides("the tensor-parallel size", split.tensor, "the number of query groups", shape.query_groups)
    divides("the FFN's hidden size", shape.ffn, "the tensor-parallel size", split.tensor)
    divides("the padded vocabulary", shape.vocabulary, "the tensor-parallel size", split.tensor)
    if shape.experts:
        divides("the number of experts", shape.experts, "the expert-parallel size", split.expert)
        divides("an expert's hidden size", shape.expert_ffn, "the experts' tensor-parallel size", split.expert_tensor)
    elif split.expert > 1:
        raise UsageError(f"the expert-parallel size is {split.expert}, but the model has no experts; give --num-experts")
    for stage in range(split.pipeline):
        layers_of_stage(shape, split, stage)
    dealt = sum(len(chunk_layers(shape, split, s, c)) for s in range(split.pipeline) for c in range(split.virtual))
    if dealt != shape.layers:
        raise UsageError(f"the pipeline stages hold {dealt} layers and the model has {shape.layers}; change the stages' sizes")


def layers_of_stage(shape: ModelShape, split: Split, stage: int) -> int:
    """Layers (the embedding and the loss included, where they count as such) dealt to a pipeline rank.

    Raises:
        UsageError: they cannot be dealt out evenly.
    """
    first, last = split.first_stage_layers, split.last_stage_layers
    if first is not None and stage == 0:
        return first
    if last is not None and stage == split.pipeline - 1:
        return last
    rest = shape.layers - (first or 0) - (last or 0) + split.embedding_as_layer + split.loss_as_layer
    stages = split.pipeline - (first is not None) - (last is not None)
    if rest < 0 or rest % (stages * split.virtual):
        raise UsageError(
            f"{rest} layers cannot be dealt evenly to {stages} pipeline stages of {split.virtual} model chunks; change the number of "
            "layers, of stages or of virtual stages"
        )
    return rest // stages


def chunk_layers(shape: ModelShape, split: Split, stage: int, chunk: int) -> range:
    """The model's layers (from 0) in one model chunk of a pipeline rank."""
    place = chunk * split.pipeline + stage
    before = 0
    for earlier in range(place):
        before += _built(shape, split, earlier % split.pipeline, earlier // split.pipeline)
    return range(before, before + _built(shape, split, stage, chunk))


def _built(shape: ModelShape, split: Split, stage: int, chunk: int) -> int:
    layers = layers_of_stage(shape, split, stage)
    if layers % split.virtual:
        raise UsageError(f"pipeline stage {stage} has {layers} layers, not a multiple of its {split.virtual} model chunks; change one")
    layers //= split.virtual
    first = split.embedding_as_layer and stage == 0 and chunk == 0
    last = split.loss_as_layer and stage == split.pipeline - 1 and chunk == split.virtual - 1
    return layers - first - last


def chunk_parameters(shape: ModelShape, split: Split, stage: int, chunk: int) -> tuple[Parameter, ...]:
    """The parameters of one model chunk on one rank, in Megatron's order; the same on every rank of the stage."""
    return tuple(_parameters(shape, split, stage, chunk))


def _parameters(shape: ModelShape, split: Split, stage: int, chunk: int) -> Iterator[Parameter]:
    words = shape.vocabulary // split.tensor * shape.hidden
    shared = shape.tied and split.pipeline > 1
    if stage == 0 and chunk == 0:
        yield Parameter("embedding.word_embeddings.weight", words, shared_embedding=shared)
        if shape.positions is not None:
            yield Parameter("embedding.position_embeddings.weight", shape.positions * shape.hidden)
    for number, layer in enumerate(chunk_layers(shape, split, stage, chunk)):
        for parameter in _layer(shape, split, layer):
            yield Parameter(f"decoder.layers.{number}.{parameter.name}", parameter.count, parameter.expert)
    if stage == split.pipeline - 1 and chunk == split.virtual - 1:
        yield from _norm("decoder.final_layernorm", shape.hidden, shape)
        if shared or not shape.tied:
            yield Parameter("output_layer.weight", words, shared_embedding=shared)


def _layer(shape: ModelShape, split: Split, layer: int) -> Iterator[Parameter]:
    queries = shape.heads * shape.head_width
    mixed = queries + 2 * shape.query_groups * shape.head_width
    yield from _norm("input_layernorm", shape.hidden, shape)
    yield Parameter("self_attention.linear_proj.weight", queries // split.tensor * shape.hidden)
    if shape.bias:
        yield Parameter("self_attention.linear_proj.bias", shape.hidden)
    yield Parameter("self_attention.linear_qkv.weight", mixed // split.tensor * shape.hidden)
    if shape.bias or shape.qkv_bias:
        yield Parameter("self_attention.linear_qkv.bias", mixed // split.tensor)
    if shape.qk_norm:
        yield from _norm("self_attention.q_layernorm", shape.head_width, shape)
        yield from _norm("self_attention.k_layernorm", shape.head_width, shape)
    yield from _norm("pre_mlp_layernorm", shape.hidden, shape)
    if shape.experts and shape.moe_layers[layer]:
        yield from _experts(shape, split)
    else:
        yield from _mlp("mlp", shape.ffn // split.tensor, shape, shape.bias)


def _experts(shape: ModelShape, split: Split) -> Iterator[Parameter]:
    yield Parameter("mlp.router.weight", shape.experts * shape.hidden)
    if shape.bias:
        yield Parameter("mlp.router.bias", shape.experts)
    apart = split.expert > 1 or split.expert_tensor != split.tensor
    for expert in range(shape.experts // split.expert):
        width = shape.expert_ffn // split.expert_tensor
        for p in _mlp(f"mlp.experts.local_experts.{expert}", width, shape, shape.bias):
            yield Parameter(p.name, p.count, expert=apart)
    if shape.shared_expert_ffn:
        yield from _mlp("mlp.shared_experts", shape.shared_expert_ffn // split.tensor, shape, False)


def _mlp(name: str, width: int, shape: ModelShape, bias: bool) -> Iterator[Parameter]:
    """`width`: this rank's part of the hidden layer. Its first bias is cut like it, the second is whole on every rank."""
    inner = 2 * width if shape.gated else width
    yield Parameter(f"{name}.linear_fc1.weight", inner * shape.hidden)
    if bias:
        yield Parameter(f"{name}.linear_fc1.bias", inner)
    yield Parameter(f"{name}.linear_fc2.weight", width * shape.hidden)
    if bias:
        yield Parameter(f"{name}.linear_fc2.bias", shape.hidden)


def _norm(name: str, width: int, shape: ModelShape) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", width)
    if shape.norm_bias:
        yield Parameter(f"{name}.bias", width)


def buffers(shape: ModelShape, split: Split, stage: int, element_bytes: int) -> tuple[int, ...]:
    """Bytes of each module tensor of a stage that no optimizer owns: each router's token counts and its expert bias.

    The counts have the model's precision (`element_bytes` an element); the bias is always fp32, and Megatron keeps it so.
    """
    if not (shape.experts and shape.expert_bias):
        return ()
    layers = [n for c in range(split.virtual) for n in chunk_layers(shape, split, stage, c) if shape.moe_layers[n]]
    return (element_bytes * shape.experts, 4 * shape.experts) * len(layers)


def total_parameters(shape: ModelShape) -> int:
    """Parameters of the model, each counted once."""
    return sum(p.count for p in chunk_parameters(shape, Split(), 0, 0))


def flops_per_step(shape: ModelShape, sequence: int, samples: int) -> float:
    """Floating-point operations of one step of `samples` sequences: forward and backward, as Megatron counts them."""
    queries, keys = shape.heads * shape.head_width, shape.query_groups * shape.head_width
    attention = shape.hidden * (queries + 2 * keys) + queries * shape.hidden
    core = queries * sequence  # the causal half of two products of sequence x head width
    per_ffn = (3 if shape.gated else 2) * shape.hidden
    moe = sum(shape.moe_layers) if shape.experts else 0
    routed = shape.expert_ffn * shape.experts_per_token + shape.shared_expert_ffn
    ffn = per_ffn * ((shape.layers - moe) * shape.ffn + moe * routed)
    per_token = shape.layers * (attention + core) + ffn + shape.hidden * shape.vocabulary
    return 3.0 * 2.0 * sequence * samples * per_token
