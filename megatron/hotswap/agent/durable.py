"""What an agent does for durable generations: it writes the snapshots that it has, and fills its slots from files at a job's start.

All of it in threads of their own, since the file system may be slow, or not answer at all: then the coordinator hears so, and the
thread is left behind. The thread pool of the replication is not used, so that training never waits for a disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from ..control import messages as m
from ..errors import HotSwapError, SnapshotMismatch, UsageError
from ..replication import envelope
from ..replication.transfer import ReplicaStore
from ..snapshot import durable
from ..snapshot import manifest as mf
from ..snapshot.layout import HEADER_BYTES, Header
from ..snapshot.slots import OWN_SLOTS, Slots, Word
from . import own_snapshot
from .pool import in_own_thread
from .worker_process import WorkerProcess

#: A file system that takes this long for 8 MiB to be written, or 256 MiB to be flushed, does not answer.
STALLED_S = 120.0
#: Snapshots of a node that are written at the same time.
_AT_ONCE = 4


class _Unanswered(HotSwapError):
    """The file system does not answer."""


class Durable:
    """One per agent. `say` is to the coordinator, `do` runs something behind the loop's back."""

    def __init__(
        self,
        run_id: str,
        workers: list[WorkerProcess],
        replicas: ReplicaStore,
        stock: Callable[[], dict[int, tuple[int, ...]]],
        require_room: Callable[[int], None],
        say: Callable[[m.FromAgent], None],
        do: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._run_id = run_id
        self._workers = workers
        self._replicas = replicas
        self._stock = stock
        self._require_room = require_room
        self._say = say
        self._do = do
        self._stop = threading.Event()  # of the attempt that counts; set when it does not any more
        self._due: dict[int, m.WriteSnapshots] = {}  # rank -> what is to be written once it is complete
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._loading = asyncio.Lock()

    # ---- writing

    def take_stock(self, order: m.TakeStock) -> None:
        """Say what could be written from here: sealed own snapshots, and replicas."""
        found = {rank: set(generations) for rank, generations in self._stock().items()}
        for worker in self._workers:
            if worker.rank is not None:
                found.setdefault(worker.rank, set()).update(own_snapshot.complete(worker, self._run_id))
        self._say(m.Stock(order.version, {rank: tuple(sorted(generations)) for rank, generations in found.items() if generations}))

    def write(self, order: m.WriteSnapshots) -> None:
        """Another attempt; the one before is over."""
        self.cancel()
        for rank in order.ranks:
            worker = next((w for w in self._workers if w.rank == rank), None)
            if order.training and worker is not None and order.generation not in own_snapshot.complete(worker, self._run_id):
                if max(worker.generations.values(), default=-1) > order.generation:
                    text = f"training is at generation {max(worker.generations.values())} already"
                    self._say(m.WriteFailed(order.attempt, rank, "gone", text))
                else:
                    self._due[rank] = order
            else:
                self._do(self._write(order, rank))

    def sealed(self, rank: int, generation: int) -> None:
        """An own snapshot is complete and has its header: it may have been waited for."""
        order = self._due.get(rank)
        if order is not None and order.generation == generation:
            del self._due[rank]
            self._do(self._write(order, rank))

    def cancel(self) -> None:
        """What is being written is not wanted any more."""
        self._stop.set()
        self._stop = threading.Event()
        self._due.clear()

    async def _write(self, order: m.WriteSnapshots, rank: int) -> None:
        stop, path = self._stop, Path(order.root, order.folder, mf.file_name(rank))
        try:
            content = self._content(rank, order.generation)
            copies = order.training and self._has_room(content.file_bytes)

            def work(alive: durable.Alive) -> None:
                with durable.copy_of(content, alive) if copies else content as source:
                    durable.write_snapshot(path, source, alive)

            # In training a copy in memory is taken at once, before its source is overwritten.
            async with contextlib.nullcontext() if order.training else self._at_once:
                await _attended(work, stop, f"writing {path}")
            file = m.DurableFile(content.file_bytes, content.header.crc32c, content.header.layout_hash.hex())
            self._say(m.SnapshotWritten(order.attempt, rank, file))
        except durable.WriteStopped:
            return
        except (OSError, HotSwapError) as failure:
            if not stop.is_set():
                self._say(m.WriteFailed(order.attempt, rank, _why(failure), _words(failure)))

    def _has_room(self, wanted_bytes: int) -> bool:
        """Without it the slot itself is written from, which may be too slow: then it is said to be gone."""
        try:
            self._require_room(wanted_bytes)
        except UsageError:
            return False
        return True

    def _content(self, rank: int, generation: int) -> durable.Content:
        """The snapshot, wherever it is here.

        Raises:
            SnapshotGone: it is not.
            SnapshotMismatch: what is here cannot be it.
        """
        for worker in self._workers:
            if worker.rank == rank and generation in own_snapshot.complete(worker, self._run_id):
                return self._own(worker, generation)
        try:
            slots, slot = self._replicas.find(rank, generation)
        except SnapshotMismatch as missing:
            raise durable.SnapshotGone(str(missing)) from missing
        header = slots.header(slot)
        header.require(run_id=self._run_id, rank=rank, generation=generation)
        if not envelope.is_envelope(header):
            return durable.in_slot(slots, slot, header)
        return self._opened(rank, generation, slots.span(slot * slots.slot_bytes + HEADER_BYTES, header.metadata_bytes).tobytes())

    def _own(self, worker: WorkerProcess, generation: int) -> durable.Content:
        assert worker.slots is not None
        slot = worker.slot_of(generation)
        return durable.in_slot(worker.slots, slot, worker.slots.header(slot))

    def _opened(self, rank: int, generation: int, raw: bytes) -> durable.Content:
        """A rank whose payload a peer of it here has: metadata from the envelope, payload from the peer's slot."""
        found = envelope.unpack(raw)
        inner = found.inner
        inner.require(run_id=self._run_id, rank=rank, generation=generation)
        for worker in self._workers:
            if worker.rank in found.peers and generation in own_snapshot.complete(worker, self._run_id):
                assert worker.slots is not None
                metadata = Slots.create(HEADER_BYTES + len(found.metadata), 1)
                metadata.span(HEADER_BYTES, len(found.metadata))[:] = found.metadata
                return durable.in_slot(metadata, 0, inner, (worker.slots, worker.slot_of(generation)), own=metadata)
        raise durable.SnapshotGone(f"no rank of {found.peers} is here with generation {generation}, so the payload of rank {rank} is not")

    def write_manifest(self, order: m.WriteManifest) -> None:
        """All files are there: make the generation whole, and remove what it replaces."""
        self._do(self._write_manifest(order))

    async def _write_manifest(self, order: m.WriteManifest) -> None:
        root, stop = Path(order.root), self._stop
        manifest = mf.Manifest(mf.FORMAT, self._run_id, order.generation, order.shape, order.files)
        try:
            await _attended(lambda alive: durable.write_manifest(root, order.folder, manifest, alive), stop, f"writing {root}")
        except durable.WriteStopped:
            return
        except (OSError, HotSwapError) as failure:
            self._say(m.WriteFailed(order.attempt, None, "medium", _words(failure)))
            return
        removed: tuple[str, ...] = ()
        try:
            removed = tuple(await _attended(lambda alive: durable.prune(root, order.folder, order.keep), stop, f"removing from {root}"))
        except (OSError, HotSwapError) as failure:
            self._say(m.Note("not-removed", f"an older generation could not be removed from {root}: {failure}"))
        self._say(m.GenerationWhole(order.attempt, removed))

    # ---- reading

    def load(self, order: m.Load) -> None:
        """Fill the slots of these ranks, or empty them."""
        self.cancel()
        self._do(self._load(order, self._stop))

    async def _load(self, order: m.Load, stop: threading.Event) -> None:
        async with self._loading:  # the one before may still write into the slots
            for worker in self._workers:
                worker.rank = None
                for slot in range(OWN_SLOTS):
                    worker.empty(slot)
            if order.ranks and not stop.is_set():
                await self._load_ranks(order, stop)

    async def _load_ranks(self, order: m.Load, stop: threading.Event) -> None:
        root = Path(order.root)
        try:
            manifest = await _attended(lambda alive: durable.read_manifest(root, order.folder), stop, f"reading {root}")
            for index, rank in order.ranks.items():
                await self._fill(self._workers[index], rank, root / order.folder, manifest, stop)
        except durable.WriteStopped:
            return
        except durable.Unseen as unseen:
            self._say(m.Loaded(order.version, order.folder, str(unseen), unseen=True))
        except (OSError, HotSwapError) as failure:
            self._say(m.Loaded(order.version, order.folder, _words(failure)))
        else:
            self._say(m.Loaded(order.version, order.folder))

    async def _fill(self, worker: WorkerProcess, rank: int, folder: Path, manifest: mf.Manifest, stop: threading.Event) -> None:
        def make_slots(slot_bytes: int) -> Slots:
            if worker.slots is None or worker.slots.slot_bytes != slot_bytes:
                self._require_room(slot_bytes * OWN_SLOTS)
            return worker.make_slots(slot_bytes)

        def work(alive: durable.Alive) -> Header:
            return durable.read_snapshot(folder, manifest, rank, self._run_id, make_slots, alive)

        try:
            header = await _attended(work, stop, f"reading {folder}")
        except _Unanswered:
            worker.slots = None  # should its thread go on after all, it must not write into what somebody else fills
            raise
        worker.rank = rank
        worker.adopt(0, header)
        worker.control.set(Word.COPIED, header.generation + 1)
        worker.control.set(Word.ACKNOWLEDGED, header.generation)


def _why(failure: Exception) -> Any:
    if isinstance(failure, durable.SnapshotGone):
        return "gone"
    return "damaged" if isinstance(failure, SnapshotMismatch) else "medium"


def _words(failure: Exception) -> str:
    """With what a user can do about it, where that is plain."""
    advice = {
        errno.ENOSPC: "make room there",
        errno.EDQUOT: "make room in the quota",
        errno.EROFS: "mount it to be written",
        errno.EACCES: "let this user write there",
    }
    number = failure.errno if isinstance(failure, OSError) else None
    return f"{failure}; {advice[number]}" if number in advice else str(failure)


async def _attended[T](work: Callable[[durable.Alive], T], stop: threading.Event, what: str) -> T:
    """Do it in a thread of its own; it calls what it is given after every piece.

    Raises:
        _Unanswered: it has not called for STALLED_S; the thread is left to itself, and ends with the process.
        WriteStopped: `stop` was set.
    """
    last_s, left = [time.monotonic()], threading.Event()

    def alive() -> None:
        last_s[0] = time.monotonic()
        if stop.is_set() or left.is_set():
            raise durable.WriteStopped(f"{what} is not wanted any more")

    done = in_own_thread(lambda: work(alive), "deadpool-durable")
    while not done.done():
        await asyncio.wait([done], timeout=1.0)
        if not done.done() and time.monotonic() - last_s[0] > STALLED_S:
            left.set()
            raise _Unanswered(f"{what}: nothing has gone on for {STALLED_S:g} s; the file system does not answer")
    return done.result()
