"""The `deadpool` command: run, sbatch, join, plan, simulate, inject, status, save, release, verify."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from ..control.messages import WORKER_FAULTS
from ..errors import HotSwapError, UsageError
from .launch import Launch
from .plan import plan
from .sbatch import sbatch
from .simulate import simulate

DEFAULT_RUN_DIR = Path("runs/latest")

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Megatron-LM with hot-swap: a training job that loses a node and does not notice.",
)

RunDir = Annotated[Path, typer.Option("--run-dir", metavar="DIR", help="Where the job's files are.")]


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str], typer.Argument(metavar="-- SCRIPT …", help="The training script and all of its flags.")
    ],
    nodes: Annotated[int, typer.Option("--nodes", help="Virtual nodes that train; each can be killed as one.")],
    ranks_per_node: Annotated[int, typer.Option("--ranks-per-node", help="Ranks (worker processes) of each node.")],
    spares: Annotated[int, typer.Option("--spares", help="Nodes kept warm to take over.")] = 0,
    run_dir: RunDir = DEFAULT_RUN_DIR,
    port: Annotated[int, typer.Option("--port", help="The coordinator's port; 0 is any free one.")] = 0,
    return_lost_nodes_after_s: Annotated[
        float | None,
        typer.Option("--return-lost-nodes-after-s", metavar="S", help="Bring a lost node back, as a spare."),
    ] = None,
    on_failure: Annotated[
        Literal["swap", "restart"],
        typer.Option("--on-failure", help="What follows a loss: a hot swap, or a restart of the whole job from Megatron's checkpoint."),
    ] = "swap",
    inject: Annotated[
        list[str] | None,
        typer.Option(
            "--inject",
            metavar="SPEC",
            help="A fault to come, ACTION:SCOPE:RANK:STEP[:PHASE], as kill:node:2:14:backward or segv:worker:1:20.",
        ),
    ] = None,
    separate_networks: Annotated[
        bool, typer.Option("--separate-networks", help="Each node has a network namespace, whose cable can be pulled (root).")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show all that the workers write, each line once.")
    ] = False,
    picture: Annotated[bool, typer.Option("--picture/--no-picture", help="Draw run.png at the end.")] = True,
) -> None:
    """Run a Megatron job with hot-swap on virtual nodes of this machine. The exit code is the job's."""
    from .output import JobConsole
    from .run_job import RunOptions, run_job

    launch = Launch(nodes, ranks_per_node, spares, command[0], command[1:], run_dir, port=port)
    launch.return_lost_nodes_after_s = return_lost_nodes_after_s
    launch.separate_networks = separate_networks
    launch.on_failure = on_failure
    console = JobConsole(sys.stdout)
    try:
        code = run_job(launch, RunOptions(inject or [], verbose, picture), console)
    finally:
        console.patient.drain()
    raise typer.Exit(code)


app.command(context_settings={"allow_interspersed_args": False})(plan)
app.command()(simulate)
app.command(context_settings={"allow_interspersed_args": False})(sbatch)


@app.command()
def inject(
    run_dir: RunDir = DEFAULT_RUN_DIR,
    kill: Annotated[
        str | None, typer.Option("--kill", metavar="TARGET", help="node:NAME, agent:NAME or worker:NAME/INDEX.")
    ] = None,
    freeze: Annotated[
        str | None, typer.Option("--freeze", metavar="TARGET", help="The same, stopped instead of killed.")
    ] = None,
    fault: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--fault",
            metavar="KIND TARGET",
            help=f"One of {', '.join(WORKER_FAULTS)}, in the training thread of worker:NAME/INDEX.",
        ),
    ] = None,
    unplug: Annotated[str | None, typer.Option("--unplug", metavar="node:NAME", help="Pull its network cable.")] = None,
    plug: Annotated[str | None, typer.Option("--plug", metavar="node:NAME", help="Put the cable back.")] = None,
    at_step: Annotated[
        int | None, typer.Option("--at-step", metavar="N", help="Strike in this step; default: at once.")
    ] = None,
    phase: Annotated[
        str | None, typer.Option("--phase", help="Where in the step (forward, backward, grad-sync, …).")
    ] = None,
) -> None:
    """Break something in a running job."""
    from .client import call
    from .faults import check_against, parse_target

    asked = [("kill", kill), ("freeze", freeze), ("unplug", unplug), ("plug", plug), fault or ("", None)]
    wanted = [(action, target) for action, target in asked if target is not None]
    if len(wanted) != 1:
        raise UsageError("give one of --kill, --freeze, --unplug, --plug TARGET and --fault KIND TARGET, such as --kill node:node1")
    injection = parse_target(*wanted[0], at_step, phase)
    check_against(call(run_dir), injection)
    print(f"deadpool: {call(run_dir, injection).text}")


@app.command()
def status(
    run_dir: RunDir = DEFAULT_RUN_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: docs/watching.md has the schema.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again every second, until the job ends.")] = False,
) -> None:
    """Where a running job stands: nodes, ranks, holders, spares, generations, and its last recoveries with their reasons."""
    from .status import show_status

    show_status(run_dir, as_json, watch, Console())


@app.command()
def save(
    job: Annotated[Path | None, typer.Argument(metavar="[JOB]", help="The job's run directory; as --run-dir.")] = None,
    run_dir: RunDir = DEFAULT_RUN_DIR,
) -> None:
    """Have a running job write a durable generation to its --save, without stopping training. Returns when it is whole."""
    from .client import save

    print(f"deadpool: {save(job or run_dir)}")


@app.command()
def join(
    run_dir: RunDir = DEFAULT_RUN_DIR,
    node: Annotated[
        str | None, typer.Option("--node", metavar="NAME", help="Its name in the job, which no other node has; default: this machine's.")
    ] = None,
) -> None:
    """Make this machine a spare of a running job, in place of a node that was lost for good. It ends with the job, and its exit code."""
    from .join import join

    join(run_dir, node)


@app.command()
def release(
    node: Annotated[str, typer.Argument(metavar="NODE", help="As `deadpool status` names it.")],
    run_dir: RunDir = DEFAULT_RUN_DIR,
) -> None:
    """Let a node out of quarantine, once it is mended: it may join the running job again, as a spare."""
    from .client import call

    print(f"deadpool: {call(run_dir, release=node).text}")


@app.command()
def verify(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="The reference.")],
    run_b: Annotated[
        Path, typer.Argument(metavar="RUN_B", help="The run in question; its summary.json gets the answer.")
    ],
    common_steps: Annotated[
        bool, typer.Option("--common-steps", help="Compare only steps that both have: one began at a checkpoint.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Compare two runs step by step: loss and gradient norm bit for bit, consumed samples. Exit code 1: they differ."""
    from .verify import verify_runs

    found = verify_runs(run_a, run_b, common_steps)
    if as_json:
        print(
            json.dumps({"bit_identical": found.identical, "compared": found.compared, "difference": found.difference})
        )
    elif found.identical:
        print(f"bit-identical: {found.compared} steps (loss, gradient norm, consumed samples) of {run_a} and {run_b}")
    else:
        print(f"not identical: {found.compared} steps are the same, then: {found.difference}")
    raise typer.Exit(0 if found.identical else 1)


def main() -> None:
    """Entry of the console script. What a user can mend is said in words, with exit code 2."""
    try:
        app()
    except HotSwapError as failure:
        print(f"deadpool: {failure}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
