"""`deadpool plan`: what hot-swap would cost a job, from its command line and the cluster's speeds, before it runs."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..errors import UsageError
from ..sizing.advice import GB, advise
from ..sizing.job import Cluster, Job, Plan, Speeds, make_plan
from .plan_flags import read_training_flags, samples_per_step


def plan(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- SCRIPT …", help="The training script and all of its flags.")
    ] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", help="Nodes that train.")] = None,
    ranks_per_node: Annotated[int, typer.Option("--ranks-per-node", help="Ranks (GPUs) of each node.")] = 1,
    nodes_per_switch: Annotated[
        int | None, typer.Option("--nodes-per-switch", help="Nodes behind one switch, which may fail as one.")
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option("--vocabulary", help="Tokens of the tokenizer, where the flags do not tell.")
    ] = None,
    d2h_gb_per_s: Annotated[float | None, typer.Option("--d2h-gb-per-s", help="Device to host, of each rank.")] = None,
    h2h_gb_per_s: Annotated[float | None, typer.Option("--h2h-gb-per-s", help="Node to node, each direction.")] = None,
    checksum_gb_per_s: Annotated[float | None, typer.Option("--checksum-gb-per-s", help="CRC32C on one core.")] = None,
    step_s: Annotated[float | None, typer.Option("--step-s", help="Seconds of a step without hot-swap.")] = None,
    forward_backward_s: Annotated[
        float | None, typer.Option("--forward-backward-s", help="Of them forward and backward (default: 90 %).")
    ] = None,
    tflops_per_gpu: Annotated[
        float | None, typer.Option("--tflops-per-gpu", help="Reached by training, not peak; instead of --step-s.")
    ] = None,
    host_memory_gb: Annotated[
        float | None, typer.Option("--host-memory-gb", help="Of a node, free for snapshots.")
    ] = None,
    on_cpu: Annotated[bool, typer.Option("--on-cpu", help="Train on CPUs, where a snapshot holds a little more.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure here what was not given: host copy, CRC32C, loopback TCP.")
    ] = False,
    paper: Annotated[bool, typer.Option("--paper", help="A table of typical models and machines instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Compute what hot-swap would cost a job: bytes, seconds, host memory, survivable losses, and what to change."""
    console = Console()
    if paper:
        from .plan_paper import show_paper

        return show_paper(console, as_json)
    given = Speeds(
        _bytes(d2h_gb_per_s), _bytes(h2h_gb_per_s), _bytes(checksum_gb_per_s), step_s, forward_backward_s, _times(tflops_per_gpu, 1e12)
    )
    measured = _measured(console, as_json or command is None) if measure else {}
    if not command:
        if not measure:
            raise UsageError("give the training command after --, as: deadpool plan --nodes 16 … -- pretrain_gpt.py --num-layers …")
        return _show_measured(measured, console, as_json)
    if nodes is None:
        raise UsageError("--nodes is missing: the plan needs the number of nodes that train")
    cluster = Cluster(nodes, ranks_per_node, 1, _whole(_bytes(host_memory_gb)), nodes_per_switch, on_gpu=not on_cpu)
    speeds = replace(given, **{k: v for k, v in measured.items() if getattr(given, k) is None})
    answer = make_plan(job_of(command, vocabulary, cluster, speeds))
    if as_json:
        print(json.dumps(to_json(answer, sorted(k for k in measured if getattr(given, k) is None))))
    else:
        show(answer, console)


def _times(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


def _bytes(gigabytes: float | None) -> float | None:
    return _times(gigabytes, GB)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _measured(console: Console, quiet: bool) -> dict[str, float]:
    from .plan_measure import measure_here

    if not quiet:
        console.print("measuring this machine: host copy (it stands for D2H), CRC32C, loopback TCP (it stands for H2H) …")
    return measure_here()


def _show_measured(measured: dict[str, float], console: Console, as_json: bool) -> None:
    if as_json:
        print(json.dumps({f"{name}_gb_per_s": speed / GB for name, speed in measured.items()}))
        return
    what = {
        "d2h": "host memory to host memory by the engine's copy queue (a GPU's link is another one: tools/gpu_check.py)",
        "checksum": "CRC32C, one core",
        "h2h": "TCP over loopback between two processes (a network is another one: measure between two nodes)",
    }
    for name, speed in measured.items():
        console.print(f"{speed / GB:7.2f} GB/s  {what[name]}", highlight=False)


def job_of(command: list[str], vocabulary: int | None, cluster: Cluster, speeds: Speeds) -> Job:
    """What a plan is made from, of a training command (the script and its flags) on a cluster.

    Raises:
        UsageError: the ranks, the grid and the batch do not fit each other, or a flag is one whose effect is not known.
    """
    flags = read_training_flags(command[1:], vocabulary, step_tensor=not cluster.on_gpu)
    split = flags.split
    model_ranks = split.tensor * split.pipeline * split.context
    if cluster.world_size % model_ranks:
        raise UsageError(
            f"{cluster.nodes} nodes of {cluster.ranks_per_node} ranks are {cluster.world_size} ranks, not a multiple of tensor x "
            f"pipeline x context parallel size = {model_ranks}; change one of them"
        )
    samples = samples_per_step(flags, cluster.world_size // model_ranks)
    swap = flags.hot_swap
    cluster = replace(
        cluster,
        replicas=swap.replicas,
        leave_switch=swap.failure_domain == "switch",
        host_memory_bytes=cluster.host_memory_bytes or swap.host_memory_max_bytes,
    )
    return Job(
        flags.shape,
        split,
        flags.optimizer,
        flags.sequence,
        samples,
        cluster,
        speeds,
        interval=swap.interval,
        skip_when_late=swap.when_late == "skip",
    )


def to_json(plan: Plan, measured: list[str]) -> dict[str, Any]:
    """The whole plan. Bytes and seconds; per rank and per node."""
    worst = plan.worst_rank
    return {
        "grid": {"tensor": plan.grid.tensor, "pipeline": plan.grid.pipeline, "context": plan.grid.context, "data": plan.grid.data},
        "cluster": asdict(plan.job.cluster),
        "speeds": asdict(plan.job.speeds),
        "speeds_measured_here": measured,
        "parameters": plan.parameters,
        "ranks": [
            {**asdict(size), "rank": rank, "slot_bytes": slot}
            for rank, (size, slot) in enumerate(zip(plan.sizes, plan.slot_bytes, strict=True))
        ],
        "interval": plan.job.interval,
        "skip_when_late": plan.job.skip_when_late,
        "worst_rank": worst,
        "node_host_memory_bytes": plan.node_bytes,
        "node_sent_bytes_per_step": plan.sent_bytes,
        "node_received_bytes_per_step": plan.received_bytes,
        "times_s": {**asdict(plan.times), "chain": plan.times.chain, "exposed": plan.times.exposed, "taken_every": plan.times.taken_every},
        "hides": plan.hides,
        "fits": plan.fits,
        "losses": asdict(plan.losses),
        "advice": advise(plan),
    }


def show(plan: Plan, console: Console) -> None:
    """For people."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for what, value in (*_size_rows(plan), *_time_rows(plan), *_loss_rows(plan)):
        table.add_row(what, value)
    console.print(table, highlight=False)
    advice = advise(plan)
    if advice:
        console.print("\nWhat to change (each by itself):")
    for line in advice:
        console.print(f"  - {line}", highlight=False, soft_wrap=True)


def _size_rows(plan: Plan) -> list[tuple[str, str]]:
    worst = plan.sizes[plan.worst_rank]
    grid, least = plan.grid, min(s.payload_bytes for s in plan.sizes)
    cluster, limit = plan.job.cluster, plan.job.cluster.host_memory_bytes
    room = "" if limit is None else f" of {limit / GB:.4g} GB: {'fits' if plan.fits else 'does not fit'}"
    slots = 2 + 2 * cluster.replicas
    sharded = f"1/{grid.data * grid.context} of the state" if plan.job.optimizer.distributed else "not sharded"
    return [
        ("model", f"{plan.parameters / GB:.4g} billion parameters"),
        ("grid", f"TP {grid.tensor} x PP {grid.pipeline} x CP {grid.context} x DP {grid.data} on {cluster.nodes} nodes"),
        ("parameters of a rank", f"{max(s.parameters for s in plan.sizes):,} at most"),
        ("snapshot of a rank", f"{worst.payload_bytes:,} bytes (rank {plan.worst_rank}; the least {least:,}), {sharded}"),
        ("sent by a node, a step", f"{max(plan.sent_bytes) / GB:.4g} GB; received {max(plan.received_bytes) / GB:.4g} GB"),
        ("host memory of a node", f"{max(plan.node_bytes) / GB:.4g} GB ({slots} slots a rank){room}"),
    ]


def _seconds(value: float | None, unknown: str) -> str:
    return f"{value:.4g} s" if value is not None else unknown


def _time_rows(plan: Plan) -> list[tuple[str, str]]:
    times = plan.times
    window = _seconds(times.window, "not known: give --step-s, or --tflops-per-gpu")
    step = _seconds(times.step, "not known") + (" (estimated from --tflops-per-gpu)" if times.step_is_estimate else "")
    if times.window_is_assumed:
        window += " (assumed: 90 % of the step; --forward-backward-s says it)"
    if times.exposed is None:
        verdict = "not known; " + _needed(plan)
    elif times.exposed == 0.0:
        verdict = f"yes: {times.chain:.4g} s from the end of a step to the last acknowledgement"
    else:
        share = "" if times.step is None else f", {100 * (times.exposed or 0.0) / times.step:.3g} % of the step"
        verdict = f"no: each step waits {times.exposed:.4g} s{share}"
    return [
        ("step", step),
        ("forward and backward", window),
        ("D2H", _seconds(times.d2h, "not known: give --d2h-gb-per-s, or --measure")),
        ("checksum, at each end", _seconds(times.checksum, "not counted: give --checksum-gb-per-s, or --measure")),
        ("H2H (slowest node)", _seconds(times.h2h, "not known: give --h2h-gb-per-s, or --measure")),
        ("a snapshot", _frequency(plan)),
        ("hides behind the step", verdict),
    ]


def _frequency(plan: Plan) -> str:
    every, wanted = plan.times.taken_every, plan.job.interval
    text = "after every step" if wanted == 1 else f"after every {wanted} steps"
    if plan.job.skip_when_late:
        text += ", skipped when late: " + ("not known how often" if every is None else f"so every {every} steps at most")
    return text


def _needed(plan: Plan) -> str:
    """What speeds would do, where they are not known."""
    window = plan.times.window
    if window is None:
        return "give the step's time and both speeds"
    copied, sent = max(s.copied_bytes for s in plan.sizes), max(*plan.sent_bytes, *plan.received_bytes)
    return f"with half of it for each, {2 * copied / window / GB:.3g} GB/s of D2H and {2 * sent / window / GB:.3g} GB/s of H2H would do"


def _loss_rows(plan: Plan) -> list[tuple[str, str]]:
    losses = plan.losses
    rows = [("losses", losses.nodes.in_words())]
    if losses.switches is not None:
        rows.append(("", f"{losses.switches_survived} of {losses.switches} switches could be lost with all their nodes"))
    return rows
