"""An agent's numbers for Prometheus. docs/watching.md says what each means.

What happens is counted on the event loop when it happens; what *is* (slots, generations) is read when Prometheus asks, on the
library's thread, which copies containers whole and reads words of the control blocks, and never waits for the loop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric

from ..control import messages as m
from ..errors import UsageError
from ..metrics.endpoint import Numbers
from ..replication.transfer import ReplicaStore
from ..snapshot.slots import Word
from .replicator import Moved
from .worker_process import WorkerProcess

#: From a few MB over PCIe to hundreds of GB over a shared network.
_MOVE_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)
_GENERATIONS = {
    Word.COPIED: ("copied_generation", "The newest that is complete in the rank's own slots."),
    Word.ACKNOWLEDGED: ("replicated_generation", "The newest that all holders of the rank have."),
    Word.COMMITTED: ("committed_generation", "The newest that the agent knows every holder of every rank to have."),
}


class Metrics(Numbers):
    """One per agent."""

    def __init__(
        self,
        workers: Sequence[WorkerProcess],
        replicas: ReplicaStore,
        heard_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._workers, self._replicas, self._heard_s, self._clock = workers, replicas, heard_s, clock
        self._d2h_s = self._histogram("d2h_seconds", "Device to host: the copy of one rank's snapshot into its slot.", _MOVE_BUCKETS_S)
        self._h2h_s = self._histogram("h2h_seconds", "Host to host: from the end of the copy until all holders have it.", _MOVE_BUCKETS_S)
        self._d2h_bytes = self._counter("d2h_bytes", "Bytes copied from device to host.")
        self._h2h_bytes = self._counter("h2h_bytes", "Bytes of snapshots that holders have taken from this agent.")
        self._damaged = self._counter("copies_damaged", "Copies of a snapshot that could not be restored from, found by this agent.")
        self._skipped = self._counter("generations_skipped", "Generations that a rank here did not take, since the one before was late.")
        self._lost = self._counter("workers_lost", "Worker processes that ended, or stopped, without saying goodbye.")
        self._restored = self._counter("restored_bytes", "Snapshot bytes that ranks here were restored from.")
        self._writes = self._counter("durable_writes", "Snapshots written to files.", "result")
        self._written = self._counter("durable_write_bytes", "Bytes of snapshots written to files.")
        for result in ("written", "failed"):
            self._writes.labels(result)
        self.registry.register(self)

    # ---- what happens, on the event loop

    def moved(self, moved: Moved) -> None:
        """All holders of a rank have one more snapshot of it."""
        if moved.d2h_s is not None:
            self._d2h_s.observe(moved.d2h_s)
        self._d2h_bytes.inc(moved.d2h_bytes)
        self._h2h_s.observe(moved.h2h_s)
        self._h2h_bytes.inc(moved.h2h_bytes)

    def said(self, message: m.FromAgent) -> None:
        """The agent tells the coordinator something, perhaps something that is counted."""
        if isinstance(message, m.CopyDamaged):
            self._damaged.inc()
        elif isinstance(message, m.Skipped):
            self._skipped.inc()
        elif isinstance(message, m.WorkerLost):
            self._lost.inc()
        elif isinstance(message, m.Restored):
            self._restored.inc(max(0, message.bytes_restored))
        elif isinstance(message, m.SnapshotWritten):
            self._writes.labels("written").inc()
            self._written.inc(max(0, message.file.length))
        elif isinstance(message, m.WriteFailed):
            self._writes.labels("failed").inc()

    # ---- what is, on the library's thread

    def collect(self) -> Iterator[Metric]:
        """Called for every scrape, and once to learn the names."""
        workers = tuple(self._workers)
        own = sum(w.slots.slot_bytes * w.slots.count for w in workers if w.slots is not None)
        yield GaugeMetricFamily("deadpool_slot_bytes", "Host memory of the own slots of the ranks here.", own)
        yield GaugeMetricFamily("deadpool_replica_bytes", "Host memory of the replicas of other nodes' ranks.", self._replicas.held_bytes)
        silence = max(0.0, self._clock() - self._heard_s())
        yield GaugeMetricFamily("deadpool_coordinator_age_seconds", "Since the coordinator was last heard.", silence)
        yield GaugeMetricFamily("deadpool_workers", "Worker processes of this agent.", len(workers))
        ranked = [(str(w.rank), w.control) for w in workers if w.rank is not None]
        for word, (name, text) in _GENERATIONS.items():
            family = GaugeMetricFamily(f"deadpool_rank_{name}", text, labels=["rank"])
            for rank, control in ranked:
                if generation := control.get(word):  # stored plus one
                    family.add_metric([rank], generation - 1)
            yield family
        lag = GaugeMetricFamily("deadpool_rank_generation_lag", "Generations copied that not all holders have yet.", labels=["rank"])
        for rank, control in ranked:
            acknowledged = control.get(Word.ACKNOWLEDGED)  # first: it follows the other
            lag.add_metric([rank], max(0, control.get(Word.COPIED) - acknowledged))
        yield lag

    # ---- the endpoint

    def serve(self, address: str, run_dir: Path, name: str, host: str, labels: dict[str, str]) -> m.Note:
        """Listen at a free port; the answer is for events.jsonl. Agents of several virtual nodes share one machine, so none has a port of
        its own. What cannot be served costs the numbers, never the node."""
        try:
            target = self._listen(address, 0, run_dir, name, host, labels)
        except (UsageError, OSError) as refused:
            return m.Note("metrics-refused", f"{refused}; the job goes on without those of {name}")
        return m.Note("metrics", f"those of {name} are at http://{target}/metrics, read-only")

    def close(self) -> threading.Thread | None:
        """Stop serving, behind the caller's back."""
        return self._end()
