"""A worker's session with its agent: the link, the control block, the monitor thread, and the fence.

Two threads: the *training thread* runs the user's script; the *monitor thread* reads the link, and on a halt gets the training
thread out of whatever it is blocked in.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, NoReturn

import deadpool_ext

from ..agent import local
from ..control import messages as m
from ..environment import WorkerEnvironment
from ..errors import Halted, Malformed
from ..processes import leave
from ..snapshot.slots import ControlBlock, Word
from . import faults

#: A wait in the engine is taken up again this often, so that a debugger or a signal gets a turn.
_WAIT_SLICE_S = 1.0
#: From a wish to pull the cable until it is pulled: the agent and the coordinator pass it on.
_CABLE_S = 0.05


class Session:
    """One per worker process."""

    def __init__(self, place: WorkerEnvironment) -> None:
        self.place = place
        self.control = ControlBlock(place.control_fd)
        self.link = local.Link(socket.socket(fileno=place.link_fd), local.FromAgent)
        self.version = 0  # of the membership that the training thread works in
        self.rank: int | None = None
        self.building = False  # a spare that has a rank but no state yet
        self.loading = False  # the job begins from a durable generation, and this rank has not loaded it yet
        self.orders: queue.Queue[m.Halt | local.Plan] = queue.Queue()
        self.abort: Callable[[int, Collection[int]], None] = lambda version, lost: None  # set by worker/abort.py
        self.exposed_stall_s = 0.0  # since it was last read
        self.plan_heard_s = 0.0  # time.perf_counter() when the last plan came
        self._replies: queue.Queue[tuple[Any, tuple[int, ...]]] = queue.Queue()
        self._ranks: queue.Queue[local.Given] = queue.Queue()
        self._armed: list[m.Injection] = []
        self._next_collective_fails = False  # on purpose
        self._send_lock = threading.Lock()
        self._monitor = threading.Thread(target=self._listen, name="deadpool-monitor", daemon=True)
        self._monitor.start()

    # ---- saying and hearing

    def say(self, message: local.FromWorker) -> None:
        """Send to the agent; what is the coordinator's goes on from there."""
        with self._send_lock:
            self.link.send(message)

    def await_rank(self, store: str) -> local.Given:
        """Say that this worker is warm, and wait for a rank. May take until the job ends."""
        self.say(m.WorkerReady(self.place.worker, store))
        return self._ranks.get()

    def await_slots(self, request: local.NeedSlots) -> tuple[local.SlotsGiven | local.NoSlots, tuple[int, ...]]:
        """Ask the agent for slots."""
        self.say(request)
        return self._replies.get()

    def _listen(self) -> None:
        try:
            while True:
                message, fds = self.link.receive()
                self._hear(message, fds)
        except (EOFError, OSError):
            end_process(3, "its agent is gone")
        except Malformed as noise:
            end_process(3, f"its agent speaks another language: {noise}")

    def _hear(self, message: Any, fds: tuple[int, ...]) -> None:
        if isinstance(message, m.Halt):
            if self.building:
                self.report_building(message.version)
            else:
                # Before the order is there to be read: who has read it is out, and ends the abort.
                self.abort(message.version, message.lost)
                self.orders.put(message)
        elif isinstance(message, local.Plan):
            self.plan_heard_s = time.perf_counter()
            self.orders.put(message)
        elif isinstance(message, local.Given):
            self.rank, self.version, self.building, self.loading = message.rank, message.version, message.fake, message.loaded
            if message.fake:
                self.report_building(message.version - 1)
            self._ranks.put(message)
        elif isinstance(message, m.Arm):
            self._armed.append(message.injection)
        elif isinstance(message, m.Stop):
            end_process(message.code, message.reason)
        else:
            self._replies.put((message, fds))

    def report_building(self, over: int) -> None:
        """What a process that has no state yet says to a halt. What lies in its slots, its agent knows and adds."""
        assert self.rank is not None
        while True:  # a plan of a membership that is over must not be acted on
            try:
                self.orders.get_nowait()
            except queue.Empty:
                break
        self.say(m.HaltReport(over, self.rank, None, False, (), ""))

    def report_error(self, failure: BaseException, step: int, collective: bool) -> None:
        """The training thread caught an exception in a step and waits for orders; the coordinator finds out whose fault it is."""
        assert self.rank is not None
        text = f"{type(failure).__name__}: {failure}"
        self.say(m.WorkerError(self.rank, self.version, step, collective, text[:2000]))

    # ---- the halt

    @property
    def halted(self) -> bool:
        """Whether the membership that this worker works in is over. A spare that still builds works in none."""
        return not self.building and self.version > 0 and self.control.get(Word.OVER_VERSION) >= self.version

    @property
    def step(self) -> int:
        """The step that the training thread is in, or was in last, counted from 1; 0 before the first."""
        return 0 if self.building else self.control.get(Word.STEP)

    def check(self) -> None:
        """Raise Halted if the membership is over. Called at every border of a step, a micro-batch and a section."""
        if self.halted:
            raise Halted(f"membership {self.version} is over")
        if self._next_collective_fails:
            self._next_collective_fails = False
            raise RuntimeError("Connection closed by peer (fail-collective, a fault on purpose)")

    def wait_for(self, word: Word, value: int) -> None:
        """Wait until a word of the control block is at least `value`.

        Raises:
            Halted: the membership ended first.
        """
        stop = self.control.address(Word.OVER_VERSION)
        while True:
            came = deadpool_ext.wait_u64_at_least(self.control.address(word), value, _WAIT_SLICE_S, stop, self.version)
            if came == 1:
                return
            self.check()

    def fence(self, generation: int, acknowledged: bool) -> None:
        """Before main parameters change: the copy of `generation` must be complete, or it would be torn. `acknowledged`: and its
        holders must have it, or one more step could be lost (guarantees 3 and 4)."""
        began = time.perf_counter()
        self.wait_for(Word.COPIED, generation + 1)
        if acknowledged:
            self.wait_for(Word.ACKNOWLEDGED, generation + 1)
        self.exposed_stall_s += time.perf_counter() - began

    def await_commit(self, generation: int) -> None:
        """Before the slot of an older one is overwritten: `generation` must be complete everywhere (guarantee 4)."""
        began = time.perf_counter()
        self.wait_for(Word.COMMITTED, generation + 1)
        self.exposed_stall_s += time.perf_counter() - began

    @property
    def committed(self) -> int:
        """The newest generation that this worker knows to be committed; -1: none."""
        return self.control.get(Word.COMMITTED) - 1

    @property
    def void(self) -> int:
        """The newest generation known never to be committed, since some rank skipped it; -1: none."""
        return self.control.get(Word.VOID) - 1

    # ---- progress, and faults on purpose

    @contextlib.contextmanager
    def long_work(self) -> Iterator[None]:
        """What the training thread does now may take long, and keep Python's lock (long_work.py)."""
        before = self.control.get(Word.PHASE)
        self._say_phase(m.Progress.number(m.LONG_WORK))
        try:
            yield
        finally:
            self._say_phase(before)

    def in_no_phase(self) -> None:
        """The training thread is out of its step."""
        self._say_phase(0)

    def _say_phase(self, number: int) -> None:
        self.control.set(Word.PHASE, number)
        self.control.bump(Word.PROGRESS)

    def enter(self, phase: str, step: int) -> None:
        """A phase of a step begins (step 1 is the first). Progress for whoever watches; the place where armed faults strike."""
        self.control.set(Word.STEP, step)
        self._say_phase(m.Progress.number(phase))
        for injection in [i for i in self._armed if _due(i, phase, step)]:
            if self.halted and injection.action in m.WORKER_FAULTS:
                continue  # what a thread raises on its way out of a halt is taken for the halt's doing: it waits for its next occasion
            self._armed.remove(injection)
            self.say(local.Strike(injection))  # the agent writes down when, and strikes within milliseconds if it is for it to do
            if injection.action in m.CABLE_FAULTS:
                time.sleep(_CABLE_S)  # the launcher is told by the agent and the coordinator
            elif injection.action not in m.WORKER_FAULTS:
                time.sleep(60.0)  # nothing must happen in between
            elif injection.action == "fail-collective":
                self._next_collective_fails = True
            else:
                faults.cause(injection.action)


def _due(injection: m.Injection, phase: str, step: int) -> bool:
    """Whether an armed fault strikes here. Armed late, it strikes at the next occasion."""
    if injection.at_step is None:
        return True
    return injection.at_step <= step and (injection.phase or "forward") == phase


def end_process(code: int, reason: str) -> NoReturn:
    """End this worker at once, and say why."""
    print(f"deadpool: worker ends with code {code}: {reason}", file=sys.stderr)
    leave(code)
