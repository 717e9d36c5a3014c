"""An agent's connection to the coordinator, which may be lost, and found again at the same or at another address.

Training does not need a coordinator, and goes on while there is none. But an agent that nobody hears may have been replaced, and must
not go on for ever: while no word comes, every step that its ranks complete proves that the membership still stands, since no step is
completed without all of its ranks. Once there has been neither for long enough, the ranks are stopped (their snapshots stay), and the
agent goes on looking for a coordinator, which lets it in again or says that it was given up.
"""

from __future__ import annotations

import asyncio
import faulthandler
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from ..control import messages as m
from ..control.lease import COORDINATOR_LEASES, Listener
from ..coordinator import wire
from ..errors import Fenced, Malformed
from ..security.files import Credentials
from ..security.tls import why_refused
from .retold import Retold

#: How often a coordinator is looked for; several times in the time that it waits for its agents (control/returning.py).
_SEEK_S = 0.25
#: For a coordinator that is found to answer.
_ANSWER_S = 5.0
#: Of so many last steps the longest counts: a step is not given up before the next one could be complete.
_STEPS = 20
_STEP_FACTOR = 2.0


@dataclass(frozen=True)
class Calls:
    """What the link asks of its agent."""

    obey: Callable[[Any], None]  # an order of the coordinator
    rejoin: Callable[[float], m.Rejoin]  # where the agent stands, after so many seconds
    progress: Callable[[], Mapping[int, m.Progress]]  # how far its ranks are
    stop_ranks: Callable[[str], None]  # they may have been replaced; the reason
    find: Callable[[], str | None]  # where the coordinator is now; blocks for a moment


class CoordinatorLink:
    """One per agent; `talk` and `beat` run as tasks for as long as it lives."""

    def __init__(self, address: str, shown: Credentials, calls: Calls, *, lease_s: float, interval_s: float, timeout_s: float) -> None:
        self._address, self._shown, self._calls = address, shown, calls
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self.retold = Retold()
        self.heard_s = 0.0
        self.lease_s = lease_s  # as the coordinator says
        self._listener = Listener(COORDINATOR_LEASES * lease_s, interval_s, turn_s=interval_s)
        self._outbox: asyncio.Queue[m.FromAgent] = asyncio.Queue()
        self._notes: list[m.FromAgent] = []  # lines for events.jsonl, said while there was nobody to hear them
        self._known = False  # whether any coordinator has answered
        self._connected = True  # what is said before the first connection waits for it
        self._call: Any = None
        self._seeking: asyncio.Task[None] | None = None
        self._stopped = False  # whether the ranks were stopped here
        self._step, self._stepped_s = -1, 0.0
        self._gaps_s: deque[float] = deque(maxlen=_STEPS)

    @property
    def stopped(self) -> bool:
        """Whether the ranks were stopped for want of a coordinator, and no order has come since."""
        return self._stopped

    def say(self, message: m.FromAgent) -> None:
        """Tell the coordinator; the one that comes next, if there is none and it still matters then."""
        self.retold.said(message)
        if self._connected:
            self._outbox.put_nowait(message)
        elif _is_note(message):
            self._notes.append(message)

    async def talk(self) -> None:
        """Hear and obey the coordinator, whichever it is, until the agent is fenced.

        Raises:
            Fenced: nobody was found in time, or the coordinator does not believe this agent or cannot be understood.
        """
        loop = asyncio.get_running_loop()
        self.heard_s, begin = loop.time(), list[m.FromAgent]()
        while True:
            why, heard = await self._connection(begin)
            self._known = self._known or heard
            if not self._known and (refused := await loop.run_in_executor(None, why_refused, self._address, self._shown)):
                raise Fenced(f"the coordinator at {self._address} is not reached: {refused}")
            if not self._known and not begin:
                print(f"no coordinator is at {self._address} ({why}); it is looked for", file=sys.stderr, flush=True)
            self._connected = False
            if loop.time() - self.heard_s > self._timeout_s:
                raise Fenced(
                    f"no coordinator was found for {self._timeout_s:g} s (--hot-swap-coordinator-timeout-s) after the connection to the "
                    f"one at {self._address} broke: {why}"
                )
            await asyncio.sleep(_SEEK_S)
            self._address = await loop.run_in_executor(None, self._calls.find) or self._address
            begin = self._again()

    def _again(self) -> list[m.FromAgent]:
        """What another coordinator must hear first. From here on everything that is said is for it."""
        notes, self._notes = self._notes, []
        while not self._outbox.empty():
            left = self._outbox.get_nowait()
            notes += [left] if _is_note(left) else []
        self._outbox = asyncio.Queue()  # the former connection may still wait at the old one
        self._connected = True
        away_s = asyncio.get_running_loop().time() - self.heard_s
        rejoin = self._calls.rejoin(away_s)
        return [rejoin if self._known else rejoin.join, *self.retold.messages(), *notes]

    async def _connection(self, begin: list[m.FromAgent]) -> tuple[str, bool]:
        """One connection, until it breaks: why, and whether anything was heard."""
        loop, heard = asyncio.get_running_loop(), False
        async with wire.channel(self._address, self._shown) as channel:
            stream = channel.stream_stream(f"/{wire.SERVICE}/{wire.AGENT_STREAM}", request_serializer=wire.encode)
            self._call = call = stream(self._outgoing(begin))
            patience = loop.call_later(_ANSWER_S, call.cancel) if begin else None
            try:
                async for raw in call:
                    if patience is not None:
                        patience.cancel()
                    self.heard_s, heard = loop.time(), True
                    message = wire.decode_from_coordinator(raw)
                    self._stopped = self._stopped and not isinstance(message, m.Halt | m.Resume)
                    self._calls.obey(message)
            except Malformed as noise:
                raise Fenced(
                    f"the coordinator at {self._address} sent what an agent cannot read: {noise}; install the same version everywhere"
                ) from noise
            except grpc.aio.AioRpcError as broken:
                return f"{broken.code().name} {broken.details()}", heard
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                return "it did not answer", heard
            finally:
                if patience is not None:
                    patience.cancel()
        return "it closed the connection", heard

    async def _outgoing(self, begin: list[m.FromAgent]) -> AsyncIterator[m.FromAgent]:
        for message in begin:
            yield message
        outbox = self._outbox
        while True:
            yield await outbox.get()

    # ---- time passes

    async def beat(self) -> None:
        """Say that the agent lives, and look whether the coordinator does."""
        try:
            await self._beat()
        finally:
            faulthandler.cancel_dump_traceback_later()

    async def _beat(self) -> None:
        loop, sequence = asyncio.get_running_loop(), 0
        while True:
            sequence += 1
            progress = self._calls.progress()
            self._note_steps(progress, loop.time())
            self.say(m.Heartbeat(sequence, dict(progress)))
            # Should this loop stand still for half a lease, the log is to show where: a node that falls silent cannot be asked.
            faulthandler.dump_traceback_later(self.lease_s / 2)
            await asyncio.sleep(self._interval_s)
            now = loop.time()
            self._listener.lease_s = max(COORDINATOR_LEASES * self.lease_s, _STEP_FACTOR * max(self._gaps_s, default=0.0))
            if self._listener.look({"coordinator": max(self.heard_s, self._stepped_s)}, now):
                self._nobody(f"for {now - self.heard_s:.1f} s no coordinator was heard, and no step was completed")
            if now - self.heard_s > self.lease_s and self._connected and (self._seeking is None or self._seeking.done()):
                self._seeking = loop.create_task(self._look_elsewhere())

    def _note_steps(self, progress: Mapping[int, m.Progress], now: float) -> None:
        """Steps that are complete here are complete everywhere."""
        step = max((p.step for p in progress.values()), default=-1)
        if step > self._step:
            if self._step >= 0 and self._stepped_s:
                self._gaps_s.append(now - self._stepped_s)
            self._step, self._stepped_s = step, now
        elif step < self._step:  # rolled back, or another rank
            self._step, self._stepped_s = step, 0.0

    def _nobody(self, why: str) -> None:
        if self._stopped or not self._calls.progress():
            return
        self._stopped = True
        self._calls.stop_ranks(why)
        if self._call is not None:
            self._call.cancel()  # whoever is heard next must know that they were stopped

    async def _look_elsewhere(self) -> None:
        """The coordinator is silent, though the connection stands: its node may be gone, and another may lead."""
        found = await asyncio.get_running_loop().run_in_executor(None, self._calls.find)
        if found is not None and found != self._address and self._call is not None:
            self._call.cancel()


def _is_note(message: m.FromAgent) -> bool:
    """Whether all that follows from it is a line of events.jsonl."""
    return isinstance(message, m.Note) or (isinstance(message, m.Unhealthy) and not message.fatal)
