"""One worker, seen from its agent: its control block and its slots, and the process that fills them, which may be started again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..environment import WorkerEnvironment
from ..errors import SnapshotMismatch
from ..processes import end_in_words
from ..snapshot.layout import HEADER_BYTES, Header
from ..snapshot.slots import OWN_SLOTS, ControlBlock, Slots, Word
from .local import FromWorker, Link, pair


class WorkerProcess:
    """A child that runs the training script. It dies with its agent (PR_SET_PDEATHSIG, set by the child); what it has put into
    shared memory does not die with it."""

    def __init__(self, index: int, command: Sequence[str], log: Path, place: dict[str, str | int], extra_env: dict[str, str]) -> None:
        self.index = index
        self.rank: int | None = None  # whose snapshots are in the slots
        self.begins_from: int | None = None  # the generation that its slots were filled with for the job's start
        self.given = False  # whether the process has been told its rank
        self.control = ControlBlock.create()
        self.slots: Slots | None = None
        self.layout_hash: bytes | None = None  # of what is in the slots
        self.generations: dict[int, int] = {}  # slot -> generation that was begun or fetched there
        self.peers: tuple[int, ...] = ()  # ranks with the same payload, since the optimizer's state is not sharded
        self.envelopes: Slots | None = None  # what goes to holders that have the payload themselves
        self.metadata_room_bytes = 0
        self.said_goodbye = False
        self._command, self._log, self._place, self._extra_env = command, log, place, extra_env
        log.parent.mkdir(parents=True, exist_ok=True)
        self.start()

    def start(self) -> None:
        """Start the process; the one before, if there was one, has ended."""
        self.given = self.said_goodbye = False
        ours, theirs = pair()
        self.link = Link(ours, FromWorker)
        environment = WorkerEnvironment(
            link_fd=theirs.fileno(),
            control_fd=self.control.fd,
            worker=self.index,
            **self._place,  # type: ignore[arg-type]
        )
        with open(self._log, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megatron.hotswap.worker", *self._command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **self._extra_env, **environment.export()},
                pass_fds=(theirs.fileno(), self.control.fd),
            )
        theirs.close()

    def put(self, slot: int, generation: int) -> None:
        """The slot is, or will be, this generation's."""
        self.control.set(Word.GENERATION_0 + slot, generation + 1)
        self.generations[slot] = generation

    def adopt(self, slot: int, header: Header) -> None:
        """The slot was filled with this snapshot for the worker, which has not made it itself."""
        assert self.slots is not None
        self.put(slot, header.generation)
        self.layout_hash = header.layout_hash
        self.metadata_room_bytes = self.slots.slot_bytes - HEADER_BYTES - header.payload_bytes
        self.control.set(Word.METADATA_BYTES_0 + slot, header.metadata_bytes)

    def empty(self, slot: int) -> None:
        """What is in the slot is of no use any more."""
        self.control.set(Word.GENERATION_0 + slot, 0)
        self.generations.pop(slot, None)

    def take_stock(self) -> None:
        """The process is gone: what it has left is what the control block says. A copy that it had only begun is torn, and it may
        have died before it could say that it had begun one."""
        self.control.set(Word.PHASE, 0)  # what it was at, long work even, says nothing about the next one
        copied = self.control.get(Word.COPIED)
        begun = {slot: self.control.get(Word.GENERATION_0 + slot) for slot in range(OWN_SLOTS)}
        self.generations = {slot: word - 1 for slot, word in begun.items() if 0 < word <= copied}

    def make_slots(self, slot_bytes: int) -> Slots:
        """The worker's own slots; made once, found again by a worker that takes over."""
        if self.slots is not None and self.slots.slot_bytes != slot_bytes:
            self.slots.close()
            self.slots = None
            for slot in range(OWN_SLOTS):
                self.empty(slot)
        if self.slots is None:
            self.slots = Slots.create(slot_bytes, OWN_SLOTS)
        return self.slots

    def slot_of(self, generation: int) -> int:
        """Where a generation lies.

        Raises:
            SnapshotMismatch: it is not here.
        """
        for slot, there in self.generations.items():
            if there == generation:
                return slot
        raise SnapshotMismatch(f"rank {self.rank} has no snapshot of generation {generation} here; it has {self.generations}")

    def ended(self) -> str | None:
        """How the process ended or got stuck, in words, or None while it runs."""
        status = self.process.poll()
        if status is not None:
            return end_in_words(status)
        try:
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return "its process is gone"
        return "stopped (SIGSTOP)" if state in ("T", "t") else None

    def kill(self) -> None:
        """End it, at once."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.link.sock.close()
