"""NVIDIA's trainer, unchanged, on CPUs: real jobs over the grids and features that the device layer is there for.

Each job takes many seconds to start, so a job carries several features and two jobs are compared wherever one claim
needs it. "Equal" means equal bits: losses and gradient norms are compared as hex floats.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from cpu_job import MOCK_DATA, TINY_MODEL, JobResult, run_job

NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"


def losses(result: JobResult) -> list[float]:
    return [float.fromhex(step.loss) for step in result.last_rank]


def norms(result: JobResult) -> list[float]:
    return [float.fromhex(step.grad_norm) for step in result.last_rank]


def assert_learns(result: JobResult, iterations: int = 4) -> None:
    """Every step was made, by every rank, with finite numbers, and the loss came down."""
    for steps in result.steps.values():
        assert [step.iteration for step in steps] == list(range(1, iterations + 1))
    assert all(math.isfinite(value) for value in losses(result) + norms(result))
    assert losses(result)[-1] < losses(result)[0]


def test_continued_from_checkpoint_equals_uninterrupted(tmp_path: Path) -> None:
    """TP2 PP2 DP2 with sequence parallelism, bf16, both overlaps and dropout, saved by torch_dist after step 2."""
    grid = (
        f"{TINY_MODEL} {MOCK_DATA} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
        "--bf16 --overlap-grad-reduce --overlap-param-gather"
    )
    checkpoints = tmp_path / "checkpoints"
    whole = run_job(8, f"{grid} --save {checkpoints} --save-interval 2", tmp_path / "whole")
    assert_learns(whole)
    for rank in (0, 2, 4, 6):
        for name, digest in whole.digests[rank].items():
            if "layernorm" in name:
                assert whole.digests[rank + 1][name] == digest, f"TP ranks {rank} and {rank + 1} differ in {name}"

    (checkpoints / "latest_checkpointed_iteration.txt").write_text("2")
    continued = run_job(8, f"{grid} --load {checkpoints}", tmp_path / "continued")
    for rank in range(8):
        assert continued.steps[rank] == whole.steps[rank][2:]
        assert continued.digests[rank] == whole.digests[rank]


def test_virtual_stages_and_recompute(tmp_path: Path) -> None:
    """Two runs with virtual pipeline stages and dropout are equal, and recomputation changes no bit."""
    grid = f"{TINY_MODEL} {MOCK_DATA} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    plain = run_job(2, grid, tmp_path / "plain")
    recomputed = run_job(2, f"{grid} {recompute}", tmp_path / "recomputed")
    assert_learns(plain)
    assert recomputed == plain


def test_expert_parallel_dispatchers_agree(tmp_path: Path) -> None:
    """Experts over EP2 and TP2 with the all-to-all dispatcher, whose parts are all unequal, as with the all-gather
    one."""
    grid = (
        f"{TINY_MODEL} {MOCK_DATA} --num-layers 2 --tensor-model-parallel-size 2 --sequence-parallel "
        "--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 --disable-bias-linear "
        "--recompute-granularity selective"
    )
    exchanged = run_job(4, f"{grid} --moe-token-dispatcher-type alltoall", tmp_path / "alltoall")
    gathered = run_job(4, f"{grid} --moe-token-dispatcher-type allgather", tmp_path / "allgather")
    assert_learns(exchanged)
    assert losses(exchanged) == pytest.approx(losses(gathered), rel=1e-5)
    assert norms(exchanged) == pytest.approx(norms(gathered), rel=1e-4)


def test_sequence_parallel_computes_the_same_model(tmp_path: Path) -> None:
    """Without dropout, TP2 with sequence parallelism agrees with one rank to rounding."""
    model = f"{TINY_MODEL} {MOCK_DATA} {NO_DROPOUT} --num-layers 2"
    one = run_job(1, f"{model} --make-vocab-size-divisible-by 256", tmp_path / "one")
    split = "--make-vocab-size-divisible-by 128 --tensor-model-parallel-size 2 --sequence-parallel"
    two = run_job(2, f"{model} {split}", tmp_path / "two")
    assert_learns(one)
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert norms(two) == pytest.approx(norms(one), rel=1e-4)


def test_data_paths_evaluation_and_async_save(tmp_path: Path) -> None:
    """Real data per split, loaded by other processes, evaluation, and a checkpoint that another process writes."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = tmp_path / "text"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in range(40):
        builder.add_document((np.arange(50) * 7 + document) % 255, [50])
    builder.finalize(f"{prefix}.idx")
    data = " ".join(f"--{split}-data-path {prefix}" for split in ("train", "valid", "test"))
    evaluation = "--eval-interval 2 --eval-iters 1"
    model = f"{TINY_MODEL} --num-layers 2 {data} --num-workers 2 {evaluation}"

    checkpoints = tmp_path / "checkpoints"
    save = f"--save {checkpoints} --save-interval 2"
    background = "--async-save --use-persistent-ckpt-worker --async-strategy mcore"
    whole = run_job(1, f"{model} {save} {background}", tmp_path / "whole")
    assert_learns(whole)

    (checkpoints / "latest_checkpointed_iteration.txt").write_text("2")
    continued = run_job(1, f"{model} --load {checkpoints}", tmp_path / "continued")
    assert continued.steps[0] == whole.steps[0][2:]
    assert continued.digests == whole.digests
