"""What is decided is recorded before anybody is told: then whoever takes the job up knows all that anybody has acted upon."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable

from ..control.decisions import Decision
from ..control.state import Control
from ..errors import Deposed
from .store import Store

_RETRY_S = 0.5


class RecordsFirst:
    """Keeps decisions in their order. While nothing changes that must be recorded, which is all the time between two recoveries, they are
    carried out at once; the store may block, so it is called in a thread."""

    def __init__(
        self, control: Control, store: Store, carry_out: Callable[[list[Decision]], None], deposed: Callable[[str], None]
    ) -> None:
        self._control, self._store, self._carry_out, self._deposed = control, store, carry_out, deposed
        self._recorded = control.revision
        self._waiting: deque[list[Decision]] = deque()
        self._recording: asyncio.Task[None] | None = None

    def take(self, decisions: list[Decision]) -> None:
        """Carry these out, now or as soon as they are recorded."""
        if self._recording is None and self._control.revision == self._recorded:
            return self._carry_out(decisions)
        self._waiting.append(decisions)
        if self._recording is None:
            self._recording = asyncio.get_running_loop().create_task(self._record())

    async def settle(self) -> None:
        """Until nothing waits."""
        if self._recording is not None:
            await self._recording

    async def _record(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                revision, decided, covered = self._control.revision, self._control.decided, len(self._waiting)
                try:
                    await loop.run_in_executor(None, self._store.save, decided)
                except OSError as failure:  # nothing is decided until it can be; training goes on meanwhile
                    print(f"deadpool: a decision cannot be recorded, and waits: {failure}", file=sys.stderr, flush=True)
                    await asyncio.sleep(_RETRY_S)
                    continue
                self._recorded = revision
                for _ in range(covered):
                    self._carry_out(self._waiting.popleft())
        except Deposed as why:
            self._waiting.clear()
            self._deposed(str(why))
        finally:
            self._recording = None
