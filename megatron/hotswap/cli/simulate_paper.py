"""`deadpool simulate --paper`: the published figures, and what must be assumed to meet them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from ..simulate.published import (
    FIGURES,
    OVERHEAD,
    RESUME_SHARE,
    RESUME_TIMES,
    SOURCE,
    TIMES_LESS,
    paper_inputs,
    recovery_ratios,
    reproduce,
)
from .simulate_show import table, wide


def notes() -> list[str]:
    """What is known, what is assumed, and what follows from it."""
    ratios = recovery_ratios()
    (plain, saved) = (ratios["restart / swap"], ratios["(restart - swap) / swap"])
    inputs = paper_inputs(1.0, 1.0)
    return [
        f"Source: {SOURCE}.",
        "Not known: the failure rate, the checkpoint interval and the step time behind the comparison. Assumed: "
        f"{inputs.nodes} nodes, a failure every {inputs.job_mtbf_s / 3600:.3g} h, a spare and a copy always there, checkpoints saved "
        "without a wait, and the step times above. The failure rate cancels in the ratio as long as failures are rare.",
        f"Implied, not published: the interval. It follows from {RESUME_TIMES.low} = (restart + interval / 2) / (swap + step / 2); that "
        "the simulation meets the ratio then says that the published figures fit each other, not that they were measured here.",
        f"{TIMES_LESS.low} times less: restart / swap would be {plain[0]:.1f} to {plain[1]:.1f}; (restart - swap) / swap is "
        f"{saved[0]:.1f} to {saved[1]:.1f}, which has it.",
        f"Overhead of {OVERHEAD.low:.0%} is an input here, not a result; deadpool plan --paper computes it from sizes and link speeds.",
    ]


def show_paper(seeds: Sequence[int], console: Console, as_json: bool) -> None:
    """Print it."""
    found = reproduce(seeds, random.Random)
    if as_json:
        rows = [{**asdict(r), "share": r.share} for r in found]
        print(json.dumps({"published": [asdict(f) for f in FIGURES], "reproduced": rows, "notes": notes()}))
        return
    shown = table("published", "from", "to", "unit")
    shown.columns[-1].justify = "left"
    for figure in FIGURES:
        shown.add_row(figure.name, f"{figure.low:g}", f"{figure.high:g}", figure.unit)
    wide(console, shown)
    console.print()
    made = table("assumed step", "implied interval", "with the range of swaps", "failures a job", "time to resume", "times less", left=0)
    for r in found:
        half = "" if r.times.half is None else f" ± {r.times.half:.1f}"
        low, high = r.interval_range_s
        implied = (f"{r.interval_s:.0f} s", f"{low:.0f} to {high:.0f} s")
        made.add_row(f"{r.step_s:g} s", *implied, f"{r.failures:.3g}", f"{r.share:.1%}", f"{r.times.mean:.1f}{half}")
    made.add_row("published", "", "", "", f"{RESUME_SHARE.low:.1%}", f"{RESUME_TIMES.low:.1f}")
    wide(console, made)
    console.print()
    for line in notes():
        console.print(line, highlight=False, soft_wrap=True)
