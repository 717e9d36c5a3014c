"""`deadpool run --on-failure restart`: what can be refused before training, and what is said at the start."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..control.restarting import HOT_SWAP_PHASES
from ..coordinator.service import Scheduled
from ..errors import UsageError
from .checks import PlainParser, loads_where_it_saves

_TRACKER = "latest_checkpointed_iteration.txt"
#: Of Megatron's flags: what would leave a checkpoint without something that a restart goes on from.
_INCOMPLETE = {
    "no_save_optim": "the optimizer's state would begin anew",
    "no_save_rng": "the random generators would begin anew, and dropout would differ",
    "async_save": "a checkpoint would be said to be there before it is",
}


def _flags(argv: Sequence[str]) -> argparse.Namespace:
    parser = PlainParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--save")
    parser.add_argument("--load")
    parser.add_argument("--save-interval", "--persistent-save-interval", type=int)
    for name in _INCOMPLETE:
        parser.add_argument("--" + name.replace("_", "-"), action="store_true")
    return parser.parse_known_args(list(argv))[0]


def check_restart(argv: Sequence[str], faults: Sequence[Scheduled] = (), separate_networks: bool = False) -> None:
    """Refuse a job that could not be started anew from a checkpoint of its own.

    Raises:
        UsageError: states the rule, the values and what to do.
    """
    flags = _flags(argv)
    if flags.save is None:
        raise UsageError(
            "--on-failure restart starts the job anew from Megatron's newest checkpoint, and the training command has no --save: give "
            "--save DIR and --save-interval N after --, or leave --on-failure out for hot swap, which needs neither"
        )
    if flags.save_interval is None or flags.save_interval < 1:
        raise UsageError(
            f"--on-failure restart needs checkpoints at an interval of at least 1 step, and --save-interval is {flags.save_interval}: give "
            "--save-interval N; a loss then runs N / 2 steps again on average (`deadpool simulate` says which N loses least)"
        )
    for name, loss in _INCOMPLETE.items():
        if getattr(flags, name):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"--on-failure restart goes on from whole checkpoints, and with {flag} {loss}: leave {flag} out")
    tracker = Path(flags.save, _TRACKER)
    if tracker.is_file() and not loads_where_it_saves(flags):
        raise UsageError(
            f"a restart goes on from the newest checkpoint in --save, and {flags.save} has one of step {tracker.read_text().strip()} "
            f"that this job does not begin from (--load is {flags.load}): give --load {flags.save} to go on from it, or another --save"
        )
    if separate_networks:
        raise UsageError("--separate-networks is for hot swap, whose groups are bound to each node's cable; leave it or --on-failure out")
    for fault in faults:
        if fault.phase in HOT_SWAP_PHASES:
            raise UsageError(
                f"a fault in phase {fault.phase} (step {fault.at_step}) cannot strike under --on-failure restart, which has no snapshots "
                "and no fence: choose forward, backward, grad-sync, optimizer, param-gather, log, eval or save"
            )


def describe_restart(argv: Sequence[str]) -> list[str]:
    """For the summary at start."""
    flags = _flags(argv)
    return [
        f"  no hot swap (--on-failure restart): Megatron saves to {flags.save} every {flags.save_interval} steps; after a loss all workers "
        "are ended, and the whole job is started anew from the newest checkpoint"
    ]
