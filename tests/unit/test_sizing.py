"""The arithmetic of sizing/ on numbers that can be checked by hand; tests/unit/test_sizing_real.py has Megatron's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.hotswap.errors import UsageError
from megatron.hotswap.sizing.advice import advise
from megatron.hotswap.sizing.job import Cluster, Job, Speeds, make_plan
from megatron.hotswap.sizing.model import ModelShape, Parameter, Split, chunk_layers, total_parameters
from megatron.hotswap.sizing.paper import MODELS, paper_jobs
from megatron.hotswap.sizing.shards import OptimizerKind, lay_out, pieces_of_shards

SHAPE = ModelShape(
    layers=8, hidden=1024, heads=16, query_groups=16, head_width=64, ffn=4096, vocabulary=51200, positions=1024
)
JOB = Job(
    SHAPE, Split(), OptimizerKind(distributed=True), 1024, 64, Cluster(4, 2), Speeds(d2h=20e9, h2h=10e9, checksum=10e9, step_s=1.0)
)


def test_the_model_has_the_parameters_that_a_textbook_counts() -> None:
    """12 h^2 + 13 h a layer, the embeddings, and the last norm."""
    h = 1024
    assert total_parameters(SHAPE) == 8 * (12 * h * h + 13 * h) + 51200 * h + 1024 * h + 2 * h


def test_a_snapshot_is_twelve_bytes_a_parameter_over_the_data_parallel_size() -> None:
    plan = make_plan(JOB)
    owned = [size.owned for size in plan.sizes]
    assert sum(owned) == total_parameters(SHAPE)
    assert all(size.copied_bytes == 12 * size.owned for size in plan.sizes)
    assert max(owned) - min(owned) < 8 * 128 + 64 * 8 * 12  # what padding may move: 63 elements a parameter, and the bucket's end


def test_buckets_and_pieces_by_hand() -> None:
    """Back to front, begins at multiples of 64, ends at multiples of lcm(2, 128); a piece lies in one shard."""
    parameters = [Parameter("a", 100), Parameter("b", 70), Parameter("c", 60)]
    spans, buckets = lay_out(parameters, None, 2, False)
    assert spans == [(0, 60), (64, 134), (192, 292)]
    assert buckets == [(0, 384)]
    assert pieces_of_shards(spans, buckets, 2) == [[60, 70], [100]]
    spans, buckets = lay_out(parameters, 100, 2, False)
    assert buckets == [(0, 256), (256, 384)]
    assert pieces_of_shards(spans, buckets, 2) == [[60, 64, 64], [6, 36]]


def test_a_shared_embedding_has_a_bucket_of_its_own() -> None:
    parameters = [Parameter("words", 128, shared_embedding=True), Parameter("a", 10)]
    assert lay_out(parameters, None, 2, False) == ([(0, 10), (128, 256)], [(0, 128), (128, 256)])


def test_virtual_stages_deal_layers_in_turn() -> None:
    split = Split(pipeline=2, virtual=2)
    dealt = [list(chunk_layers(SHAPE, split, stage, chunk)) for chunk in range(2) for stage in range(2)]
    assert dealt == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_host_memory_is_two_slots_at_both_ends() -> None:
    plan = make_plan(JOB)
    assert sum(plan.node_bytes) == 4 * sum(plan.slot_bytes)
    assert sum(make_plan(replace(JOB, cluster=Cluster(4, 2, replicas=2))).node_bytes) == 6 * sum(plan.slot_bytes)
    assert make_plan(replace(JOB, cluster=replace(JOB.cluster, host_memory_bytes=max(plan.node_bytes)))).fits
    assert make_plan(replace(JOB, cluster=replace(JOB.cluster, host_memory_bytes=max(plan.node_bytes) - 1))).fits is False


def test_time_is_copy_checksum_link_checksum_against_forward_and_backward() -> None:
    plan = make_plan(JOB)
    times = plan.times
    assert times.d2h == pytest.approx(max(s.copied_bytes for s in plan.sizes) / 20e9)
    assert times.h2h == pytest.approx(max(*plan.sent_bytes, *plan.received_bytes) / 10e9)
    assert times.window == 0.9 and times.window_is_assumed
    assert times.d2h is not None and times.h2h is not None and times.checksum is not None
    assert times.chain == pytest.approx(times.d2h + times.h2h + 2 * times.checksum)
    assert plan.hides and times.exposed == 0.0
    slow = make_plan(replace(JOB, speeds=replace(JOB.speeds, forward_backward_s=times.chain / 2)))
    assert slow.times.exposed == pytest.approx(times.chain / 2) and slow.hides is False


def test_what_is_not_known_is_not_made_up() -> None:
    plan = make_plan(replace(JOB, speeds=Speeds(step_s=1.0)))
    assert (plan.hides, plan.fits, plan.times.exposed, plan.times.d2h) == (None, None, None, None)


def test_ranks_of_a_node_share_its_link() -> None:
    """The same ranks on fewer nodes: the same payloads, more of them over one link."""
    spread, packed = make_plan(replace(JOB, cluster=Cluster(8, 1))), make_plan(replace(JOB, cluster=Cluster(2, 4)))
    assert [s.payload_bytes for s in spread.sizes] == [s.payload_bytes for s in packed.sizes]
    assert spread.times.h2h is not None and packed.times.h2h is not None
    assert packed.times.h2h == pytest.approx(4 * spread.times.h2h, rel=0.01)


def test_losses_are_those_of_the_placement() -> None:
    """Two nodes keep each other's replicas: each can be lost, both together cannot."""
    losses = make_plan(replace(JOB, cluster=Cluster(2, 4, nodes_per_switch=1))).losses
    assert (losses.nodes.nodes, losses.nodes.fatal_sets, losses.nodes.sets) == (1, 1, 1)
    assert (losses.switches, losses.switches_survived) == (2, 2)
    assert make_plan(replace(JOB, cluster=Cluster(4, 2, replicas=2))).losses.nodes.nodes == 2
    behind_one = make_plan(replace(JOB, cluster=Cluster(4, 2, nodes_per_switch=4))).losses
    assert (behind_one.switches, behind_one.switches_survived) == (1, 0)


def test_leaving_the_switch_is_proposed_with_what_it_brings() -> None:
    plan = make_plan(replace(JOB, cluster=Cluster(4, 2, nodes_per_switch=2)))
    assert advise(plan) == [
        f"--hot-swap-failure-domain switch: 2 of 2 switches could be lost whole, instead of {plan.losses.switches_survived}"
    ]
    assert make_plan(replace(JOB, cluster=Cluster(4, 2, nodes_per_switch=2, leave_switch=True))).losses.switches_survived == 2


def test_with_an_interval_only_the_copy_must_fit_into_one_step() -> None:
    """D2H before the next optimizer step, for the rest there are as many steps as lie between two snapshots."""
    times = make_plan(JOB).times
    assert times.chain is not None and times.d2h is not None
    step = times.chain / 4
    job = replace(JOB, speeds=replace(JOB.speeds, step_s=step, forward_backward_s=step))
    assert times.d2h < step, "the example needs a copy that fits into one step"
    assert make_plan(job).times.exposed == pytest.approx(3 * step)
    assert make_plan(replace(job, interval=2)).times.exposed == pytest.approx(2 * step / 2)
    assert make_plan(replace(job, interval=5)).times.exposed == 0.0
    skipped = make_plan(replace(job, skip_when_late=True)).times
    assert skipped.exposed == 0.0 and skipped.taken_every in (4, 5)
    assert any(line.startswith("--hot-swap-interval 5:") or line.startswith("--hot-swap-interval 4:") for line in advise(make_plan(job)))


def test_every_proposal_would_help() -> None:
    """The plan is made again with what the advice says, and then nothing waits."""
    chain = make_plan(JOB).times.chain
    assert chain is not None
    tight = replace(JOB, speeds=replace(JOB.speeds, step_s=0.6 * chain, forward_backward_s=0.6 * chain))
    advice = advise(make_plan(tight))
    assert any(line.startswith("2 times the data-parallel ranks (DP 8 to 16") for line in advice)
    grown = replace(tight, cluster=replace(tight.cluster, nodes=8), samples=128)
    assert make_plan(grown).hides
    assert any(line.startswith("--hot-swap-interval 2: a snapshot every 2 steps hides") for line in advice)
    assert make_plan(replace(tight, interval=2)).hides
    faster = next(line for line in advice if line.startswith("H2H of each node at"))
    speed = float(faster.split(" at ")[1].split(" GB/s")[0]) * 1e9
    assert make_plan(replace(tight, speeds=replace(tight.speeds, h2h=1.01 * speed))).hides


def test_an_unsharded_optimizer_is_the_first_thing_to_change() -> None:
    whole = replace(JOB, optimizer=OptimizerKind(distributed=False), speeds=replace(JOB.speeds, step_s=0.05))
    plan = make_plan(whole)
    assert plan.sizes[0].copied_bytes == 12 * total_parameters(SHAPE)
    assert advise(plan)[0].startswith("--use-distributed-optimizer: each rank keeps 1/8 of the state")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cluster": Cluster(1, 8)}, "at least two nodes"),
        ({"split": Split(tensor=3)}, "multiple of the tensor-parallel size"),
        ({"split": Split(pipeline=3)}, "cannot be dealt evenly"),
        ({"speeds": Speeds(step_s=1.0, forward_backward_s=2.0)}, "are a part of the step"),
        ({"speeds": Speeds(d2h=0.0)}, "d2h must be greater than 0"),
        ({"cluster": Cluster(4, 2, leave_switch=True)}, "give --nodes-per-switch"),
        ({"split": Split(expert=2)}, "the model has no experts"),
    ],
)
def test_mistakes_are_answered(change: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make_plan(replace(JOB, **change))  # type: ignore[arg-type]


def test_the_papers_models_have_their_names_parameters_and_fit_their_gpus() -> None:
    """What paper.py says of its own choices: sizes as named, and state within 70 % of a GPU's memory."""
    for machine, model, job in paper_jobs():
        assert total_parameters(job.shape) / 1e9 == pytest.approx(float(model.name.removesuffix("B")), rel=0.06), model.name
        plan = make_plan(job)
        weights_and_gradients = (2 + 4) * max(s.parameters for s in plan.sizes)
        assert weights_and_gradients + max(s.copied_bytes for s in plan.sizes) < 0.7 * machine.device_memory_bytes, model.name
        assert plan.fits
    assert len(paper_jobs()) == 2 * len(MODELS)
