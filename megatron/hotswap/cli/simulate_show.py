"""What `deadpool simulate` says to people."""

from __future__ import annotations

import math
from dataclasses import fields

from rich.console import Console
from rich.table import Table

from ..simulate.engine import GIVE_UP
from ..simulate.inputs import ASSUMED, HOUR_S
from ..simulate.schemes import CHECKPOINT, CHECKPOINT_BEST, HOT_SWAP
from ..simulate.study import Estimate, Result, Study, answer_of, resume_share

_DAY_S = 24 * HOUR_S
_TABLE_WIDTH = 176  # characters
#: Inputs whose value says nothing alone.
_ONLY_WITH_GROUPS = ("group_nodes", "leave_group")


def percent(value: Estimate | None, digits: int = 2) -> str:
    """Mean and half width, both in percent; words where there is none."""
    if value is None:
        return "nothing lost"
    half = "" if value.half is None else f" ± {100 * value.half:.{digits}f}"
    return f"{100 * value.mean:.{digits}f}{half} %"


def span(seconds: float) -> str:
    """In seconds, or in hours or days where these would be hard to read."""
    if 2 * _DAY_S <= seconds < math.inf:
        return f"{seconds / _DAY_S:.4g} d"
    if 2 * HOUR_S <= seconds < math.inf:
        return f"{seconds / HOUR_S:.4g} h"
    return f"{seconds:.4g} s"


def amount(name: str, value: float) -> str:
    """An input, with the unit that its name ends in."""
    if name.endswith("_s"):
        return span(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def wide(console: Console, table: Table) -> None:
    """In a narrow terminal, or a pipe, lines that go on are better than figures that are cut off."""
    Console(file=console.file, width=max(console.width, _TABLE_WIDTH)).print(table, highlight=False)


def table(*heads: str, left: int = 1) -> Table:
    """One of plain columns, the first `left` of them words."""
    made = Table(box=None, pad_edge=False)
    for i, head in enumerate(heads):
        made.add_column(head, justify="left" if i < left else "right", no_wrap=True)
    return made


def show(found: Study, origins: dict[str, str], console: Console) -> None:
    """All of it."""
    _show_inputs(found, origins, console)
    console.print()
    _show_results(found, console)
    console.print()
    for line in (*_failures(found), *_spares(found), *_interval(found), *_cautions(found)):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    if found.swings:
        console.print()
        _show_swings(found, console)


def _show_inputs(found: Study, origins: dict[str, str], console: Console) -> None:
    shown = table("input", "value", "from", left=3)
    for field in fields(found.inputs):
        name = field.name
        if name in _ONLY_WITH_GROUPS and not found.inputs.group_share:
            continue
        value = getattr(found.inputs, name)
        value = found.inputs.derived(name) if value is None else value
        shown.add_row(name, str(value).lower() if isinstance(value, bool) else amount(name, value), origins[name])
    wide(console, shown)
    assumed = sum(origin.startswith(ASSUMED) for origin in origins.values())
    console.print(f"{assumed} of these inputs are assumed: give your own.", highlight=False)


def _show_results(found: Study, console: Console) -> None:
    reference = found.result(CHECKPOINT)
    heads = ("saves every", "goodput", "per node held", "wall", "saving", "again", "recovering", "waiting", "slower", "stall", "to resume")
    shown = table("scheme", *heads)
    for result in found.results:
        every = result.scheme.durable_steps
        none = every >= found.inputs.steps
        shown.add_row(
            result.scheme.name,
            "never" if none else span(every * found.inputs.step_s),
            percent(result.goodput),
            percent(found.per_node(result)),
            f"{result.of(lambda o: o.wall_s).mean / _DAY_S:.4g} d",
            *(_mean_hours(result, name) for name in ("saving_s", "rerun_s", "down_s", "waiting_s", "slow_s", "stall_s")),
            percent(resume_share(result, reference), 1),
        )
    wide(console, shown)
    console.print(
        f"Means of {len(found.seeds)} jobs on the same failures, ± half of the 95 % confidence interval. Goodput: work over wall time; per "
        "node held: over all nodes, spares too. In hours, what is lost to saving, steps run again, recovering, waiting for a node, fewer "
        f"nodes, exposed stall. To resume: again, recovering and waiting together, of those of {CHECKPOINT}.",
        highlight=False,
        soft_wrap=True,
    )


def _mean_hours(result: Result, name: str) -> str:
    return f"{result.of(lambda o: getattr(o, name)).mean / HOUR_S:.3g}"


def _failures(found: Study) -> list[str]:
    inputs = found.inputs
    if inputs.event_rate == 0.0:
        return ["Failures: none."]
    return [
        f"Failures: one that takes a training node every {span(inputs.job_mtbf_s)} on average, "
        f"{found.interruptions / len(found.seeds):.3g} in a hot-swap job."
    ]


def _spares(found: Study) -> list[str]:
    inputs = found.inputs
    if inputs.event_rate == 0.0:
        return []
    kind = "exact, long after the begin" if not inputs.group_share else "groups as batches, long after the begin"
    low, high = found.waited_interval
    lines = [
        f"Spares: with {inputs.spares}, {found.wait_probability:.2%} of the failures find too few ({kind}); simulated from a begin "
        f"with all nodes up: {found.waited} of {found.interruptions} (95 %: {low:.2%} to {high:.2%})."
    ]
    if found.spares_needed is None:
        lines.append(f"  No number of spares up to {inputs.nodes} brings it to {found.spares_for:.2%}: nodes are repaired too slowly.")
    else:
        lines.append(f"  For at most {found.spares_for:.2%}: {found.spares_needed} spares.")
    return lines


def _interval(found: Study) -> list[str]:
    advice = found.interval
    if advice is None:
        return []
    low, high = advice.as_good
    return [
        f"Checkpoint interval under {CHECKPOINT}: Young {span(advice.young_s)}, Daly {span(advice.daly_s)}, best of "
        f"{len(advice.candidates)} simulated {span(advice.best.seconds)} (goodput {percent(advice.best.goodput)}); from "
        f"{span(low)} to {span(high)} these seeds show no difference."
    ]


def _cautions(found: Study) -> list[str]:
    lines = []
    for result in found.results:
        if result.unfinished:
            lines.append(
                f"{result.scheme.name}: {result.unfinished} of {len(result.outcomes)} jobs were given up after {GIVE_UP:g} times their "
                "time without failures: these come faster than it recovers."
            )
        resorts = sum(o.last_resorts for o in result.outcomes)
        if resorts:
            failures = "1 failure" if resorts == 1 else f"{resorts} failures"
            took = "left no replica of the model whole" if result.scheme.shrinks else "took every copy of something in memory"
            lines.append(f"{result.scheme.name}: {failures} {took}; a durable checkpoint was the last resort.")
    return lines


def _show_swings(found: Study, console: Console) -> None:
    base_ratio, base_gain = answer_of(found)
    shown = table("input alone", "from", "to", "gain at from", "gain at to", "resume at from", "resume at to", "origin")
    shown.columns[-1].justify = "left"
    for s in found.swings:
        origin = s.origin.split(":")[0]
        values = (amount(s.name, s.low), amount(s.name, s.high))
        shown.add_row(s.name, *values, *(percent(g) for g in s.gains), *(percent(r, 1) for r in s.ratios), origin)
    console.print(
        f"Sensitivity: each input halved and doubled alone (0: given a value), the best interval with it; what moves the gain most first. "
        f"Gain: goodput of {HOT_SWAP} above {CHECKPOINT_BEST}, in points (as given: {percent(base_gain)}). Resume: time to resume of "
        f"{HOT_SWAP} over that of {CHECKPOINT} every {span(found.inputs.interval_s)} (as given: {percent(base_ratio, 1)}).",
        highlight=False,
        soft_wrap=True,
    )
    wide(console, shown)
