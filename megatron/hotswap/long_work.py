"""For training scripts: say beforehand that what follows may keep Python's lock, or a rank from the next phase of its step, for long.

    from megatron.hotswap.long_work import long_work

    with long_work():
        model = torch.compile(model)  # or whatever else takes minutes

Without it a rank that enters no other phase of its step for `--hot-swap-hang-factor` normal steps is taken for one that hangs, and one
whose process does not answer a halt within `--hot-swap-halt-timeout-s` is started again. With it neither, for as long as the block
lasts; after a halt `--hot-swap-long-work-s` at most. Megatron's checkpoints are announced already. Without hot-swap it does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

_announce: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext


def long_work() -> AbstractContextManager[None]:
    """A block of long work of the training thread."""
    return _announce()


def announce_through(announce: Callable[[], AbstractContextManager[None]]) -> None:
    """The worker's: how it tells its agent."""
    global _announce
    _announce = announce
