"""The shared file system of a simulated job, and what fake agents do with it: agent/durable.py without bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sim_world import Content, Snapshot

from megatron.hotswap.control import messages as m
from megatron.hotswap.recovery.plan import DurableFolder
from megatron.hotswap.snapshot.manifest import Name


@dataclass
class Folder:
    """One attempt at a generation."""

    generation: int
    files: dict[int, Content] = field(default_factory=dict)
    damaged: set[int] = field(default_factory=set)  # ranks whose file has changed since
    whole: bool = False


class Disk:
    """Every node sees the same. `fails`: the chance that a write is refused."""

    def __init__(self) -> None:
        self.folders: dict[str, Folder] = {}
        self.fails = 0.0

    def put(self, generation: int, ranks: int, damaged: set[int]) -> DurableFolder:
        """What an earlier job has left, whole; the files of some ranks have been damaged since."""
        name = str(Name(generation, "before", 1, 1))
        self.folders[name] = Folder(generation, {r: Content(r, generation) for r in range(ranks)}, damaged, True)
        return DurableFolder(name, generation, "before", (("world-size", ranks),))


class DiskUser:
    """The part of a fake agent that writes and reads files."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent
        self.disk: Disk = agent.world.disk
        self._epoch = 0  # what was being written when a halt or a plan came is given up
        self._due: dict[int, m.WriteSnapshots] = {}  # rank -> what is to be written once it is complete

    def cancel(self) -> None:
        """Everyone is halted, or trains on."""
        self._epoch += 1
        self._due.clear()

    def _held(self, rank: int) -> dict[int, Snapshot]:
        """Generation -> a complete snapshot of the rank that is here."""
        own = [s for w in self.agent.workers if w.rank == rank for s in w.own.values()]
        return {s.content.generation: s for s in [*self.agent.replica_snapshots(rank).values(), *own]}

    def take_stock(self, order: m.TakeStock) -> None:
        """Say what could be written from here."""
        held = {rank: tuple(sorted(self._held(rank))) for rank in self.agent.world.everyone}
        self.agent.say(m.Stock(order.version, {rank: generations for rank, generations in held.items() if generations}))

    def write(self, order: m.WriteSnapshots) -> None:
        """Now, or as soon as it is complete."""
        self.cancel()
        for rank in order.ranks:
            held = self._held(rank)
            if order.training and order.generation not in held:
                if max(held, default=-1) > order.generation:
                    self.agent.say(m.WriteFailed(order.attempt, rank, "gone", "training is further"))
                else:
                    self._due[rank] = order
            else:
                self._begin(order, rank)

    def sealed(self, rank: int, generation: int) -> None:
        """An own snapshot is complete."""
        order = self._due.get(rank)
        if order is not None and order.generation == generation:
            del self._due[rank]
            self._begin(order, rank)

    def _begin(self, order: m.WriteSnapshots, rank: int) -> None:
        world = self.agent.world
        epoch, snapshot = self._epoch, self._held(rank).get(order.generation)
        if snapshot is None:
            self.agent.say(m.WriteFailed(order.attempt, rank, "gone", "not here"))
            return

        def written() -> None:
            if self._epoch != epoch:
                return
            if world.disk_rng.random() < self.disk.fails:
                self.agent.say(m.WriteFailed(order.attempt, rank, "medium", "No space left on device"))
            elif snapshot.rotten:
                self.agent.say(m.WriteFailed(order.attempt, rank, "damaged", "checksum"))
            elif not any(s is snapshot for s in self._held(rank).values()):
                self.agent.say(m.WriteFailed(order.attempt, rank, "gone", "overwritten"))
            else:
                folder = self.disk.folders.setdefault(order.folder, Folder(order.generation))
                folder.files[rank] = snapshot.content
                self.agent.say(m.SnapshotWritten(order.attempt, rank, m.DurableFile(5000, rank, "00" * 32)))

        self.agent.node.after(world.disk_rng.choice([0.001, 0.05, 0.5]), written)

    def write_manifest(self, order: m.WriteManifest) -> None:
        """All files are there, so the generation is."""
        world, epoch = self.agent.world, self._epoch

        def written() -> None:
            if self._epoch != epoch:
                return
            if world.disk_rng.random() < self.disk.fails:
                self.agent.say(m.WriteFailed(order.attempt, None, "medium", "No space left on device"))
                return
            folder = self.disk.folders[order.folder]
            folder.whole = True
            world.checkers.on_whole(folder)
            self.agent.say(m.GenerationWhole(order.attempt))

        self.agent.node.after(world.disk_rng.choice([0.001, 0.05]), written)

    def load(self, order: m.Load) -> None:
        """Fill the slots of these ranks from files, checked. What was being read for the order before is given up."""
        self.cancel()
        epoch = self._epoch
        for worker in self.agent.workers:
            worker.rank, worker.own, worker.held = None, {}, {}

        def read() -> None:
            if self._epoch != epoch:
                return
            folder = self.disk.folders[order.folder]
            if folder.damaged & set(order.ranks.values()):
                self.agent.say(m.Loaded(order.version, order.folder, "the file is damaged"))
                return
            for index, rank in order.ranks.items():
                worker = self.agent.workers[index]
                worker.rank, worker.held = rank, {0: folder.generation}
                worker.own = {0: Snapshot(folder.files[rank], order.version)}
                worker.copied, worker.acknowledged = folder.generation, folder.generation - 1
            self.agent.say(m.Loaded(order.version, order.folder))

        if order.ranks:
            self.agent.node.after(self.agent.world.disk_rng.choice([0.01, 0.1, 1.0]), read)
