"""What a coordinator must remember of a job, so that another one can take it up. Pure.

It is recorded before anybody is told (coordinator/store.py): what is not in it, nobody has acted upon. It changes a few times in a
recovery and never while training goes on. All else, the agents say themselves when they come back (returning.py), what is wrong with
their nodes included. Times are of a clock that coordinators on different machines have in common (coordinator/clock.py).
"""

from __future__ import annotations

import msgspec

from ..codec import decoder, packing_encoder
from . import messages as m
from .loop import Reset, Strike
from .quarantine import Remembered

#: Of `Decided`. A coordinator does not take up what another version of it has recorded.
SCHEMA = 4


class Leaver(msgspec.Struct, frozen=True):
    """A node that lives, and whose ranks a spare has taken: its memory is needed until the recovery is complete (membership.py)."""

    node: str
    why: str
    ranks: tuple[int, ...]  # that it had
    up_to: int | None  # what it has of later generations does not count


class Decided(msgspec.Struct, frozen=True):
    """The decisions of a job so far."""

    run_id: str
    version: int = 0  # the newest that any agent may have heard of
    membership: m.Membership | None = None  # None: training has not begun
    training: bool = False  # the membership is in force; else a recovery is under way
    start: m.Start | None = None  # until the first recovery: who has not heard it must
    fenced: dict[str, str] = {}  # incarnation -> why it may not come back
    newest_step: int = 0
    durable_generation: int = -1
    durable_folder: str = ""
    tried: int = 0  # durable generations that could not be loaded
    attempts: int = 0  # to write one
    quarantine: Remembered = Remembered()
    strikes: tuple[Strike, ...] = ()  # steps that have failed, and were not completed since
    resets: tuple[Reset, ...] = ()  # whom they blamed
    leaving: dict[str, Leaver] = {}  # incarnation -> why, and what it has
    exit_code: int | None = None
    exit_reason: str = ""
    schema: int = SCHEMA


encode = packing_encoder()
decode = decoder(Decided, packed=True)
