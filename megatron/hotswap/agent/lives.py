"""The lives of an agent's workers: started, listened to, watched, ended, and started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from typing import Any

from ..control.messages import Progress
from ..errors import Malformed
from ..processes import STACKS_SIGNAL, end_children, remove_shared_memory
from ..snapshot.slots import Word
from . import local
from .worker_process import WorkerProcess

#: How often workers are looked at. The end of one is known at once, by its link; this finds one that is stopped.
_LIFE_CHECK_INTERVAL_S = 0.25
_END_CHECK_S = 0.005
#: What a process may take to write where its threads are.
_STACKS_S = 0.2


class Lives:
    """One per agent. `heard(worker, message)` is called with what a worker says, `lost(worker, evidence)` once when one is gone, or
    is stopped for longer than `lease_s()`, without having said goodbye."""

    def __init__(
        self,
        heard: Callable[[WorkerProcess, Any], None],
        lost: Callable[[WorkerProcess, str], None],
        lease_s: Callable[[], float],
    ) -> None:
        self.workers: list[WorkerProcess] = []
        self._handles: dict[int, int] = {}  # worker -> descriptor that tells of its end
        self._heard = heard
        self._lost = lost
        self._lease_s = lease_s

    def add(self, worker: WorkerProcess) -> None:
        """A worker whose process was just started."""
        self.workers.append(worker)
        self._listen(worker)

    def tell(self, worker: WorkerProcess, message: local.FromAgent, fds: tuple[int, ...] = ()) -> None:
        """To the worker. One that does not read any more (stopped, dying) is found by `watch`; the message is of no use to it."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            worker.link.send(message, fds)

    async def start_again(self, worker: WorkerProcess, settle: Callable[[WorkerProcess], Awaitable[None]], stuck: bool = True) -> None:
        """End what is left of a worker's process and start another. `settle` is awaited in between: while nobody writes its slots.
        `stuck`: a process that still lives did not do what it was told, and its log is to say where it was."""
        self._deaf(worker)
        worker.given, worker.said_goodbye = False, True
        process = worker.process
        if stuck and worker.ended() is None:
            process.send_signal(STACKS_SIGNAL)
            await asyncio.sleep(_STACKS_S)
        if process.poll() is None:
            process.kill()
        while process.poll() is None:  # one that hangs in the kernel is not replaced: it may still write
            await asyncio.sleep(_END_CHECK_S)
        self._end_orphans(worker)
        worker.link.sock.close()
        worker.take_stock()
        await settle(worker)
        worker.start()
        self._listen(worker)

    async def watch(self) -> None:
        """Look for workers that are stopped, for as long as the agent lives; and for those that have ended, where the kernel does not
        tell."""
        loop = asyncio.get_running_loop()
        stopped_since: dict[int, float] = {}
        while True:
            await asyncio.sleep(_LIFE_CHECK_INTERVAL_S)
            for worker in self.workers:
                how = worker.ended()
                if how is None or not how.startswith("stopped"):
                    stopped_since.pop(worker.index, None)
                    if how is not None and not worker.said_goodbye:
                        self._exited(worker)
                elif loop.time() - stopped_since.setdefault(worker.index, loop.time()) > self._lease_s():
                    self._lose(worker, f"{how} for longer than the lease of {self._lease_s()} s")

    def progress(self) -> dict[int, Progress]:
        """How far each rank here is."""
        words = (Word.STEP, Word.PHASE, Word.PROGRESS)
        return {w.rank: Progress(*(w.control.get(word) for word in words)) for w in self.workers if w.rank is not None}

    def close(self) -> None:
        """End them all."""
        for worker in self.workers:
            self._deaf(worker)
            worker.kill()
            self._end_orphans(worker)

    def _listen(self, worker: WorkerProcess) -> None:
        worker.link.sock.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(worker.link.sock, self._receive, worker)
        # The link alone does not tell of its end: processes that it has forked hold it open.
        with contextlib.suppress(OSError):  # a kernel before 5.3: `watch` finds it
            handle = self._handles[worker.index] = os.pidfd_open(worker.process.pid)
            loop.add_reader(handle, self._exited, worker)

    def _deaf(self, worker: WorkerProcess) -> None:
        if worker.link.sock.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(worker.link.sock)
        handle = self._handles.pop(worker.index, None)
        if handle is not None:
            asyncio.get_running_loop().remove_reader(handle)
            os.close(handle)

    def _exited(self, worker: WorkerProcess) -> None:
        """It has ended; what it said before is heard first, its goodbye perhaps."""
        process = worker.process
        while not worker.said_goodbye and worker.link.sock.fileno() >= 0 and self._receive(worker):
            pass
        self._deaf(worker)
        self._link_closed(worker, process)

    def _end_orphans(self, worker: WorkerProcess) -> None:
        """What a worker's process that has ended leaves behind."""
        remove_shared_memory(worker.process.pid)
        end_children(f"DEADPOOL_WORKER={worker.index}", own={w.process.pid for w in self.workers})

    def _receive(self, worker: WorkerProcess) -> bool:
        """Hear one message; whether there was one."""
        try:
            message, fds = worker.link.receive()
        except BlockingIOError:
            return False
        except (EOFError, OSError):
            self._deaf(worker)
            self._link_closed(worker, worker.process)
            return False
        except Malformed as noise:
            self._deaf(worker)
            self._lose(worker, f"it told its agent what is no message: {noise}")
            return False
        for fd in fds:  # a worker has none to give
            os.close(fd)
        self._heard(worker, message)
        return True

    def _link_closed(self, worker: WorkerProcess, process: object) -> None:
        """The process is ending: find out how, as soon as the kernel knows."""
        if worker.process is not process:  # it was started again meanwhile
            return
        how = worker.ended()
        if how is None or how.startswith("stopped"):
            asyncio.get_running_loop().call_later(_END_CHECK_S, self._link_closed, worker, process)
        else:
            self._lose(worker, how)

    def _lose(self, worker: WorkerProcess, evidence: str) -> None:
        if not worker.said_goodbye:
            worker.said_goodbye = True
            self._lost(worker, evidence)
