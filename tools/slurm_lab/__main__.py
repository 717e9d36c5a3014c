"""`python tools/slurm_lab …`: start and stop a cluster, run commands on it, break its nodes (README.md beside this file)."""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import fields
from pathlib import Path

from lab import ACTIONS, Lab, LabError, Settings, replace_process

_HELP = "a real Slurm of several nodes on this machine, whose nodes and cables can be broken (needs root)"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="slurm_lab", description=_HELP)
    usual = Path(tempfile.gettempdir(), "slurm_lab")
    top.add_argument("--dir", type=Path, default=usual, help="the cluster's folder (default: %(default)s)")
    verbs = top.add_subparsers(dest="verb", required=True)
    start = verbs.add_parser("start", help="start a cluster")
    for field in fields(Settings):
        kind = str if field.name == "network" else int
        start.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default, help="(default: %(default)s)")
    start.add_argument("--owner", type=int, metavar="PID", help="stop the cluster when this process ends")
    stop = verbs.add_parser("stop", help="end every process of the cluster")
    stop.add_argument("--clean", action="store_true", help="remove its folder too")
    run = verbs.add_parser("run", help="run a command as on the login node: run squeue")
    run.add_argument("command", nargs=argparse.REMAINDER)
    node = verbs.add_parser("node", help=f"do something to a node: {', '.join(ACTIONS)}")
    node.add_argument("action", choices=ACTIONS)
    node.add_argument("node")
    on = verbs.add_parser("on", help="run a command on a node: on n2 nvidia-smi")
    on.add_argument("node")
    on.add_argument("command", nargs=argparse.REMAINDER)
    controller = verbs.add_parser("slurmctld", help="kill or start the controller's daemon")
    controller.add_argument("action", choices=("kill", "start"))
    watch = verbs.add_parser("watch")
    watch.add_argument("owner", type=int)
    return top


def main() -> int:
    """Do what was asked."""
    args = parser().parse_args()
    lab = Lab(args.dir)
    try:
        if args.verb == "start":
            settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
            seconds = lab.start(settings, args.owner)
            print(f"{settings.nodes} nodes are idle after {seconds:.1f} s; the cluster's folder is {lab.folder}")
        elif args.verb == "stop":
            lab.stop(args.clean)
        elif args.verb == "run":
            replace_process(lab.login(*args.command))
        elif args.verb == "on":
            replace_process(lab.on(args.node, *args.command))
        elif args.verb == "node":
            ACTIONS[args.action](lab, args.node)
        elif args.verb == "slurmctld":
            (lab.kill_slurmctld if args.action == "kill" else lab.start_slurmctld)()
        else:
            lab.watch(args.owner)
    except LabError as failure:
        print(f"slurm_lab: {failure}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
