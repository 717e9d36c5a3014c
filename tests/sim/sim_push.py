"""One H2H transfer in the simulator."""

from __future__ import annotations

from typing import Any

from sim_world import RUN_ID, Snapshot

from megatron.hotswap.errors import HotSwapError
from megatron.hotswap.snapshot.layout import Header

SLOT_BYTES = 8192
PUSH_RETRY_S = 0.1


class Push:
    """One transfer of a snapshot to its holder: announce, body, answer. Each stage may find either side changed or gone."""

    def __init__(self, agent: Any, holder: Any, worker: Any, generation: int, snapshot: Snapshot) -> None:
        assert worker.rank is not None
        self.agent, self.holder, self.worker, self.generation, self.snapshot = agent, holder, worker, generation, snapshot
        self.epoch = agent.epoch_of(worker)
        self.keep = worker.keep
        self.version = agent.version
        self.clock = agent.world.clock
        self.header = Header(RUN_ID, worker.rank, generation, bytes(32), 0, 1, 0)
        self.slot: int | None = None
        self.known = False  # the holder has this very snapshot: its bytes are read and dropped

    def begin(self) -> None:
        """The header is on its way."""
        self.agent.to_peer(self.holder, self.holder.node.after, self.clock.about(0.001), self._reserve)

    def _reserve(self) -> None:
        if self.holder.ended or self._refused():
            return
        try:
            self.known = self.agent.world.holders_look and self.holder.holds(self.header)
            if not self.known:
                before = self.holder.replica_snapshots(self.header.rank)
                _, self.slot = self.holder.replicas.reserve(self.header, SLOT_BYTES, keep=self.keep)
                self.agent.world.checkers.on_reserve(self.agent, self.holder, self.header, before.get(self.slot))
        except HotSwapError:
            self._again()
            return
        self.agent.node.after(self.clock.about(self.agent.world.h2h_s), self._sent)

    def _refused(self) -> bool:
        if self.holder.accepts(self.version):
            return False
        self._again()
        return True

    def _sent(self) -> None:
        """The sender has handed over the last byte, unless it was halted before (half the time it was done already)."""
        if self.cancelled and self.clock.rng.random() < 0.5:
            return
        whole = self.worker.snapshot_of(self.generation) is self.snapshot
        self.agent.to_peer(self.holder, self.holder.node.after, self.clock.about(0.001), self._arrived, whole)

    def _arrived(self, whole: bool) -> None:
        if self.holder.ended or self._refused():
            return
        if not whole:  # the slot changed under the transfer: the checksum does not match
            self._again()
            return
        if self.known:
            self.agent.to_peer(self.holder, self.agent.node.after, self.clock.about(0.001), self._okay)
            return
        try:
            assert self.slot is not None
            slots = self.holder.replicas._slots[self.header.rank]
            self.holder.replicas.complete(self.header, self.slot)
            slots.snapshots[self.slot] = Snapshot(self.snapshot.content, self.version)
        except (HotSwapError, KeyError):
            self._again()
            return
        self.agent.to_peer(self.holder, self.agent.node.after, self.clock.about(0.001), self._okay)

    def _okay(self) -> None:
        if not self.cancelled:
            self.agent.pushed(self.worker, self.generation, self.holder)

    def _again(self) -> None:
        self.agent.node.after(PUSH_RETRY_S, self._retry)

    def _retry(self) -> None:
        if not self.cancelled:
            self.begin()

    @property
    def cancelled(self) -> bool:
        """Whether the sender has given it up."""
        return bool(self.agent.epoch_of(self.worker) != self.epoch)
