"""Train a GPT model with Megatron, hot-swap included.

The trainer itself is `megatron.training.pretrain` of the megatron-core wheel. It asks its script for three things,
and they are all that stands here: the datasets, one forward step, and the loss. The trainer builds the model from the
flags by itself (GPTModelConfig): local and Transformer Engine layers, experts and multi-token prediction included.

Nothing is imported at the top that is slow: saving a checkpoint starts a process that imports this file again.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from torch import Tensor

# A loss this many times the largest one seen so far counts as spiky (--check-for-spiky-loss).
SPIKY_LOSS_FACTOR = 10.0

# Every key that get_batch_on_this_tp_rank may broadcast. A dataset that lacks one leaves it at None.
BATCH_KEYS = (
    "tokens",
    "labels",
    "loss_mask",
    "position_ids",
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "local_cp_size",
    "hybrid_cp_group",
)


def refuse_unsupported(args: Namespace) -> None:
    """These need another dataset or another loop than this script has; to train without them, silently, is worse."""
    flags = {
        "--sft": args.sft,
        "--fim-data": args.fim_data,
        "--hybrid-context-parallel": args.hybrid_context_parallel,
        "--dataloader-inter-document-masking": args.dataloader_inter_document_masking,
        "--perform-rl-step": args.perform_rl_step,
    }
    given = [flag for flag, value in flags.items() if value]
    if given:
        raise SystemExit(
            f"pretrain_gpt.py trains GPT on unpacked sequences only, but got {' '.join(given)}. "
            "Run Megatron's own script for it: python -m megatron.hotswap SCRIPT with the same flags."
        )


def stage_needs_data(args: Namespace, vp_stage: int | None) -> tuple[bool, bool, bool]:
    """(first, last, mtp) of one model chunk. A chunk for which all are false reads no data at all."""
    from megatron.core import parallel_state
    from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank

    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    mtp = mtp_on_this_rank(
        layout=args.pipeline_model_parallel_layout,
        mtp_num_layers=args.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )
    return first, last, mtp


def get_batch(data_iterator: Iterator[dict[str, Tensor]], vp_stage: int | None) -> dict[str, Any]:
    """One micro-batch: TP rank 0 reads it, the others get it by broadcast, then each CP rank takes its part."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
    from megatron.training import get_args

    args = get_args()
    first, last, mtp = stage_needs_data(args, vp_stage)
    batch: dict[str, Any] = dict.fromkeys(BATCH_KEYS)
    if not (first or last or mtp):
        return batch
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    if tp_rank == 0:
        for key, value in next(data_iterator).items():
            batch[key] = value.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=first,
        is_pipeline_last_stage=last,
    )
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group())


def check_loss(loss: Tensor, args: Namespace) -> None:
    """Hand the loss to Megatron's rerun state machine, which runs the step again to tell a bad node from bad data."""
    import torch
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for rejects, what in ((torch.isnan, "NaN"), (torch.isinf, "infinity")):
            machine.validate_result(
                result=loss, rejection_func=rejects, message=f"{what} in the local loss of the forward pass", fatal=True
            )
    if args.check_for_spiky_loss:
        machine.validate_result(
            result=loss,
            rejection_func=partial(machine.is_unexpectedly_large, threshold=SPIKY_LOSS_FACTOR, context="loss"),
            message="spiky loss",
            fatal=False,
        )


def loss_func(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of the loss over the tokens that count, their number, and both as one pair for the log.

    The trainer divides by the number itself, because only it knows the numbers of the other micro-batches and ranks.
    """
    import torch
    from megatron.training import get_args

    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    check_loss(loss, get_args())
    tokens = mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def forward_step(data_iterator: Iterator[dict[str, Tensor]], model: Any, return_schedule_plan: bool = False) -> tuple:
    """One micro-batch through one model chunk; with return_schedule_plan only the plan of it (expert overlap)."""
    from megatron.core.utils import get_attr_wrapped_model
    from megatron.training import get_timers

    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timer.stop()
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_func, batch["loss_mask"])


def dataset_config(args: Namespace) -> Any:
    """Megatron's dataset configuration, from its flags."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.training import get_tokenizer
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as file:
            sequences_per_dataset = json.load(file)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        sequences_per_dataset=sequences_per_dataset,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size if args.sequence_parallel else 0,
    )


def datasets(sample_counts: list[int | None], vp_stage: int | None = None) -> tuple:
    """Train, validation and test datasets of these sizes, built on the ranks whose model chunk reads data."""
    from megatron.core import parallel_state
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
    from megatron.training import get_args

    args = get_args()

    def reads_data() -> bool:
        return parallel_state.get_tensor_model_parallel_rank() == 0 and any(stage_needs_data(args, vp_stage))

    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, sample_counts, reads_data, dataset_config(args)).build()


# The trainer asks: may every rank call the builder (it coordinates the ranks itself), or TP rank 0 alone?
datasets.is_distributed = True  # type: ignore[attr-defined]


def main() -> None:
    """Read Megatron's flags and train."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    # The trainer divides by the evaluation interval, but leaves it unset where no flag gives it.
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer", "eval_interval": 1000})
    refuse_unsupported(args)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    from megatron.hotswap.__main__ import launch_or_train

    sys.exit(launch_or_train(__file__, main))
