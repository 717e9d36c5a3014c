"""The coordinator's numbers for Prometheus. docs/watching.md says what each means.

What happens is counted on the event loop when it happens; what *is* (phase, nodes, generations) is read when Prometheus asks, on the
library's thread. That thread only copies containers whole, which Python does in one go, and never waits for the loop.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from ..control.decisions import EVENT_KINDS, Log
from ..control.messages import StepRecord
from ..control.state import Control, Phase
from ..errors import UsageError
from ..metrics.endpoint import Numbers, forget
from . import clock
from .recorder import Recorder

_STEP_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300)
#: From a fence that finds everything done to one that waits for a slow network.
_STALL_BUCKETS_S = (0.00001, 0.0001, 0.001, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60)
_RECOVERY_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300)
_WRITES = {"durable": "whole", "write-failed": "failed"}


class Metrics(Numbers):
    """One per coordinator."""

    def __init__(self, control: Control, recorder: Recorder, clock: Callable[[], float] = clock.now) -> None:
        super().__init__()
        self._control, self._recorder, self._clock = control, recorder, clock
        self._counted = 0  # recoveries
        self._step_s = self._histogram("step_seconds", "Duration of completed steps, those that ran again included.", _STEP_BUCKETS_S)
        waited = "What a step waited for its snapshot, on the rank that logs."
        self._stall_s = self._histogram("exposed_stall_seconds", waited, _STALL_BUCKETS_S)
        self._events = self._counter("events", "Lines of events.jsonl.", "kind")
        self._damaged = self._counter("copies_damaged", "Copies of a snapshot that could not be restored from.")
        self._skipped = self._counter("generations_skipped", "Generations that were not taken, since the one before was late.")
        self._lost = self._counter("nodes_lost", "Nodes that were given up, spares included.")
        self._respawned = self._counter("ranks_respawned", "Ranks whose process was started again on its node, in complete recoveries.")
        self._rerun = self._counter("steps_rerun", "Completed steps that ran again after a recovery.")
        self._restored = self._counter("restored_bytes", "Snapshot bytes that ranks were restored from.")
        self._recoveries = self._counter("recoveries", "Complete recoveries.", "kind")
        self._recovery_s = self._histogram("recovery_seconds", "From fault to first step, less a normal step.", _RECOVERY_BUCKETS_S, "kind")
        self._phase_s = self._histogram("recovery_phase_seconds", "The phases of recoveries.", _RECOVERY_BUCKETS_S, "kind", "phase")
        self._writes = self._counter("durable_writes", "Attempts to write a durable generation.", "result")
        for result in _WRITES.values():
            self._writes.labels(result)
        self.registry.register(self)

    # ---- what happens, on the event loop

    def step(self, record: StepRecord) -> None:
        """A step is complete."""
        self._step_s.observe(max(0.0, record.seconds))
        self._stall_s.observe(max(0.0, record.exposed_stall_s))

    def event(self, log: Log) -> None:
        """The recorder has written this line."""
        self._events.labels(log.kind if log.kind in EVENT_KINDS else "other").inc()  # agents may say any word
        if log.kind == "copy-damaged":
            self._damaged.inc()
        elif log.kind == "generation-skipped":
            self._skipped.inc()
        elif log.kind == "node-lost":
            self._lost.inc()
            forget(self._recorder.run_dir, log.data["incarnation"])
        elif log.kind in _WRITES:
            self._writes.labels(_WRITES[log.kind]).inc()
        elif log.kind == "recovered":
            self._recovered()

    def _recovered(self) -> None:
        for line in self._recorder.recoveries[self._counted :]:
            kind = line["kind"]
            self._recoveries.labels(kind).inc()
            self._recovery_s.labels(kind).observe(max(0.0, line["total_s"]))
            for phase, seconds in line["phases"].items():
                self._phase_s.labels(kind, phase.removesuffix("_s")).observe(max(0.0, seconds))
            self._respawned.inc(len(line["ranks_respawned"]))
            self._rerun.inc(max(0, line["steps_rerun"]))
            self._restored.inc(max(0, line["bytes_restored"]))
        self._counted = len(self._recorder.recoveries)

    # ---- what is, on the library's thread

    def collect(self) -> Iterator[Metric]:
        """Called for every scrape, and once to learn the names."""
        control = self._control
        yield _one_of("phase", "The job's phase: 1 for the present one.", control.phase.value, [phase.value for phase in Phase])
        yield _gauge("membership_version", "Of the present membership; grows with every halt.", control.version)
        yield _gauge("step", "The newest completed step.", control.newest_step)
        yield _gauge("ranks", "World size.", control.config.grid.world_size)
        committed, durable = control.committed, control.durable_generation
        yield _gauge("committed_generation", "The newest that every holder has.", committed if committed >= 0 else None)
        text = "Completed steps after the committed generation: a loss now may run them again."
        yield _gauge("generation_lag", text, control.generation_lag)
        yield _gauge("durable_generation", "The newest that is whole on disk.", durable if durable >= 0 else None)
        yield from self._nodes()

    def _nodes(self) -> Iterator[Metric]:
        now, agents = self._clock(), list(self._control.agents.values())
        states = {"active": 0, "spare": 0, "starting": 0, "unhealthy": 0}
        ages = GaugeMetricFamily("deadpool_heartbeat_age_seconds", "Since the agent was last heard.", labels=["node"])
        for agent in agents:
            states[agent.state] += 1
            ages.add_metric([agent.node], max(0.0, now - agent.last_heard_s))
        nodes = GaugeMetricFamily("deadpool_nodes", "Nodes that are here; those lost are counted in nodes_lost.", labels=["state"])
        for state, count in states.items():
            nodes.add_metric([state], count)
        yield nodes
        yield ages

    # ---- the endpoint

    def serve(self, address: str, port: int, host: str) -> Log:
        """Listen; the answer is for events.jsonl. A port that is taken costs the numbers, never the job."""
        try:
            labels = {"run": self._control.config.run_id, "part": "coordinator"}
            shown = host if host not in ("0.0.0.0", "::") else socket.gethostname()
            target = self._listen(address, port, self._recorder.run_dir, "coordinator", shown, labels)
        except (UsageError, OSError) as refused:
            return Log("metrics-refused", f"{refused}; the job goes on without the coordinator's", {"address": address, "port": port})
        return Log("metrics", f"the coordinator's are at http://{target}/metrics, read-only", {"target": target})

    def close(self) -> None:
        """Stop serving. Blocks for up to half a second."""
        if (ending := self._end()) is not None:
            ending.join()


def _gauge(name: str, text: str, value: float | None) -> Metric:
    """Without a sample where there is no value yet."""
    family = GaugeMetricFamily(f"deadpool_{name}", text)
    if value is not None:
        family.add_metric([], value)
    return family


def _one_of(name: str, text: str, present: str, all_values: list[str]) -> Metric:
    family = GaugeMetricFamily(f"deadpool_{name}", text, labels=[name])
    for value in all_values:
        family.add_metric([value], float(value == present))
    return family
