"""`deadpool sbatch`: a batch script for a described job, ready for Slurm's sbatch; examples/slurm/ has some that were made by it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from ..config import parse
from ..errors import UsageError
from .checks import grid_of, megatron_flags

_SET_BY_SCRIPT = ("--hot-swap-spares", "--hot-swap-run-dir", "--hot-swap-ranks-per-node")


@dataclass(frozen=True)
class BatchJob:
    """What the script is to start."""

    command: list[str]  # the training script and all of its flags
    nodes: int
    spares: int
    spares_min: int
    gpus_per_node: int
    ranks_per_node: int | None
    tasks_per_node: int
    time: str
    name: str
    restarts_max: int
    python: str = "python"
    directives: list[str] = field(default_factory=list)  # more of sbatch's flags
    setup: list[str] = field(default_factory=list)  # lines of shell
    container: str = ""  # words before python
    srun: str = ""  # more of srun's flags
    drain: bool = False

    def __post_init__(self) -> None:
        if self.nodes < 2:
            raise UsageError(
                f"--nodes must be at least 2, got {self.nodes}: a rank and its replica must not be lost together; spread the ranks over "
                "two"
            )
        if self.spares < 0 or self.restarts_max < 0:
            raise UsageError(f"--spares and --restarts-max are at least 0, got {self.spares} and {self.restarts_max}")
        if not 0 <= self.spares_min <= self.spares:
            raise UsageError(f"--spares-min must be between 0 and --spares ({self.spares}), got {self.spares_min}")
        ranks = self.ranks_per_node or self.gpus_per_node
        if ranks < 1:
            raise UsageError("how many ranks has a node? Give --gpus-per-node N, or on CPUs --ranks-per-node R")
        if self.tasks_per_node not in (1, ranks):
            raise UsageError(
                f"a node has one task for all of its {ranks} ranks, or one for each: give --tasks-per-node 1 or {ranks}, got "
                f"{self.tasks_per_node}"
            )
        for flag in _SET_BY_SCRIPT:
            if any(word == flag or word.startswith(f"{flag}=") for word in self.command):
                raise UsageError(f"{flag} is set by the script itself: leave it out after --, and describe the nodes before it")
        replicas = parse(self.command[1:]).replicas  # refuses what cannot be
        if replicas >= self.nodes or (replicas > 1 and self.tasks_per_node > 1):
            raise UsageError(
                f"{replicas} replicas of a snapshot are to be on as many other nodes: give more --nodes than replicas (got {self.nodes}), "
                f"and for more than one replica --tasks-per-node 1 (got {self.tasks_per_node}), an agent for all ranks of a node"
            )
        grid_of(self.command[1:], self.nodes * ranks)

    def text(self) -> str:
        """The script."""
        save = megatron_flags(self.command[1:]).save
        words = [*shlex.split(self.container), self.python, *self.command, "--hot-swap"]
        if self.ranks_per_node is not None:
            words += ["--hot-swap-ranks-per-node", str(self.ranks_per_node)]
        return _SCRIPT.format(
            directives="\n".join(f"#SBATCH {line}" for line in self.header()),
            active=self.nodes,
            tasks=self.tasks_per_node,
            restarts_max=self.restarts_max,
            runs=shlex.quote(str(Path(save or ".", "runs"))),
            command=wrapped(words),
            gpus=f"--gpus-per-node={self.gpus_per_node} " if self.gpus_per_node else "",
            srun=f"{self.srun} " if self.srun else "",
            setup="\n".join(self.setup) + "\n" if self.setup else "",
            drain=_DRAIN if self.drain else "",
            no_save="" if save else _NO_SAVE,
        )

    def header(self) -> list[str]:
        """What is said to sbatch, a flag each."""
        least, most = self.nodes + self.spares_min, self.nodes + self.spares
        return [
            f"--job-name={self.name}",
            f"--nodes={most if least == most else f'{least}-{most}'}",
            "--exclusive",  # not --ntasks-per-node: of a range of nodes Slurm would then give the fewest
            *([f"--gpus-per-node={self.gpus_per_node}"] if self.gpus_per_node else []),
            f"--time={self.time}",
            "--no-kill",
            "--requeue",
            "--open-mode=append",
            "--output=%x-%j.out",
            *self.directives,
        ]


def wrapped(words: list[str], width: int = 120) -> str:
    """A command in lines of bash, each indented; so many characters wide at most where words are not longer."""
    lines, line = [], "   "
    for word in map(shlex.quote, words):
        if len(line) + len(word) > width:
            lines.append(line)
            line = "   "
        line += f" {word}"
    return "\n".join([*lines, line])


_NO_SAVE = """# Without --save there is nowhere to go on from: a job that is requeued begins again.
"""
_DRAIN = """        scontrol update NodeName="${node%%.*}" State=DRAIN Reason="deadpool: lost by job $SLURM_JOB_ID" 2>/dev/null \\
            || echo "deadpool: node $node could not be drained (this user may not); tell the operators"
"""
#: Braces that bash is to see are doubled.
_SCRIPT = r"""#!/bin/bash
# Made by `deadpool sbatch`. --no-kill here and at srun: the loss of a node is the end neither of the job nor of a step.
{directives}

{no_save}active={active} # nodes that train; the others are spares
restarts={restarts_max} # how often the job may be requeued
runs={runs}
{setup}command=(
{command}
)

life=${{SLURM_RESTART_COUNT:-0}}
run=$runs/slurm-$SLURM_JOB_ID-$life
exit_code_of() {{ sed -n 's/^ *"exit_code": \([0-9]*\).*/\1/p' "$1/summary.json" 2>/dev/null; }}

# Requeued although the training is over? Its end came when this script's host was down, and is passed on now.
if ((life > 0)); then
    code=$(exit_code_of "$runs/slurm-$SLURM_JOB_ID-$((life - 1))")
    if [ -n "$code" ] && [ "$code" != 75 ]; then exit "$code"; fi
fi

mkdir -p "$run/logs" || exit 2
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
spares=$((${{#nodes[@]}} - active))
echo "$SLURMD_NODENAME" > "$run/batch-host" # while it is there, this script means to see the job's end

# One srun for each node, since one over all of them ends its tasks everywhere when a node fails to start. The last node's task says
# how the job goes; the others' output is written by their own nodes, so that it does not depend on this one.
for node in "${{nodes[@]}}"; do
    output=(--output="$run/logs/agent-%N-%t.log")
    [ "$node" = "${{nodes[-1]}}" ] && output=()
    srun --no-kill --kill-on-bad-exit=0 --wait=0 --nodes=1 --ntasks={tasks} --ntasks-per-node={tasks} --nodelist="$node" \
        {gpus}{srun}"${{output[@]}}" \
        "${{command[@]}}" --hot-swap-spares "$spares" --hot-swap-run-dir "$run" &
done

# The job's own word counts. srun's exit code does not: it is 0 when a node was lost.
while code=$(exit_code_of "$run"); [ -z "$code" ] && [ -n "$(jobs -rp)" ]; do sleep 1; done
rm -f "$run/batch-host"
code=${{code:-75}} # all tasks are gone and nobody has said why: the coordinator's node was lost
for ((i = 0; i < 30; i++)); do [ -z "$(jobs -rp)" ] && break; sleep 1; done

if [ -e "$run/events.jsonl" ]; then
    for node in $(sed -n 's/.*"kind": "node-lost".*"node": "\([^"]*\)".*/\1/p' "$run/events.jsonl" | sort -u); do
        echo "deadpool: node $node was lost (why: grep node-lost $run/events.jsonl)"
{drain}    done
fi
if [ "$code" = 75 ] && ((life < restarts)); then
    echo "deadpool: requeued, to go on from the newest durable generation or checkpoint"
    scontrol requeue "$SLURM_JOB_ID" && sleep 60 # Slurm ends this script meanwhile
fi
exit "$code"
"""


def sbatch(
    command: Annotated[list[str], typer.Argument(metavar="-- SCRIPT …", help="The training script and all of its flags.")],
    nodes: Annotated[int, typer.Option("--nodes", help="Nodes that train.")],
    spares: Annotated[int, typer.Option("--spares", help="More nodes, kept warm to take over.")] = 1,
    spares_min: Annotated[
        int | None, typer.Option("--spares-min", help="Begin with so few spares, if Slurm has no more; default: all of them.")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", help="GPUs of each node; 0: it trains on CPUs.")] = 0,
    ranks_per_node: Annotated[int | None, typer.Option("--ranks-per-node", help="Ranks of each node; default: its GPUs.")] = None,
    tasks_per_node: Annotated[int, typer.Option("--tasks-per-node", help="1: an agent for the whole node; or one for each rank.")] = 1,
    time: Annotated[str, typer.Option("--time", help="Time limit, as Slurm writes it.")] = "24:00:00",
    name: Annotated[str, typer.Option("--name", help="Name of the job.")] = "deadpool",
    account: Annotated[str | None, typer.Option("--account", help="As Slurm's: who pays.")] = None,
    partition: Annotated[str | None, typer.Option("--partition", help="As Slurm's: where it waits.")] = None,
    qos: Annotated[str | None, typer.Option("--qos", help="As Slurm's: quality of service.")] = None,
    constraint: Annotated[str | None, typer.Option("--constraint", help="Kind of node.")] = None,
    directive: Annotated[list[str] | None, typer.Option("--directive", metavar="FLAG", help="Another flag of sbatch; repeatable.")] = None,
    module: Annotated[list[str] | None, typer.Option("--module", help="A module to load; repeatable.")] = None,
    setup: Annotated[list[str] | None, typer.Option("--setup", metavar="LINE", help="A line of shell at its start; repeatable.")] = None,
    container: Annotated[
        str, typer.Option("--container", metavar="WORDS", help="What runs python inside a container: 'apptainer exec --nv image.sif'.")
    ] = "",
    srun: Annotated[str, typer.Option("--srun", metavar="FLAGS", help="More of srun's flags, such as '--container-image=…'.")] = "",
    python: Annotated[str, typer.Option("--python", help="The interpreter on the nodes.")] = "python",
    restarts_max: Annotated[int, typer.Option("--restarts-max", help="How often the job may be requeued.")] = 10,
    drain: Annotated[bool, typer.Option("--drain", help="Drain lost nodes, where this user may.")] = False,
    output: Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Where the script goes; default: shown.")] = None,
) -> None:
    """Write a batch script that trains under hot swap on a Slurm cluster, with spares, and is requeued where they do not suffice."""
    named = {"account": account, "partition": partition, "qos": qos, "constraint": constraint}
    directives = [*(f"--{flag}={value}" for flag, value in named.items() if value is not None), *(directive or [])]
    lines = [*(f"module load {name}" for name in module or []), *(setup or [])]
    job = BatchJob(
        *(command, nodes, spares, spares if spares_min is None else spares_min, gpus_per_node, ranks_per_node, tasks_per_node),
        *(time, name, restarts_max, python, directives, lines, container, srun, drain),
    )
    if output is None:
        print(job.text(), end="")
        return
    try:
        output.write_text(job.text())
        output.chmod(0o755)
    except OSError as failure:
        raise UsageError(f"the script cannot be written: {failure}; give another --output, or none to have it shown") from failure
    print(f"deadpool: submit it with: sbatch {output}")
