"""The `--hot-swap` flags: one dataclass, and the argument group that fills it.

The same group joins Megatron's own parser (patches/arguments.py) and is read by the agent, which imports no torch.
tests/style freezes the set of flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import UsageError

TRANSPORTS = ("tcp", "mpi", "nixl")


@dataclass(frozen=True)
class HotSwapConfig:
    """What the user asked for. Seconds and bytes are last in the names."""

    run_dir: Path
    lease_s: float
    heartbeat_interval_s: float
    halt_timeout_s: float
    resume_timeout_s: float
    collective_timeout_s: float
    wait_for_spare_s: float
    host_memory_max_bytes: int | None
    interface: str | None
    transport: str

    def __post_init__(self) -> None:
        for name in ("lease_s", "heartbeat_interval_s", "halt_timeout_s", "resume_timeout_s", "collective_timeout_s"):
            value = getattr(self, name)
            if value <= 0:
                raise UsageError(f"--hot-swap-{name.replace('_', '-')} must be greater than 0, got {value}")
        if self.halt_timeout_s <= self.collective_timeout_s:
            raise UsageError(
                f"--hot-swap-halt-timeout-s ({self.halt_timeout_s}) must be longer than --hot-swap-collective-timeout-s "
                f"({self.collective_timeout_s}): a gloo collective that cannot be aborted ends only by its own timeout; raise the first"
            )


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the hot-swap flags to a parser (Megatron's or the agent's)."""
    group = parser.add_argument_group("hot-swap", "survive the loss of nodes (Deadpool)")
    add = group.add_argument
    add("--hot-swap", action="store_true", help="keep training through the loss of nodes")
    add(
        "--hot-swap-run-dir",
        type=Path,
        default=Path("runs/latest"),
        metavar="DIR",
        help="where steps.jsonl, events.jsonl, summary.json and logs go (default: %(default)s)",
    )
    add(
        "--hot-swap-lease-s",
        type=float,
        default=3.0,
        metavar="S",
        help="a node that is silent for this long is given up (default: %(default)s)",
    )
    add(
        "--hot-swap-heartbeat-interval-s",
        type=float,
        default=0.5,
        metavar="S",
        help="how often an agent says that it lives (default: %(default)s)",
    )
    add(
        "--hot-swap-collective-timeout-s",
        type=float,
        default=20.0,
        metavar="S",
        help="timeout of gloo groups, the last means to end a collective that cannot be aborted; must exceed the longest "
        "wait between ranks, such as a checkpoint that one rank writes (default: %(default)s)",
    )
    add(
        "--hot-swap-halt-timeout-s",
        type=float,
        default=45.0,
        metavar="S",
        help="a survivor that is not out of its step this long after the halt is given up (default: %(default)s)",
    )
    add(
        "--hot-swap-resume-timeout-s",
        type=float,
        default=180.0,
        metavar="S",
        help="a rank that has not restored its state this long after the plan is given up (default: %(default)s)",
    )
    add(
        "--hot-swap-wait-for-spare-s",
        type=float,
        default=60.0,
        metavar="S",
        help="how long a rank without a spare is waited for before the job ends with code 75 (default: %(default)s)",
    )
    _add_resources(group)
    return parser


def _add_resources(group: argparse._ArgumentGroup) -> None:
    """What of the node may be used, and how."""
    add = group.add_argument
    add(
        "--hot-swap-host-memory-max-bytes",
        type=int,
        default=None,
        metavar="BYTES",
        help="most host memory that a node's slots may take (default: what the node has available)",
    )
    add(
        "--hot-swap-interface",
        default=None,
        metavar="ADDRESS",
        help="address of the network interface that snapshots travel over (default: the one that reaches the coordinator)",
    )
    add(
        "--hot-swap-transport",
        choices=TRANSPORTS,
        default="tcp",
        help="what moves snapshots between nodes: tcp, MPI (mpi4py) or NIXL (RDMA where there is some); docs/transports.md "
        "says what each needs (default: %(default)s)",
    )


def from_namespace(args: argparse.Namespace) -> HotSwapConfig:
    """The dataclass from parsed flags."""
    return HotSwapConfig(
        run_dir=args.hot_swap_run_dir,
        lease_s=args.hot_swap_lease_s,
        heartbeat_interval_s=args.hot_swap_heartbeat_interval_s,
        halt_timeout_s=args.hot_swap_halt_timeout_s,
        resume_timeout_s=args.hot_swap_resume_timeout_s,
        collective_timeout_s=args.hot_swap_collective_timeout_s,
        wait_for_spare_s=args.hot_swap_wait_for_spare_s,
        host_memory_max_bytes=args.hot_swap_host_memory_max_bytes,
        interface=args.hot_swap_interface,
        transport=args.hot_swap_transport,
    )


def parse(argv: Sequence[str]) -> HotSwapConfig:
    """Read the hot-swap flags out of a Megatron command line; the rest is Megatron's to read."""
    parser = add_arguments(argparse.ArgumentParser(allow_abbrev=False, add_help=False))
    args, _ = parser.parse_known_args(argv)
    return from_namespace(args)
