"""`deadpool plan --paper`: typical models on two machines, computed from data sheets."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from ..sizing.advice import GB
from ..sizing.job import Plan, make_plan
from ..sizing.model import total_parameters
from ..sizing.paper import CHECKSUM, MACHINES, MODELS, SHARE_OF_LINK, SHARE_OF_PEAK, Machine, Model, paper_jobs


def notes() -> list[str]:
    """Where the figures come from; each line says whether it was measured (none was)."""
    return [
        "Computed, not measured. Link speeds and peaks are data-sheet figures:",
        *(f"  {m.name}: {m.source}" for m in MACHINES.values()),
        f"Assumed: {SHARE_OF_LINK:.0%} of a link's and {SHARE_OF_PEAK:.0%} of a GPU's data-sheet figure are reached, CRC32C runs at "
        f"{CHECKSUM / GB:.0f} GB/s a core, forward and backward are 90 % of a step.",
        "TP, PP, DP and the batches are our own choice. Shapes:",
        *(f"  {m.name}: {m.layers} layers, {m.hidden} wide, {m.heads} heads ({m.source})" for m in MODELS),
        "What a copy reaches over TCP is less than 70 % of such links; the column of H2H that would do says how much is needed.",
    ]


def enough_h2h(plan: Plan) -> float:
    """Bytes a second of a node at which the copies would just hide, all else as assumed."""
    times = plan.times
    assert times.window is not None and times.chain is not None and times.h2h is not None and plan.job.speeds.h2h is not None
    left = times.window - (times.chain - times.h2h)
    return plan.job.speeds.h2h * times.h2h / left


def row(machine: Machine, model: Model, plan: Plan) -> dict[str, Any]:
    """A line of the table, in bytes and seconds."""
    times = plan.times
    worst = plan.sizes[plan.worst_rank]
    return {
        "machine": machine.name,
        "model": model.name,
        "parameters": total_parameters(plan.job.shape),
        "tensor": plan.grid.tensor,
        "pipeline": plan.grid.pipeline,
        "data": plan.grid.data,
        "nodes": plan.job.cluster.nodes,
        "payload_bytes": worst.payload_bytes,
        "sent_bytes": max(plan.sent_bytes),
        "host_memory_bytes": max(plan.node_bytes),
        "step_s": times.step,
        "d2h_s": times.d2h,
        "checksum_s": times.checksum,
        "h2h_s": times.h2h,
        "exposed_s": times.exposed,
        "h2h_enough": enough_h2h(plan),
    }


_TABLE_WIDTH = 120  # characters


def show_paper(console: Console, as_json: bool) -> None:
    """Print it."""
    rows = [row(machine, model, make_plan(job)) for machine, model, job in paper_jobs()]
    if as_json:
        print(json.dumps({"rows": rows, "notes": notes()}))
        return
    table = Table(box=None, pad_edge=False)
    heads = ("machine", "model", "TP.PP.DP", "nodes", "GB/rank", "GB/node", "step s", "D2H ms", "H2H ms", "exposed", "H2H that would do")
    for head in heads:
        table.add_column(head, justify="left" if head in heads[:2] else "right", no_wrap=True)
    for r in rows:
        table.add_row(
            r["machine"],
            r["model"],
            f"{r['tensor']}.{r['pipeline']}.{r['data']}",
            str(r["nodes"]),
            f"{r['payload_bytes'] / GB:.2f}",
            f"{r['host_memory_bytes'] / GB:.1f}",
            f"{r['step_s']:.2f}",
            f"{1e3 * r['d2h_s']:.1f}",
            f"{1e3 * r['h2h_s']:.1f}",
            f"{100 * r['exposed_s'] / r['step_s']:.1f} %",
            f"{r['h2h_enough'] / GB:.2f} GB/s",
        )
    # In a narrow terminal, or a pipe, lines that go on are better than figures that are cut off.
    Console(file=console.file, width=max(console.width, _TABLE_WIDTH)).print(table, highlight=False)
    for line in notes():
        console.print(line, highlight=False, soft_wrap=True)
