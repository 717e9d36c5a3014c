"""Getting the training thread out of a collective whose peer is gone.

NCCL has an abort. gloo has none, and does not notice a peer that is frozen; so two things are done, again and again until the
thread is out: the connected sockets of the groups are shut down (never a listening one: that ends the process), which ends
sends and receives; and the wait for a collective is cut into slices that look at the halt flag, because gloo's ring all-reduce
can stay blocked in a send whose pair was closed (design, section 8). The collective itself then ends by its group's own timeout
in gloo's thread; `Graveyard` keeps the group alive until then, since dropping it would join that thread under Python's lock.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import Halted
from .session import Session

_SHUT_INTERVAL_S = 0.02
_WAIT_SLICE = timedelta(milliseconds=50)
_BURY_INTERVAL_S = 0.2
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


def connected_sockets() -> set[tuple[int, str]]:
    """(descriptor, socket inode) of every connected TCP socket of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found.add((int(name), target))
    return found


class Aborter:
    """Knows which sockets belong to the groups, and shuts them down on order."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._foreign: set[tuple[int, str]] = set()  # sockets that were there before the groups: not ours to touch
        self._group_sockets: set[tuple[int, str]] | None = (
            None  # None while groups are being built: then all but foreign ones
        )
        self._out = threading.Event()
        self._out.set()
        self._thread: threading.Thread | None = None
        session.abort = self.begin

    def building_groups(self) -> None:
        """Groups are about to be built: every socket that appears from now on is theirs."""
        self._foreign = connected_sockets()
        self._group_sockets = None

    def groups_built(self) -> None:
        """The groups are complete."""
        self._group_sockets = connected_sockets() - self._foreign

    def begin(self, version: int) -> None:
        """Monitor thread: the membership is over; shut down until the training thread is out."""
        if version < self._session.version:
            return
        self._out.clear()
        self._thread = threading.Thread(target=self._shut, name="deadpool-abort", daemon=True)
        self._thread.start()

    def thread_is_out(self) -> None:
        """Training thread: I am out of the collective. Nothing is shut down any more once this returns."""
        self._out.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _shut(self) -> None:
        abort_device_groups()
        while not self._out.is_set():
            present = connected_sockets()
            ours = present - self._foreign if self._group_sockets is None else present & self._group_sockets
            for fd, target in ours:
                _shut_down(fd, target)
            self._out.wait(_SHUT_INTERVAL_S)


def _shut_down(fd: int, target: str) -> None:
    try:
        duplicate = os.dup(fd)
    except OSError:
        return
    with socket.socket(fileno=duplicate) as sock:
        try:
            if os.readlink(f"/proc/self/fd/{duplicate}") != target:
                return  # the number was reused meanwhile
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
                return
            if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # already shut


def abort_device_groups() -> None:
    """Abort every NCCL communicator of this process, all inside one group call, so that no abort waits for another."""
    groups = [pg for pg in dist.distributed_c10d._world.pg_map if "nccl" in dist.get_backend(pg)]
    if groups:
        dist.distributed_c10d._abort_process_group(None)


class _Work:
    """A collective's work whose wait ends when the membership does. What else callers ask of a work goes to the real one."""

    __slots__ = ("_group", "_real")

    def __init__(self, real: Any, group: Any) -> None:
        self._real = real
        self._group = group

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As Work.wait, or Halted."""
        session = _GUARD.session
        if session is None or _is_done(self._real):
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


def _is_done(work: Any) -> bool:
    return bool(work.is_completed())


class Graveyard:
    """Groups that are over but whose threads may still be inside a collective: kept until their works have ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dead: list[tuple[Any, Any]] = []

    def bury(self, group: Any, work: Any) -> None:
        """Keep a group until this work has ended."""
        with self._lock:
            self._dead.append((group, work))
            if len(self._dead) == 1:
                threading.Thread(target=self._watch, name="deadpool-graveyard", daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(_BURY_INTERVAL_S)
            with self._lock:
                self._dead = [(g, w) for g, w in self._dead if not _is_done(w)]
                if not self._dead:
                    return

    def __len__(self) -> int:
        return len(self._dead)


class _Guard:
    session: Session | None = None
    graveyard = Graveyard()


_GUARD = _Guard()


def guard_waits(session: Session) -> None:
    """Make every collective's wait end with the membership. gloo only: NCCL's works return at once and are aborted."""
    _GUARD.session = session
    for name in _COLLECTIVES:
        original = getattr(dist.ProcessGroup, name, None)
        if original is not None:
            setattr(dist.ProcessGroup, name, _guarded(original))


def _guarded(original: Any) -> Any:
    def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
        session = _GUARD.session
        if session is not None:
            session.check()
        work = original(group, *args, **kwargs)
        if work is None or isinstance(work, bool) or not torch.distributed.is_initialized():
            return work
        return _Work(work, group)

    return collective
