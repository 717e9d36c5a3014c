"""sizing/ against Megatron: the byte counts are those of models that it really built, rank by rank.

Every rank of these grids is built in a process of its own with process groups that never communicate (sizing_probe.py), and its
snapshot laid out by the engine's own code. Payload, tensors and parameters must be equal, not close; of the metadata, whose length
depends on counters, the plan's figure must be an upper bound, and a near one.

Context parallelism and Transformer Engine need a GPU, so neither is here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron.hotswap.cli.plan_flags import read_training_flags, samples_per_step
from megatron.hotswap.sizing.job import Cluster, Job, Plan, Speeds, make_plan
from megatron.hotswap.sizing.model import chunk_parameters, flops_per_step

ROOT = Path(__file__).resolve().parents[2]
PROBE = Path(__file__).parent / "sizing_probe.py"
PROBE_TIMEOUT_S = 400.0

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 "
    "--global-batch-size 24 --train-iters 4 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 255 --eval-iters 0 --num-workers 0 "
    "--mock-data --split 99,1,0"
)
SHARDED = "--use-distributed-optimizer"
TP2, PP2, EP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--expert-model-parallel-size 2"
EXPERTS = "--num-experts 4 --sequence-parallel --moe-token-dispatcher-type allgather"
MODERN = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --add-qkv-bias --position-embedding-type rope --qk-layernorm "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"
)


@dataclass(frozen=True)
class Case:
    """A grid, the ranks of it that are built, and what is added to the model's flags."""

    world_size: int
    ranks: tuple[int, ...]
    flags: str


CASES = {
    "dp": Case(4, (0, 1, 2, 3), SHARDED),
    "tp-pp-dp": Case(8, (0, 1, 2, 4, 6), f"{TP2} {PP2} {SHARDED}"),
    "three-shards-modern": Case(6, (0, 2, 5), f"{TP2} {SHARDED} {MODERN} --bf16"),
    "one-query-group-for-two": Case(2, (1,), f"{TP2} {SHARDED} --group-query-attention --num-query-groups 1 --qk-layernorm"),
    "virtual-stages": Case(
        4, (0, 1, 2, 3), f"{PP2} --num-layers-per-virtual-pipeline-stage 1 {SHARDED} --bf16 --overlap-grad-reduce --overlap-param-gather"
    ),
    "buckets": Case(4, (0, 2, 3), f"{SHARDED} --overlap-grad-reduce --ddp-bucket-size 30000"),
    "buckets-padded-for-bandwidth": Case(
        4, (0, 3), f"{SHARDED} --overlap-grad-reduce --ddp-num-buckets 3 --ddp-pad-buckets-for-high-nccl-busbw"
    ),
    "experts-apart": Case(8, (0, 2, 4, 7), f"{TP2} {EP2} {EXPERTS} {SHARDED} --swiglu --expert-tensor-parallel-size 1"),
    "experts-cut-alike": Case(4, (0, 1, 3), f"{TP2} {EP2} {EXPERTS} {SHARDED} --disable-bias-linear"),
    "experts-in-place": Case(4, (0, 3), f"{TP2} {EXPERTS} {SHARDED} --disable-bias-linear"),
    "experts-some-layers": Case(
        8,
        (0, 2, 5, 7),
        f"{TP2} {PP2} {EP2} {EXPERTS} {SHARDED} --bf16 --expert-tensor-parallel-size 1 --disable-bias-linear --moe-ffn-hidden-size 96 "
        "--moe-layer-freq ([0]+[1])*2 --moe-shared-expert-intermediate-size 128",
    ),
    "expert-bias": Case(
        2,
        (0, 1),
        f"{EP2} --num-experts 4 --moe-token-dispatcher-type allgather {SHARDED} --bf16 --moe-router-enable-expert-bias "
        "--moe-router-score-function sigmoid",
    ),
    "uneven-stages": Case(2, (0, 1), f"{PP2} {SHARDED} --decoder-first-pipeline-num-layers 1"),
    "embedding-and-loss-as-layers": Case(
        2, (0, 1), f"{PP2} {SHARDED} --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    ),
    "not-sharded": Case(4, (0, 3), f"{TP2} {PP2}"),
    "not-sharded-bf16": Case(2, (1,), f"{TP2} --bf16"),
    "sgd": Case(2, (1,), "--optimizer sgd --sgd-momentum 0.9"),
    "sgd-without-momentum": Case(2, (1,), "--optimizer sgd --sgd-momentum 0"),
}


def flags_of(case: Case) -> list[str]:
    return f"{MODEL} {case.flags}".split()


def planned(case: Case) -> Plan:
    # torch's own Adam, and on a CPU: it keeps a step beside each piece of a parameter.
    flags = read_training_flags(flags_of(case), None, step_tensor=True)
    model_ranks = flags.split.tensor * flags.split.pipeline * flags.split.context
    samples = samples_per_step(flags, case.world_size // model_ranks)
    cluster = Cluster(case.world_size, 1, on_gpu=False)
    return make_plan(Job(flags.shape, flags.split, flags.optimizer, flags.sequence, samples, cluster, Speeds()))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What Megatron built, for every case."""
    cases = [{"world_size": c.world_size, "ranks": c.ranks, "flags": " ".join(flags_of(c))} for c in CASES.values()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    run = subprocess.run(
        [sys.executable, str(PROBE), str(tmp_path_factory.mktemp("probe"))],
        input=json.dumps(cases),
        env=environment,
        capture_output=True,
        text=True,
        timeout=PROBE_TIMEOUT_S,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return dict(zip(CASES, json.loads(run.stdout.splitlines()[-1]), strict=True))


def real_ranks(name: str, built: dict[str, list[dict[str, Any]]]) -> list[tuple[int, dict[str, Any]]]:
    """(rank, what was built) of a case."""
    for real in built[name]:
        assert "error" not in real, real["error"]
    return list(zip(CASES[name].ranks, built[name], strict=True))


@pytest.mark.parametrize("name", CASES)
def test_payload_of_every_rank_is_what_the_engine_lays_out(name: str, built: dict[str, list[dict[str, Any]]]) -> None:
    plan = planned(CASES[name])
    for rank, real in real_ranks(name, built):
        size = plan.sizes[rank]
        assert (size.tensors, size.copied_bytes, size.payload_bytes) == (
            real["tensors"],
            real["copied_bytes"],
            real["payload_bytes"],
        ), f"rank {rank}"


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_megatrons_in_name_count_and_order(name: str, built: dict[str, list[dict[str, Any]]]) -> None:
    flags = read_training_flags(flags_of(CASES[name]), None, step_tensor=True)
    grid = planned(CASES[name]).grid
    for rank, real in real_ranks(name, built):
        stage = grid.coordinates(rank)[3]
        for chunk, parameters in enumerate(real["parameters"]):
            ours = chunk_parameters(flags.shape, flags.split, stage, chunk)
            bare = [[n.removeprefix("module.").removeprefix("module."), count] for n, count in parameters]
            assert [[p.name, p.count] for p in ours] == bare
        expert = sum(
            p.count for c in range(flags.split.virtual) for p in chunk_parameters(flags.shape, flags.split, stage, c) if p.expert
        )
        assert expert == real["expert_parameters"]


@pytest.mark.parametrize("name", CASES)
def test_metadata_are_bounded(name: str, built: dict[str, list[dict[str, Any]]]) -> None:
    """The plan may say a little more than a slot takes, never less: memory that was promised must be there."""
    plan = planned(CASES[name])
    for rank, real in real_ranks(name, built):
        assert real["slot_bytes"] <= plan.slot_bytes[rank] <= real["slot_bytes"] + 16_384


@pytest.mark.parametrize("name", CASES)
def test_operations_are_megatrons(name: str, built: dict[str, list[dict[str, Any]]]) -> None:
    job = planned(CASES[name]).job
    assert flops_per_step(job.shape, job.sequence, job.samples) == pytest.approx(real_ranks(name, built)[0][1]["flops"], rel=1e-12)
