"""The `--hot-swap` flags: one dataclass, and the argument group that fills it.

The same group joins Megatron's own parser (patches/arguments.py) and is read by the agent, which imports no torch.
tests/style freezes the set of flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from .errors import UsageError

TRANSPORTS = ("tcp", "mpi", "nixl")
ON_FAILURE = ("swap", "restart")


@dataclass(frozen=True)
class HotSwapConfig:
    """What the user asked for. Seconds and bytes are last in the names."""

    run_dir: Path
    lease_s: float
    heartbeat_interval_s: float
    halt_timeout_s: float
    long_work_s: float
    resume_timeout_s: float
    collective_timeout_s: float
    wait_for_spare_s: float
    respawn_timeout_s: float
    respawn_window_s: float
    quarantine_failures: int
    quarantine_window_s: float
    health_command: str | None
    health_interval_s: float
    health_timeout_s: float
    coordinator_timeout_s: float
    store: str
    hang_factor: float
    hang_min_s: float
    keep_durable: int
    replicas: int
    failure_domain: str  # node, switch, or a file
    interval: int  # steps
    when_late: str  # wait or skip
    host_memory_max_bytes: int | None
    interface: str | None
    transport: str
    encrypt: bool
    rebuild: str  # selective or all
    check_groups: str  # no or yes
    spares: int  # nodes, under Slurm
    ranks_per_node: int | None  # under Slurm; None: its GPUs
    on_failure: str  # swap or restart
    metrics_port: int  # 0: none are served
    metrics_address: str

    def __post_init__(self) -> None:
        times = ("_timeout_s", "lease_s", "interval_s", "long_work_s", "quarantine_window_s")
        for name in (field.name for field in fields(self) if field.name.endswith(times)):
            value = getattr(self, name)
            if value <= 0:
                raise UsageError(f"--hot-swap-{name.replace('_', '-')} must be greater than 0, got {value}")
        for name in ("replicas", "interval", "keep_durable", "quarantine_failures"):
            if getattr(self, name) < 1:
                raise UsageError(f"--hot-swap-{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.metrics_port < 1 << 16:
            raise UsageError(f"--hot-swap-metrics-port must be a port, 1 to 65535, or 0 for no metrics, got {self.metrics_port}")
        if self.encrypt and self.transport != "tcp":
            raise UsageError(
                f"--hot-swap-encrypt encrypts what moves over --hot-swap-transport tcp; this job has {self.transport}, whose library makes "
                "connections of its own, in clear: leave the transport at tcp, or leave --hot-swap-encrypt out and keep "
                f"{self.transport} on a network that is yours alone"
            )
        if self.halt_timeout_s <= self.collective_timeout_s:
            raise UsageError(
                f"--hot-swap-halt-timeout-s ({self.halt_timeout_s}) must be longer than --hot-swap-collective-timeout-s "
                f"({self.collective_timeout_s}): a gloo collective that cannot be aborted ends only by its own timeout; raise the first"
            )


@dataclass(frozen=True)
class _Flag:
    name: str  # without --hot-swap-
    kind: Callable[[str], object]
    default: object
    metavar: str | None
    help: str
    choices: tuple[str, ...] | None = None


_DEADLINES = (
    _Flag("lease-s", float, 3.0, "S", "a node that is silent for this long is given up (default: %(default)s)"),
    _Flag("heartbeat-interval-s", float, 0.5, "S", "how often an agent says that it lives (default: %(default)s)"),
    _Flag(
        "collective-timeout-s",
        float,
        20.0,
        "S",
        "timeout of gloo groups, the last means to end a collective that cannot be aborted; must exceed the longest wait between "
        "ranks, such as a checkpoint that one rank writes (default: %(default)s)",
    ),
    _Flag(
        "halt-timeout-s",
        float,
        45.0,
        "S",
        "a survivor that is not out of its step this long after the halt is stuck: it is started again (default: %(default)s)",
    ),
    _Flag(
        "long-work-s",
        float,
        300.0,
        "S",
        "one that saves a checkpoint, or whose script has announced long work (megatron.hotswap.long_work), has so long after the halt "
        "(default: %(default)s)",
    ),
    _Flag(
        "resume-timeout-s",
        float,
        180.0,
        "S",
        "a rank that has not restored its state this long after the plan is given up (default: %(default)s)",
    ),
    _Flag(
        "wait-for-spare-s",
        float,
        60.0,
        "S",
        "how long a rank without a spare is waited for before the newest generation is written to --save and the job ends with code 75 "
        "(default: %(default)s)",
    ),
    _Flag(
        "respawn-timeout-s",
        float,
        60.0,
        "S",
        "a worker that failed alone is started again on its node; if it is not up after this long, a spare takes over the node's ranks "
        "(default: %(default)s)",
    ),
    _Flag(
        "respawn-window-s",
        float,
        600.0,
        "S",
        "a node whose workers fail again within this time is given up, and a spare takes over its ranks (default: %(default)s)",
    ),
    _Flag(
        "hang-factor",
        float,
        10.0,
        "N",
        "a job in which no rank comes any further for N of its normal steps hangs: all ranks begin again in place, and those that do not "
        "answer are started again; evaluations and checkpoints are not judged (default: %(default)s)",
    ),
    _Flag(
        "coordinator-timeout-s",
        float,
        300.0,
        "S",
        "how long an agent looks for a coordinator that it has lost, or another in its place; training goes on meanwhile "
        "(default: %(default)s)",
    ),
    _Flag("hang-min-s", float, 30.0, "S", "the least time without progress that is taken for a hang (default: %(default)s)"),
)
_HEALTH = (
    _Flag(
        "health-command",
        str,
        None,
        "CMD",
        "a shell command that each agent runs before it joins and at every interval; if it fails (exit code other than 0, or too late), "
        "the last line that it wrote is the reason why a spare takes the node's ranks (default: none; GPUs are watched by NVML where "
        "nvidia-ml-py is installed)",
    ),
    _Flag("health-interval-s", float, 60.0, "S", "from the end of one health command to the start of the next (default: %(default)s)"),
    _Flag("health-timeout-s", float, 30.0, "S", "a health command that takes longer is ended, and has failed (default: %(default)s)"),
    _Flag(
        "quarantine-failures",
        int,
        3,
        "N",
        "a node that fails N times within the quarantine window gets no ranks any more, until the window is over or `deadpool release` "
        "lets it out; faults on purpose do not count (default: %(default)s)",
    ),
    _Flag("quarantine-window-s", float, 3600.0, "S", "the time in which these failures are counted (default: %(default)s)"),
)
_SNAPSHOTS = (
    _Flag(
        "replicas",
        int,
        1,
        "R",
        "replicas of each rank's snapshot, on as many other nodes: any R nodes may be lost at one moment (default: %(default)s)",
    ),
    _Flag(
        "failure-domain",
        str,
        "node",
        "node|switch|FILE",
        "what replicas must leave: the node, the leaf switch as Slurm knows it, or what FILE says of each node, in lines of "
        "'NODE DOMAIN' or of Slurm's topology.conf (default: %(default)s)",
    ),
    _Flag(
        "interval",
        int,
        1,
        "N",
        "take a snapshot every N steps: a loss runs at most 2N - 1 completed steps again (default: %(default)s)",
    ),
    _Flag(
        "keep-durable",
        int,
        2,
        "N",
        "how many durable generations stay in --save (hot-swap/): older ones are removed once a newer one is whole (default: %(default)s)",
    ),
    _Flag(
        "when-late",
        str,
        "wait",
        None,
        "when a snapshot is due and the one before is not replicated yet: wait for it (counted as exposed stall), or skip the new one "
        "(counted as skipped; a loss then costs more steps) (default: %(default)s)",
        choices=("wait", "skip"),
    ),
    _Flag(
        "host-memory-max-bytes",
        int,
        None,
        "BYTES",
        "most host memory that a node's slots may take (default: what the node has available)",
    ),
    _Flag(
        "interface",
        str,
        None,
        "NAME|NETWORK|ADDRESS",
        "network interface that snapshots travel over: its name (hsn0), a network that it is in (10.1.0.0/16), or its address on this node "
        "(default: the one that reaches the coordinator)",
    ),
    _Flag(
        "transport",
        str,
        "tcp",
        None,
        "what moves snapshots between nodes: tcp, MPI (mpi4py) or NIXL (RDMA where there is some); docs/transports.md says what each "
        "needs (default: %(default)s)",
        choices=TRANSPORTS,
    ),
    _Flag(
        "rebuild",
        str,
        "selective",
        None,
        "which process groups are made anew after a loss: those that a lost rank was in or in which something was under way "
        "(selective), or all, for comparison (default: %(default)s)",
        choices=("selective", "all"),
    ),
    _Flag(
        "check-groups",
        str,
        "no",
        None,
        "after each recovery search the whole process for references to process groups that are over, and fail with their holders if "
        "there are any; takes some 0.1 s (default: %(default)s)",
        choices=("no", "yes"),
    ),
)
_CONTROL = (
    _Flag(
        "on-failure",
        str,
        "swap",
        None,
        "set by `deadpool run --on-failure`: what follows a loss, a hot swap or a restart of the whole job from Megatron's newest "
        "checkpoint (default: %(default)s)",
        choices=ON_FAILURE,
    ),
    _Flag(
        "store",
        str,
        "journal",
        "journal|etcd://HOST:PORT[,…]",
        "where the coordinator records its decisions: a file of the run directory, from which it can be started again, or etcd, with which "
        "the node that it runs on may be lost (default: %(default)s)",
    ),
)
_SLURM = (
    _Flag(
        "spares",
        int,
        0,
        "N",
        "under Slurm: keep the job's last N nodes as spares, warm to take over (default: %(default)s; deadpool run has --spares)",
    ),
    _Flag(
        "ranks-per-node",
        int,
        None,
        "R",
        "under Slurm: ranks of each node (default: as many as it has given the job GPUs there; deadpool run has --ranks-per-node)",
    ),
)
_WATCHING = (
    _Flag(
        "metrics-port",
        int,
        0,
        "PORT",
        "serve Prometheus metrics, read-only: the coordinator at PORT, each agent at any free port; RUN_DIR/metrics/*.json says which, as "
        "Prometheus reads it (file_sd_configs). 0: none (default: %(default)s)",
    ),
    _Flag(
        "metrics-address",
        str,
        "127.0.0.1",
        "ADDRESS",
        "where metrics are served; whoever reaches it may read them, without a password (default: %(default)s)",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the hot-swap flags to a parser (Megatron's or the agent's)."""
    group = parser.add_argument_group("hot-swap", "survive the loss of nodes (Deadpool)")
    group.add_argument("--hot-swap", action="store_true", help="keep training through the loss of nodes")
    group.add_argument(
        "--hot-swap-run-dir",
        type=Path,
        default=Path("runs/latest"),
        metavar="DIR",
        help="where steps.jsonl, events.jsonl, summary.json and logs go (default: %(default)s)",
    )
    group.add_argument(
        "--hot-swap-encrypt",
        action="store_true",
        help="encrypt snapshots on their way between nodes (transport tcp), with TLS 1.3; docs/security.md says what that costs. "
        "Control traffic is encrypted always",
    )
    for flag in (*_DEADLINES, *_HEALTH, *_SNAPSHOTS, *_CONTROL, *_SLURM, *_WATCHING):
        group.add_argument(
            f"--hot-swap-{flag.name}", type=flag.kind, default=flag.default, metavar=flag.metavar, help=flag.help, choices=flag.choices
        )
    return parser


def from_namespace(args: argparse.Namespace) -> HotSwapConfig:
    """The dataclass from parsed flags."""
    return HotSwapConfig(**{field.name: getattr(args, f"hot_swap_{field.name}") for field in fields(HotSwapConfig)})


def parse(argv: Sequence[str]) -> HotSwapConfig:
    """Read the hot-swap flags out of a Megatron command line; the rest is Megatron's to read."""
    parser = add_arguments(argparse.ArgumentParser(allow_abbrev=False, add_help=False))
    args, _ = parser.parse_known_args(argv)
    return from_namespace(args)
