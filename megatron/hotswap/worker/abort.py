"""Getting the training thread out of a collective whose peer is gone.

Only the groups that a lost rank was in, and those in which this rank has unfinished work, are ended at first: the others can be kept.
If that does not get the thread out within a moment, all are.

NCCL has an abort: it is called for all of them inside one group call, so that none waits for another's. gloo has none, and does not
notice a peer that is frozen; so two things are done, again and again until the thread is out: the connected sockets of the groups
are shut down, which ends sends and receives; and the wait for a collective is cut into slices that look at the halt flag, because
gloo's ring all-reduce can stay blocked in a send whose pair was closed (design, section 8). The collective itself then ends by its
group's own timeout in gloo's thread; `Graveyard` keeps the group alive until then, since dropping it would join that thread under
Python's lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deadpool_ext import open_sockets

from ..errors import Halted
from ..topology.groups import Groups
from ..topology.ledger import LEDGERS, Ledger
from ..topology.sockets import Sockets, shut_down
from .session import Session

_SHUT_INTERVAL_S = 0.02
#: A thread that is blocked in a group which could have been kept is out by now, since its peers were halted too.
_KEEP_PATIENCE_S = 0.1
_WAIT_SLICE = timedelta(milliseconds=50)
_BURY_INTERVAL_S = 0.2
_IDLE_PATIENCE_S = 0.1
#: Methods of ProcessGroup whose work is done in gloo's threads. Sends and receives are not: their sockets wake them.
_COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "broadcast",
    "gather",
    "scatter",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
)


class _Abort:
    """One order's. Each has a flag of its own: a flag that the next order takes back, before the thread of this one has seen it, keeps that
    thread running, and whoever waits for its end waits for ever."""

    def __init__(self, lost: Collection[int]) -> None:
        self.lost = lost
        self.began_s = time.monotonic()
        self.out = threading.Event()
        self.thread: threading.Thread


class Aborter:
    """Knows which connections belong to the groups, and ends them on order."""

    def __init__(self, session: Session, groups: Groups) -> None:
        self._session = session
        self._groups = groups
        self._foreign: Sockets = frozenset()  # those that were there before the groups: not ours to touch
        self._known: Sockets | None = None  # the groups'; None while they are being built: then all but foreign ones
        self._lock = threading.Lock()
        self._running: list[_Abort] = []  # whose order the training thread has not read yet
        self.out_after_s = 0.0  # from the last order to the training thread being out
        session.abort = self.begin

    def building_groups(self) -> None:
        """Groups are about to be built: every socket that appears from now on is theirs."""
        self._foreign = open_sockets() - self._groups.sockets
        self._known = None

    def groups_built(self) -> None:
        """The groups are complete. Said again once large ones have had something to say, and have connected."""
        self._known = open_sockets() - self._foreign

    def begin(self, version: int, lost: Collection[int]) -> None:
        """Monitor thread: the membership is over, `lost` ranks are gone; end what the training thread may be blocked in."""
        if version < self._session.version:
            return
        abort = _Abort(lost)
        abort.thread = threading.Thread(target=self._end_groups, args=(abort,), name="deadpool-abort", daemon=True)
        with self._lock:
            self._running.append(abort)
            abort.thread.start()

    def thread_is_out(self) -> None:
        """Training thread: I am out of the collective. What has begun by now ends nothing any more once this returns; what begins
        meanwhile is ended by the next call, since its order is still to be read."""
        with self._lock:
            over, self._running = self._running, []
        if not over:
            return
        for abort in over:
            abort.out.set()
        self.out_after_s = time.monotonic() - over[-1].began_s
        for abort in over:
            abort.thread.join()
        if self._known is None:  # of groups that were not complete nobody knows what was ended
            self._groups.doom(None)

    def _end_groups(self, abort: _Abort) -> None:
        while not abort.out.is_set():
            patient = self._known is not None and time.monotonic() - abort.began_s < _KEEP_PATIENCE_S
            abort_device_groups([made.group for made in self._groups.doom(abort.lost if patient else None)])
            present = open_sockets()
            ours = present - self._foreign if self._known is None else present & self._known
            for fd, inode in ours - self._groups.sound_sockets():
                shut_down(fd, inode)
            abort.out.wait(_SHUT_INTERVAL_S)


def abort_device_groups(groups: Sequence[Any]) -> None:
    """Abort the NCCL communicators among these groups, all inside one group call, so that no abort waits for another."""
    backends = [backend for group in groups if (backend := _nccl(group)) is not None]
    if not backends:
        return
    backends[0]._group_start()
    for backend in backends:
        backend.abort()
    backends[0]._group_end()


def _nccl(group: Any) -> Any:
    """The NCCL backend of a process group, or None."""
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # it has none for that device
        return None
    return backend if "nccl" in str(backend.name()).lower() else None


def device_idle() -> bool:
    """Whether the device has nothing left to do, communication included, within a moment. A collective that hangs has."""
    if not torch.cuda.is_initialized():
        return True
    waits = threading.Thread(target=torch.cuda.synchronize, name="deadpool-idle", daemon=True)
    waits.start()  # an abort, should the answer be no, ends it
    waits.join(_IDLE_PATIENCE_S)
    return not waits.is_alive()


class _Work:
    """Work whose end is counted, and, if it is a collective's, whose wait ends with the membership. What else callers ask of a work goes
    to the real one."""

    __slots__ = ("_counted", "_group", "_ledger", "_real", "_sliced")

    def __init__(self, real: Any, group: Any, ledger: Ledger, sliced: bool) -> None:
        self._real = real
        self._group = group
        self._ledger = ledger
        self._sliced = sliced
        self._counted = False
        ledger.unfinished += 1

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As Work.wait, or Halted."""
        result = self._wait(timeout)
        if not self._counted:
            self._counted = True
            self._ledger.unfinished -= 1
        return result

    def _wait(self, timeout: timedelta | None) -> bool:
        session = _GUARD.session
        if not self._sliced or session is None or _is_done(self._real):
            return self._real.wait() if timeout is None else self._real.wait(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while True:
            try:
                return self._real.wait(_WAIT_SLICE)
            except RuntimeError:
                # A slice that ran out and a collective that failed raise alike: asked again, a work that has ended says which.
                if _is_done(self._real):
                    return self._real.wait()
                if session.halted:
                    _GUARD.graveyard.bury(self._group, self._real)
                    raise Halted(f"membership {session.version} is over") from None
                if deadline is not None and time.monotonic() > deadline:
                    raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Scattered(_Work):
    """Work of a reduce-scatter. gloo makes it of an all-reduce and a copy of this rank's part; its wait takes no notice of a timeout, and
    it never says that it has ended (torch 2.13). So a thread waits, and is left to itself, as gloo's own, once the membership is over."""

    __slots__ = ("_done", "_outcome")

    def __init__(self, real: Any, group: Any, ledger: Ledger, sliced: bool) -> None:
        super().__init__(real, group, ledger, sliced)
        self._done = threading.Event()
        self._outcome: list[Any] = []

    def is_completed(self) -> bool:
        """Whether the wait is over."""
        return self._done.is_set()

    def _wait(self, timeout: timedelta | None) -> bool:
        session = _GUARD.session
        if session is None or self._done.is_set():
            return bool(self._real.wait())
        threading.Thread(target=self._finish, name="deadpool-scatter", daemon=True).start()
        while not self._done.wait(_WAIT_SLICE.total_seconds()):
            if session.halted:
                _GUARD.graveyard.bury(self._group, self)
                raise Halted(f"membership {session.version} is over")
        outcome = self._outcome.pop()
        try:
            if isinstance(outcome, BaseException):
                raise outcome
            return bool(outcome)
        finally:
            del outcome  # an exception that this frame holds would hold the frame, and the group with it

    def _finish(self) -> None:
        try:
            self._outcome.append(self._real.wait())
        except BaseException as failure:
            self._outcome.append(failure.with_traceback(None))
        self._done.set()


def _is_done(work: Any) -> bool:
    return bool(work.is_completed())


class _Grave:
    """Not replaced by the next membership's group when references are: topology/rebind.py knows it by its name."""

    __slots__ = ("group", "work")

    def __init__(self, group: Any, work: Any) -> None:
        self.group = group
        self.work = work


class Graveyard:
    """Groups that are over but whose threads may still be inside a collective: kept until their works have ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dead: list[_Grave] = []

    def bury(self, group: Any, work: Any) -> None:
        """Keep a group until this work has ended."""
        with self._lock:
            self._dead.append(_Grave(group, work))
            if len(self._dead) == 1:
                threading.Thread(target=self._watch, name="deadpool-graveyard", daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(_BURY_INTERVAL_S)
            with self._lock:
                self._dead = [grave for grave in self._dead if not _is_done(grave.work)]
                if not self._dead:
                    return

    def __len__(self) -> int:
        return len(self._dead)


class _Guard:
    session: Session | None = None
    on_device = False
    graveyard = Graveyard()


_GUARD = _Guard()


def guard_groups(session: Session, on_device: bool) -> None:
    """Count what begins and ends in every group, and have nothing begin in a membership that is over.

    Args:
        on_device: works return at once, are aborted there, and have ended when the device is idle: they are only counted as they
            begin. Else (gloo) a collective's wait ends with the membership too.
    """
    _GUARD.session, _GUARD.on_device = session, on_device
    messages = ((("send",), _count_send, False), (("recv",), _count_receive, False))
    for names, count, sliced in ((_COLLECTIVES, _count_collective, True), *messages):
        for name in names:
            original = getattr(dist.ProcessGroup, name, None)
            if original is not None:
                setattr(dist.ProcessGroup, name, _guarded(original, count, sliced))


def _guarded(original: Any, count: Callable[[Ledger, tuple[Any, ...]], None], sliced: bool) -> Any:
    kind = _Scattered if "reduce_scatter" in original.__name__ else _Work

    def begun(group: Any, *args: Any, **kwargs: Any) -> Any:
        if _GUARD.session is not None:
            _GUARD.session.check()
        ledger = LEDGERS.get(group.group_name)
        if ledger is not None:
            count(ledger, args)
        work = original(group, *args, **kwargs)
        if _GUARD.on_device or ledger is None or work is None or isinstance(work, bool):
            return work
        return kind(work, group, ledger, sliced)

    return begun


def _count_collective(ledger: Ledger, args: tuple[Any, ...]) -> None:
    ledger.collectives += 1


def _count_send(ledger: Ledger, args: tuple[Any, ...]) -> None:
    ledger.sent[args[1]] = ledger.sent.get(args[1], 0) + 1  # (tensors, to, tag)


def _count_receive(ledger: Ledger, args: tuple[Any, ...]) -> None:
    ledger.received[args[1]] = ledger.received.get(args[1], 0) + 1  # (tensors, source, tag)
