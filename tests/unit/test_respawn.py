"""A worker that dies and is started again, at its agent: what of its slots counts, and what must not happen in between."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest

from megatron.hotswap.agent import own_snapshot
from megatron.hotswap.agent.lives import Lives
from megatron.hotswap.agent.local import FromWorker, Link, pair
from megatron.hotswap.agent.worker_process import WorkerProcess
from megatron.hotswap.control import messages as m
from megatron.hotswap.processes import adopt_orphans
from megatron.hotswap.snapshot.layout import HEADER_BYTES, Header
from megatron.hotswap.snapshot.slots import Word

RUN, LAYOUT = "run-1", bytes(32)
SLOT_BYTES = HEADER_BYTES + 8192


def start_sleeper(self):
    """In place of a training script: a process that does nothing, at the other end of a real link."""
    self.given = self.said_goodbye = False
    ours, theirs = pair()
    self.link = Link(ours, FromWorker)
    self.process = subprocess.Popen(["sleep", "60"], pass_fds=(theirs.fileno(),))
    theirs.close()


@pytest.fixture
def worker(tmp_path):
    with mock.patch.object(WorkerProcess, "start", start_sleeper):
        made = WorkerProcess(0, ["script.py"], tmp_path / "worker.log", {}, {})
        made.rank, made.layout_hash = 3, LAYOUT
        made.make_slots(SLOT_BYTES)
        yield made
        made.kill()


def begin(worker, slot, generation, said=True):
    """The worker begins a copy: the word first, then the slot changes, and last its agent hears of it."""
    worker.control.set(Word.GENERATION_0 + slot, generation + 1)
    worker.slots.invalidate(slot)
    if said:
        worker.generations[slot] = generation


def end(worker, slot, generation, sealed=True):
    """The copy is complete; the agent writes the header."""
    worker.control.set(Word.COPIED, generation + 1)
    if sealed:
        payload = SLOT_BYTES - HEADER_BYTES
        crc = worker.slots.checksum(slot, 0, payload)
        worker.slots.write_header(slot, Header(RUN, 3, generation, LAYOUT, 0, payload, crc))


def left(worker):
    worker.take_stock()
    return own_snapshot.complete(worker, RUN)


def test_what_was_complete_is_still_there_when_its_process_is_gone(worker):
    for generation in (6, 7):
        begin(worker, generation % 2, generation)
        end(worker, generation % 2, generation)
    assert left(worker) == (6, 7)
    assert worker.generations == {0: 6, 1: 7}


@pytest.mark.parametrize("said", [True, False])
def test_a_copy_that_its_process_died_over_does_not_count_nor_does_what_was_there_before(worker, said):
    """Guarantee 2. The agent may not have heard that the copy had begun, and take the slot for generation 6 still."""
    for generation in (6, 7):
        begin(worker, generation % 2, generation)
        end(worker, generation % 2, generation)
    begin(worker, 0, 8, said)
    assert worker.generations[0] == (8 if said else 6)
    assert left(worker) == (7,)
    assert worker.generations == {1: 7}


def test_a_copy_that_was_only_about_to_begin_counts_its_slot_out(worker):
    begin(worker, 0, 6)
    end(worker, 0, 6)
    worker.control.set(Word.GENERATION_0, 9)  # died before it could touch the header, which is still that of 6
    assert left(worker) == ()


def test_what_it_was_at_is_over(worker):
    """Else the next process would be taken for one that saves a checkpoint, and be waited for in vain if it is stuck."""
    worker.control.set(Word.PHASE, m.Progress.number("save"))
    left(worker)
    assert worker.control.get(Word.PHASE) == 0


def test_a_complete_copy_without_its_header_is_not_restored_from(worker):
    """Its header would have been written by the agent, had it known of it."""
    begin(worker, 0, 6, said=False)
    end(worker, 0, 6, sealed=False)
    assert left(worker) == ()
    assert worker.generations == {0: 6}


def test_what_the_job_went_back_behind_is_no_generation_any_more(worker):
    for generation in (6, 7):
        begin(worker, generation % 2, generation)
        end(worker, generation % 2, generation)
    worker.empty(1)
    worker.control.set(Word.COPIED, 7)
    assert left(worker) == (6,)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL, None])
def test_one_process_has_ended_before_the_next_begins_and_its_end_is_no_loss(worker, how):
    """Stopped, dead already, or alive but stuck."""
    first, settled, lost = worker.process, [], []

    async def settle(w):
        settled.append((w.process is first, first.poll() is not None))

    async def test():
        lives = Lives(lambda w, message: None, lambda w, evidence: lost.append(evidence), lambda: 60.0)
        lives.add(worker)
        if how is not None:
            first.send_signal(how)
        worker.given = True
        if how is signal.SIGKILL:
            while not lost:
                await asyncio.sleep(0.01)
        await lives.start_again(worker, settle)
        await asyncio.sleep(0.1)
        lives.tell(worker, m.Stop(0, "reads"))
        lives.close()

    asyncio.run(asyncio.wait_for(test(), 30))
    assert settled == [(True, True)]
    assert worker.process is not first and not worker.given
    assert lost == (["killed by SIGKILL"] if how is signal.SIGKILL else [])


_STUCK = """
import sys, time
from megatron.hotswap.processes import write_stacks_when_asked
write_stacks_when_asked()
def waits_for_ever():
    print("ready", flush=True)
    time.sleep(60)
waits_for_ever()
"""


def test_who_is_started_again_because_it_was_stuck_has_said_where(tmp_path, monkeypatch):
    def start(self):
        self.given = self.said_goodbye = False
        ours, theirs = pair()
        self.link = Link(ours, FromWorker)
        with open(tmp_path / "log", "ab") as log:
            command = [sys.executable, "-c", _STUCK]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, pass_fds=(theirs.fileno(),))
        self.process.stdout.readline()
        theirs.close()

    monkeypatch.setattr(WorkerProcess, "start", start)

    async def test(stuck):
        lives = Lives(lambda w, message: None, lambda w, evidence: None, lambda: 60.0)
        lives.add(WorkerProcess(0, ["script.py"], tmp_path / "log", {}, {}))
        await lives.start_again(lives.workers[0], mock.AsyncMock(), stuck)
        lives.close()

    asyncio.run(asyncio.wait_for(test(stuck=False), 30))
    assert (tmp_path / "log").read_text() == ""
    asyncio.run(asyncio.wait_for(test(stuck=True), 30))
    assert "in waits_for_ever" in (tmp_path / "log").read_text()


def start_parent(self):
    """As start_sleeper, but it has forked, as trainers do for their data: its child holds the link open."""
    self.given = self.said_goodbye = False
    ours, theirs = pair()
    self.link = Link(ours, FromWorker)
    self.process = subprocess.Popen(
        ["sh", "-c", "sleep 61 & echo $!; exec sleep 60"],
        pass_fds=(theirs.fileno(),),
        env={**os.environ, "DEADPOOL_WORKER": str(self.index)},
        stdout=subprocess.PIPE,
    )
    self.child = int(self.process.stdout.readline())
    theirs.close()


@pytest.mark.parametrize("told_by_the_kernel", [True, False])
def test_a_death_is_seen_at_once_although_a_child_holds_the_link_and_the_child_ends_too(tmp_path, monkeypatch, told_by_the_kernel):
    if not told_by_the_kernel:  # before Linux 5.3
        monkeypatch.setattr(os, "pidfd_open", mock.Mock(side_effect=OSError))
    monkeypatch.setattr(WorkerProcess, "start", start_parent)
    lost = []

    async def test():
        lives = Lives(lambda w, message: None, lambda w, evidence: lost.append((evidence, time.monotonic())), lambda: 60.0)
        watching = asyncio.get_running_loop().create_task(lives.watch())
        worker, neighbour = (WorkerProcess(index, ["script.py"], tmp_path / "log", {}, {}) for index in (0, 1))
        lives.add(worker)
        lives.add(neighbour)
        child = worker.child
        killed_s = time.monotonic()
        worker.process.kill()
        while not lost:
            await asyncio.sleep(0.01)
        took_s = lost[0][1] - killed_s
        await lives.start_again(worker, mock.AsyncMock())
        assert not os.path.exists(f"/proc/{child}"), "its child has outlived it"
        assert os.path.exists(f"/proc/{neighbour.child}"), "its neighbour's has not"
        watching.cancel()
        lives.close()
        assert not os.path.exists(f"/proc/{worker.child}") and not os.path.exists(f"/proc/{neighbour.child}")
        return took_s

    adopt_orphans()
    try:
        took_s = asyncio.run(asyncio.wait_for(test(), 30))
    finally:
        ctypes.CDLL(None).prctl(36, 0)
    assert [evidence for evidence, _ in lost] == ["killed by SIGKILL"]
    assert took_s < (0.2 if told_by_the_kernel else 2.0)
