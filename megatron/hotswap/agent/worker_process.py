"""One worker process, seen from its agent: its life, its link, its control block and its slots."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..environment import WorkerEnvironment
from ..errors import SnapshotMismatch
from ..processes import end_in_words
from ..snapshot.slots import OWN_SLOTS, ControlBlock, Slots
from .local import FromWorker, Link, pair


class WorkerProcess:
    """A child that runs the training script. It dies with its agent (PR_SET_PDEATHSIG, set by the child)."""

    def __init__(self, index: int, command: Sequence[str], log: Path, place: dict[str, str | int], extra_env: dict[str, str]) -> None:
        self.index = index
        self.rank: int | None = None
        self.control = ControlBlock.create()
        self.slots: Slots | None = None
        self.layout_hash: bytes | None = None  # of what is in the slots
        self.generations: dict[int, int] = {}  # slot -> generation that was begun or fetched there
        self.peers: tuple[int, ...] = ()  # ranks with the same payload, since the optimizer's state is not sharded
        self.envelopes: Slots | None = None  # what goes to holders that have the payload themselves
        self.metadata_room_bytes = 0
        self.said_goodbye = False
        ours, theirs = pair()
        self.link = Link(ours, FromWorker)
        environment = WorkerEnvironment(link_fd=theirs.fileno(), control_fd=self.control.fd, worker=index, **place)  # type: ignore[arg-type]
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megatron.hotswap.worker", *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **extra_env, **environment.export()},
                pass_fds=(theirs.fileno(), self.control.fd),
            )
        theirs.close()

    def make_slots(self, slot_bytes: int) -> Slots:
        """The worker's own slots; made once, found again by a worker that takes over."""
        if self.slots is not None and self.slots.slot_bytes != slot_bytes:
            self.slots.close()
            self.slots, self.generations = None, {}
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
