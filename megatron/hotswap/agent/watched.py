"""Whether an agent is watched: where --hot-swap-metrics-port is not given, nothing is counted and no library is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..config import HotSwapConfig
from ..control import messages as m
from ..environment import AgentEnvironment
from ..replication.transfer import ReplicaStore
from .replicator import Replicator
from .worker_process import WorkerProcess

if TYPE_CHECKING:
    from .metrics import Metrics


class Watched:
    """One per agent; it is told what the agent says. The arguments are the agent's own."""

    def __init__(self, config: HotSwapConfig, place: AgentEnvironment, incarnation: str, host: str) -> None:
        self._config, self._place, self._incarnation, self._host = config, place, incarnation, host
        self._metrics: Metrics | None = None

    async def serve(
        self, workers: Sequence[WorkerProcess], replicas: ReplicaStore, replicator: Replicator, heard_s: Callable[[], float]
    ) -> m.Note | None:
        """Begin, if it is asked for; the answer says where, or why not."""
        if not self._config.metrics_port:
            return None
        from .metrics import Metrics

        self._metrics = metrics = Metrics(workers, replicas, heard_s, asyncio.get_running_loop().time)
        replicator.on_moved = metrics.moved
        labels = {"run": self._place.run_id, "part": "agent", "node": self._place.node}
        where = (self._config.metrics_address, self._config.run_dir, self._incarnation, self._host, labels)
        return await asyncio.get_running_loop().run_in_executor(None, metrics.serve, *where)

    def said(self, message: m.FromAgent) -> None:
        """The agent tells the coordinator this."""
        if self._metrics is not None:
            self._metrics.said(message)

    def close(self) -> None:
        """The agent ends."""
        if self._metrics is not None:
            self._metrics.close()
