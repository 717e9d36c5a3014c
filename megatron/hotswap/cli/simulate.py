"""`deadpool simulate`: a long job under failures, by checkpoint-restart, in-memory checkpoints, exclude-and-run, in-process restart and
hot swap; how many spares, which interval, what goodput."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..errors import UsageError
from ..simulate.inputs import ASSUMED, HOUR_S, ORIGINS, Inputs
from ..simulate.schemes import CHECKPOINT
from ..simulate.study import Estimate, Study, resume_share, study
from .simulate_run import costs_of_run

#: Flags in hours, and the inputs in seconds that they give.
_HOURS = {"node_mtbf_h": "node_mtbf_s", "repair_h": "repair_s"}
_SEEDS_MAX = 10_000


def _flag(name: str, text: str) -> Any:
    return typer.Option(name, help=text)


def simulate(
    nodes: Annotated[int | None, _flag("--nodes", "Nodes that train.")] = None,
    spares: Annotated[int | None, _flag("--spares", "Nodes kept to take over; all but exclude-and-run use them.")] = None,
    steps: Annotated[int | None, _flag("--steps", "Steps of the job.")] = None,
    step_s: Annotated[float | None, _flag("--step-s", "Seconds of a step.")] = None,
    node_mtbf_h: Annotated[float | None, _flag("--node-mtbf-h", "Hours from one failure of a node to its next; inf: none.")] = None,
    repair_h: Annotated[float | None, _flag("--repair-h", "Hours until a failed node is back, on average.")] = None,
    repair_fixed: Annotated[bool, _flag("--repair-fixed", "Every repair takes that long; else exponential.")] = False,
    group_share: Annotated[float | None, _flag("--group-share", "Of the failures, those that take a whole group of nodes.")] = None,
    group_nodes: Annotated[int | None, _flag("--group-nodes", "Nodes of a group: behind a switch, on a power feed.")] = None,
    save_s: Annotated[float | None, _flag("--save-s", "What training waits for a durable checkpoint.")] = None,
    load_s: Annotated[float | None, _flag("--load-s", "Of a restart, the part that reads one.")] = None,
    interval_s: Annotated[float | None, _flag("--interval-s", "Training between checkpoints under checkpoint-restart.")] = None,
    safety_interval_s: Annotated[float | None, _flag("--safety-interval-s", "The same where the state is in memory.")] = None,
    restart_s: Annotated[float | None, _flag("--restart-s", "Fault to first new step: checkpoint-restart, queue included.")] = None,
    in_memory_s: Annotated[float | None, _flag("--in-memory-s", "The same: restart from in-memory checkpoints.")] = None,
    in_process_s: Annotated[float | None, _flag("--in-process-s", "The same: in-process restart.")] = None,
    exclude_s: Annotated[float | None, _flag("--exclude-s", "The same: go on with fewer nodes, or with those back.")] = None,
    swap_s: Annotated[float | None, _flag("--swap-s", "The same: hot swap.")] = None,
    memory_interval_steps: Annotated[int | None, _flag("--memory-interval-steps", "Steps between copies in memory.")] = None,
    stall_s: Annotated[float | None, _flag("--stall-s", "Exposed stall of a step with copies in memory.")] = None,
    commit_s: Annotated[float | None, _flag("--commit-s", "From a step's end until its copies are complete.")] = None,
    replicas: Annotated[int | None, _flag("--replicas", "Copies of each snapshot on other nodes.")] = None,
    leave_group: Annotated[bool, _flag("--leave-group", "Copies leave the group of nodes, not only the node.")] = False,
    replica_nodes: Annotated[int | None, _flag("--replica-nodes", "Nodes of one data-parallel replica of the model.")] = None,
    from_run: Annotated[Path | None, typer.Option("--from-run", metavar="DIR", help="Take costs from a run's summary.json.")] = None,
    spares_for: Annotated[float, _flag("--spares-for", "Say how many spares leave at most this share of failures waiting.")] = 0.01,
    seeds: Annotated[int, _flag("--seeds", "Jobs to simulate, for means and confidence intervals.")] = 20,
    seed: Annotated[int, _flag("--seed", "The first seed.")] = 0,
    sensitivity: Annotated[bool, typer.Option("--sensitivity/--no-sensitivity", help="Halve and double each input.")] = True,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw where the time goes.")] = None,
    paper: Annotated[bool, typer.Option("--paper", help="The published comparison instead, and what it takes to meet it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Simulate a long job under failures by each way to survive them: goodput, spares, checkpoint interval, and what matters."""
    given = dict(locals())  # the flags, before anything else has a name
    console = Console()
    if not 1 <= seeds <= _SEEDS_MAX:
        raise UsageError(f"--seeds must lie between 1 and {_SEEDS_MAX}, got {seeds}")
    if paper:
        from .simulate_paper import show_paper

        return show_paper(range(seed, seed + seeds), console, as_json)
    inputs, origins = read_inputs(given, from_run)
    found = study(inputs, range(seed, seed + seeds), random.Random, spares_for, origins if sensitivity else None)
    if as_json:
        print(json.dumps(to_json(found, origins)))
    else:
        from .simulate_show import show

        show(found, origins, console)
    if plot is not None:
        from .simulate_plot import draw

        draw(found, plot)
        if not as_json:
            console.print(f"drawn: {plot}", highlight=False)


def read_inputs(given: dict[str, Any], from_run: Path | None) -> tuple[Inputs, dict[str, str]]:
    """Flags win over what a run measured, and that over the defaults. Returns where each input comes from, too.

    Raises:
        UsageError: a value is not possible, or the run cannot be read.
    """
    names = [field.name for field in fields(Inputs)]
    values: dict[str, Any] = {}
    origins = {name: ORIGINS.get(name, ASSUMED) for name in names}
    for name, (value, origin) in (costs_of_run(from_run) if from_run else {}).items():
        values[name], origins[name] = value, origin
    for flag, value in given.items():
        name = _HOURS.get(flag, flag)
        if name in origins and value is not None and value is not False:
            values[name], origins[name] = (value * HOUR_S if flag in _HOURS else value), "given"
    return Inputs(**values), origins


def _estimate(value: Estimate | None) -> dict[str, float | None] | None:
    return None if value is None else {"mean": value.mean, "low": value.low, "high": value.high}


def to_json(found: Study, origins: dict[str, str]) -> dict[str, Any]:
    """The whole study. Seconds, shares; confidence intervals are those of 95 % over the seeds."""
    inputs = found.inputs
    reference = next(r for r in found.results if r.scheme.name == CHECKPOINT)
    interval = found.interval
    return {
        "inputs": {name: {"value": value, "origin": origins[name]} for name, value in asdict(inputs).items()},
        "seeds": list(found.seeds),
        "job_mtbf_s": inputs.job_mtbf_s,
        "schemes": [
            {
                **asdict(result.scheme),
                "goodput": _estimate(result.goodput),
                "goodput_per_allocated_node": _estimate(found.per_node(result)),
                "resume_share": _estimate(resume_share(result, reference)),
                "unfinished": result.unfinished,
                "outcomes": [asdict(outcome) for outcome in result.outcomes],
            }
            for result in found.results
        ],
        "interval": None
        if interval is None
        else {
            "young_s": interval.young_s,
            "daly_s": interval.daly_s,
            "best_s": interval.best.seconds,
            "as_good_s": interval.as_good,
            "candidates": [
                {"seconds": c.seconds, "steps": c.steps, "goodput": _estimate(c.goodput), "worse": _estimate(c.worse)}
                for c in interval.candidates
            ],
        },
        "spares": {
            "wait_probability": found.wait_probability,
            "waited": found.waited,
            "interruptions": found.interruptions,
            "waited_low_high": found.waited_interval,
            "at_most": found.spares_for,
            "needed": found.spares_needed,
        },
        "sensitivity": [
            {
                "name": s.name,
                "origin": s.origin,
                "low": s.low,
                "high": s.high,
                "resume_share": [_estimate(r) for r in s.ratios],
                "goodput_gain": [_estimate(g) for g in s.gains],
            }
            for s in found.swings
        ],
    }
