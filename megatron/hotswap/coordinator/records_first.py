"""What is decided is recorded before anybody is told: then whoever takes the job up knows all that anybody has acted upon.

A store may take long: a disk that hangs, an etcd that elects. Until it has answered, nobody can do what is waited for, so no deadline runs
out meanwhile (the caller does not tick the core while something waits), and all are put off by as long afterwards.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ..control import messages as m
from ..control.decided import Decided
from ..control.decisions import Decision, Send
from ..control.state import Control
from ..errors import Deposed
from .store import Store

_RETRY_S = 0.5
#: What says nothing that was decided. An agent that waits in vain for it takes this coordinator for lost.
_AT_ONCE = (m.Alive, m.Welcome)


def _is_no_decision(decision: Decision) -> bool:
    return isinstance(decision, Send) and isinstance(decision.message, _AT_ONCE)


class Record(NamedTuple):
    """What is to be recorded, and how many of the waiting decisions may be carried out then."""

    revision: int
    decided: Decided
    covers: int


class InOrder:
    """Decisions that wait until they are recorded, in their order. Without clock or loop, so that the simulator runs it too."""

    def __init__(self, control: Control, carry_out: Callable[[list[Decision]], None]) -> None:
        self._control, self._carry_out = control, carry_out
        self._recorded = control.revision
        self._waiting: deque[list[Decision]] = deque()

    def take(self, decisions: list[Decision]) -> bool:
        """Carry these out, unless they, or others before them, must be recorded first. Whether they wait for that."""
        if not self._waiting and self._control.revision == self._recorded:
            self._carry_out(decisions)
            return False
        if at_once := [d for d in decisions if _is_no_decision(d)]:
            self._carry_out(at_once)
            decisions = [d for d in decisions if not _is_no_decision(d)]
        self._waiting.append(decisions)
        return True

    @property
    def waiting(self) -> bool:
        """Whether something is decided that nobody has been told."""
        return bool(self._waiting)

    def due(self) -> Record | None:
        """What to record now; None: nothing waits."""
        return Record(self._control.revision, self._control.decided, len(self._waiting)) if self._waiting else None

    def recorded(self, record: Record, took_s: float) -> None:
        """It outlives this process: carry out what has waited for it so long."""
        self._recorded = record.revision
        self._control.told_late(took_s)
        for _ in range(record.covers):
            self._carry_out(self._waiting.popleft())

    def drop(self) -> None:
        """None of it may be carried out: another coordinator decides."""
        self._waiting.clear()


class RecordsFirst:
    """Keeps decisions in their order. While nothing changes that must be recorded, which is all the time between two recoveries, they are
    carried out at once; the store may block, so it is called in a thread."""

    def __init__(self, control: Control, store: Store, carry_out: Callable[[list[Decision]], None], deposed: Callable[[str], None]) -> None:
        self._order, self._store, self._deposed = InOrder(control, carry_out), store, deposed
        self._recording: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> bool:
        """Whether something is decided that nobody has been told: the core is not to be ticked then."""
        return self._order.waiting

    def take(self, decisions: list[Decision]) -> None:
        """Carry these out, now or as soon as they are recorded."""
        if self._order.take(decisions) and (self._recording is None or self._recording.done()):
            self._recording = asyncio.get_running_loop().create_task(self._record())

    async def settle(self) -> None:
        """Until nothing waits."""
        if self._recording is not None:
            await self._recording

    async def _record(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            begun_s = loop.time()
            while (record := self._order.due()) is not None:
                try:
                    await loop.run_in_executor(None, self._store.save, record.decided)
                except OSError as failure:  # nothing is decided until it can be; training goes on meanwhile
                    print(f"deadpool: a decision cannot be recorded, and waits: {failure}", file=sys.stderr, flush=True)
                    await asyncio.sleep(_RETRY_S)
                    continue
                took_s, begun_s = loop.time() - begun_s, loop.time()
                self._order.recorded(record, took_s)
        except Deposed as why:
            self._order.drop()
            self._deposed(str(why))
