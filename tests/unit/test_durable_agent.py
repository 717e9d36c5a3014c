"""agent/durable.py on real slots and files: what an agent writes, from where, and what it fills its slots with."""

import asyncio
from unittest import mock

import pytest
from durable_parts import LAYOUT, RUN, fill, write_generation
from test_respawn import start_sleeper

from megatron.hotswap.agent import durable as agent_durable
from megatron.hotswap.agent.durable import Durable
from megatron.hotswap.agent.worker_process import WorkerProcess
from megatron.hotswap.control import messages as m
from megatron.hotswap.errors import UsageError
from megatron.hotswap.replication import envelope
from megatron.hotswap.replication.transfer import ReplicaStore
from megatron.hotswap.snapshot import durable, manifest
from megatron.hotswap.snapshot.layout import HEADER_BYTES, Header, metadata_room_bytes
from megatron.hotswap.snapshot.slots import Word

METADATA, PAYLOAD = 700, 5000
SLOT_BYTES = HEADER_BYTES + metadata_room_bytes(METADATA) + PAYLOAD


class OneAgent:
    """An agent's durable part, its workers' slots and its replicas; `said` is what it told the coordinator."""

    def __init__(self, tmp_path, ranks=(3,)):
        self.said = []
        self.room_bytes = 1 << 30
        with mock.patch.object(WorkerProcess, "start", start_sleeper):
            self.workers = [WorkerProcess(i, ["script.py"], tmp_path / "logs" / str(i), {}, {}) for i in range(len(ranks))]
        for worker, rank in zip(self.workers, ranks, strict=True):
            worker.rank, worker.layout_hash = rank, LAYOUT
            worker.make_slots(SLOT_BYTES)
        self.replicas = ReplicaStore(RUN, lambda wanted: None)
        self.tasks = set()

    def part(self):
        return Durable(RUN, self.workers, self.replicas, self.replicas.generations, self._require_room, self.said.append, self._do)

    def _require_room(self, wanted):
        if wanted > self.room_bytes:
            raise UsageError("no room")

    def _do(self, work):
        self.tasks.add(asyncio.get_running_loop().create_task(work))

    async def settled(self):
        while self.tasks:
            await asyncio.wait(tasks := set(self.tasks))
            for task in tasks:
                task.result()
            self.tasks -= tasks

    def own(self, index, slot, generation):
        """A worker's own snapshot, complete."""
        worker = self.workers[index]
        worker.generations[slot] = generation
        worker.control.set(Word.COPIED, generation + 1)
        return fill(worker.slots, slot, worker.rank, generation, METADATA, PAYLOAD)

    def replica(self, rank, generation):
        header = Header(RUN, rank, generation, LAYOUT, METADATA, PAYLOAD, 0)
        slots, slot = self.replicas.reserve(header, SLOT_BYTES)
        self.replicas.complete(fill(slots, slot, rank, generation, METADATA, PAYLOAD), slot)

    def close(self):
        for worker in self.workers:
            worker.kill()


@pytest.fixture
def agent(tmp_path):
    made = OneAgent(tmp_path)
    yield made
    made.close()


def order(tmp_path, generation, *ranks, training=False, attempt=1):
    folder = str(manifest.Name(generation, RUN, 1, attempt))
    return m.WriteSnapshots(attempt, generation, str(tmp_path / "save/hot-swap"), folder, ranks, training)


def run(agent, *steps):
    async def story():
        part = agent.part()
        for step in steps:
            step(part)
            await agent.settled()

    asyncio.run(story())
    return agent.said


def test_a_generation_written_from_slots_and_replicas_is_read_back_by_the_next_job(agent, tmp_path):
    agent.own(0, 1, 12)
    agent.replica(0, 11)
    agent.replica(0, 12)
    said = run(agent, lambda part: part.take_stock(m.TakeStock(5)), lambda part: part.write(order(tmp_path, 12, 0, 3)))
    assert said[0] == m.Stock(5, {0: (11, 12), 3: (12,)})
    files = {x.rank: x.file for x in said[1:]}
    assert sorted(files) == [0, 3]
    # Two ranks for the manifest's sake: they are those of this agent, counted anew.
    root, folder = tmp_path / "save/hot-swap", str(manifest.Name(12, RUN, 1, 1))
    (root / folder / manifest.file_name(3)).rename(root / folder / manifest.file_name(1))
    shape = {"world-size": 2}
    write = m.WriteManifest(1, 12, str(root), folder, shape, (files[0], files[3]), 2)
    agent.said.clear()
    assert "rank is 3, asked for 1" in run(agent, lambda part: part.write_manifest(write))[0].text
    header = (root / folder / manifest.file_name(1)).read_bytes()
    content = header[HEADER_BYTES:]
    renamed = Header(RUN, 1, 12, LAYOUT, METADATA, PAYLOAD, files[3].crc32c)
    (root / folder / manifest.file_name(1)).write_bytes(renamed.pack() + content)
    agent.said.clear()
    assert run(agent, lambda part: part.write_manifest(write)) == [m.GenerationWhole(1, ())]
    agent.said.clear()
    assert run(agent, lambda part: part.load(m.Load(7, str(root), folder, {0: 1}))) == [m.Loaded(7, folder)]
    worker = agent.workers[0]
    assert (worker.rank, worker.generations, worker.layout_hash) == (1, {0: 12}, LAYOUT)
    assert worker.slots.verify(0).generation == 12
    assert worker.control.get(Word.COPIED) == 13 and worker.control.get(Word.GENERATION_0) == 13


def test_in_training_a_snapshot_is_waited_for_and_taken_when_it_is_complete(agent, tmp_path):
    agent.own(0, 0, 11)

    def wait(part):
        part.write(order(tmp_path, 13, 3, training=True))

    def seal(generation):
        def sealed(part):
            agent.own(0, generation % 2, generation)
            part.sealed(3, generation)

        return sealed

    said = run(agent, wait, seal(12))
    assert said == []
    agent.said.clear()
    said = run(agent, wait, seal(12), seal(13), seal(14))
    assert [(type(x), x.rank) for x in said] == [(m.SnapshotWritten, 3)]
    agent.said.clear()
    assert run(agent, seal(15), wait)[0].why == "gone"  # it comes too late


def test_without_room_for_a_copy_it_is_written_from_the_slot_itself(agent, tmp_path):
    agent.own(0, 1, 13)
    agent.room_bytes = 0
    with mock.patch.object(durable, "copy_of", side_effect=AssertionError("there is no room")):
        said = run(agent, lambda part: part.write(order(tmp_path, 13, 3, training=True)))
    assert isinstance(said[0], m.SnapshotWritten)


def test_a_halt_ends_what_is_waited_for(agent, tmp_path):
    agent.own(0, 0, 11)

    def sealed(part):
        agent.own(0, 1, 13)
        part.sealed(3, 13)

    assert run(agent, lambda part: part.write(order(tmp_path, 13, 3, training=True)), lambda part: part.cancel(), sealed) == []


def test_what_cannot_be_written_is_said_with_its_kind(agent, tmp_path):
    agent.own(0, 1, 12)
    agent.workers[0].slots.view(1)[-1] ^= 1
    wanted = order(tmp_path, 12, 3)
    assert run(agent, lambda part: part.write(wanted))[0].why == "damaged"
    agent.own(0, 1, 12)
    folder = tmp_path / "save/hot-swap" / wanted.folder
    (folder / manifest.file_name(3)).unlink()
    (folder / manifest.file_name(3)).symlink_to("/dev/full")
    agent.said.clear()
    failed = run(agent, lambda part: part.write(wanted))[0]
    assert failed.why == "medium" and "No space left on device; make room there" in failed.text
    agent.said.clear()
    assert run(agent, lambda part: part.write(order(tmp_path, 11, 3)))[0].why == "gone"
    (tmp_path / "save").rename(tmp_path / "moved")
    (tmp_path / "save").write_text("not a folder")
    agent.said.clear()
    assert run(agent, lambda part: part.write(wanted))[0].why == "medium"


def test_a_file_system_that_does_not_answer_is_said_and_does_not_hold_the_agent(agent, tmp_path):
    agent.own(0, 1, 12)
    import threading

    answers = threading.Event()
    try:
        with mock.patch.object(agent_durable, "STALLED_S", 0.2), mock.patch.object(durable.os, "fsync", lambda fd: answers.wait(60)):
            failed = run(agent, lambda part: part.write(order(tmp_path, 12, 3)))[0]
    finally:
        answers.set()
    assert failed.why == "medium" and "the file system does not answer" in failed.text


def test_a_rank_whose_payload_a_peer_has_is_put_together(tmp_path):
    """Without a distributed optimizer a replica is an envelope: metadata from it, payload from the peer's own slot."""
    agent = OneAgent(tmp_path, ranks=(1,))
    try:
        agent.own(0, 0, 12)
        peer = agent.workers[0].slots
        metadata = bytes(METADATA)
        payload = peer.view(0)[-PAYLOAD:]
        whole = peer.view(1)  # only to have its checksum computed
        whole[HEADER_BYTES : HEADER_BYTES + METADATA] = metadata
        whole[-PAYLOAD:] = payload
        inner = Header(RUN, 0, 12, LAYOUT, METADATA, PAYLOAD, peer.checksum(1, METADATA, PAYLOAD))
        raw = envelope.pack(inner, metadata, (0, 1))
        slots, slot = agent.replicas.reserve(Header(RUN, 0, 12, LAYOUT, len(raw), 0, 0), HEADER_BYTES + 8192)
        slots.view(slot)[HEADER_BYTES : HEADER_BYTES + len(raw)] = raw
        agent.replicas.complete(Header(RUN, 0, 12, LAYOUT, len(raw), 0, slots.checksum(slot, len(raw), 0)), slot)
        said = run(agent, lambda part: part.write(order(tmp_path, 12, 0)))
        assert said == [m.SnapshotWritten(1, 0, m.DurableFile(HEADER_BYTES + METADATA + PAYLOAD, inner.crc32c, LAYOUT.hex()))]
        written = (tmp_path / "save/hot-swap" / manifest.Name(12, RUN, 1, 1).__str__() / manifest.file_name(0)).read_bytes()
        assert written == inner.pack() + metadata + bytes(payload)
    finally:
        agent.close()


def test_a_node_that_does_not_see_the_generation_says_so_and_a_damaged_one_is_named(agent, tmp_path):
    folder = write_generation(tmp_path, 40)
    load = m.Load(1, str(tmp_path), folder, {0: 1})
    (unseen,) = run(agent, lambda part: part.load(m.Load(1, str(tmp_path / "elsewhere"), folder, {0: 1})))
    assert unseen.unseen and "is not there" in unseen.refusal
    path = tmp_path / folder / manifest.file_name(1)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    agent.said.clear()
    (damaged,) = run(agent, lambda part: part.load(load))
    assert not damaged.unseen and "the file is damaged" in damaged.refusal
    assert agent.workers[0].rank is None and agent.workers[0].generations == {}
    agent.said.clear()
    agent.room_bytes, agent.workers[0].slots = 10, None
    (refused,) = run(agent, lambda part: part.load(load))
    assert "no room" in refused.refusal


def test_only_the_last_of_two_orders_to_load_counts(agent, tmp_path):
    """The job gathers again while files are being read: what was read for the order before must not lie in the slots."""
    first, second = write_generation(tmp_path, 40), write_generation(tmp_path, 30)

    def both(part):
        part.load(m.Load(1, str(tmp_path), first, {0: 1}))
        part.load(m.Load(2, str(tmp_path), second, {0: 0}))

    assert run(agent, both) == [m.Loaded(2, second)]
    assert (agent.workers[0].rank, agent.workers[0].generations) == (0, {0: 30})
    assert agent.workers[0].slots.verify(0).rank == 0
