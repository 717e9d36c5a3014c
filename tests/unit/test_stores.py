"""Where decisions are recorded: what a coordinator leaves there, the next one finds; and nobody hears of what is not there."""

import asyncio
import os
import socket
import threading
import time

import msgspec
import pytest
from etcd_server import EtcdServer
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.hotswap.control import messages as m
from megatron.hotswap.control.config import ControlConfig
from megatron.hotswap.control.decided import Decided, encode
from megatron.hotswap.control.state import Control, Log, Send
from megatron.hotswap.coordinator import etcd, store
from megatron.hotswap.coordinator.etcd import EtcdStore
from megatron.hotswap.coordinator.records_first import InOrder, RecordsFirst
from megatron.hotswap.coordinator.store import Journal, newest
from megatron.hotswap.coordinator.stores import finder, open_store
from megatron.hotswap.errors import Deposed, UsageError
from megatron.hotswap.topology.grid import Grid

pytestmark = pytest.mark.timeout(240)
FIRST = Decided("run", 1, m.Membership(1, (m.Member("n", "n-1", 0, "h:1"),), ((0,),)), True, fenced={"x": "silent"})
SECOND = msgspec.structs.replace(FIRST, version=2, newest_step=40)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as serving:
        yield serving


@pytest.fixture(params=["journal", "etcd"])
def opened(request, tmp_path):
    """A function that opens the same job's store once more; all are closed at the end."""
    name = "journal" if request.param == "journal" else request.getfixturevalue("server").name
    stores = []

    def open_again():
        stores.append(open_store(name, tmp_path, f"run-{tmp_path.name}" if name != "journal" else "run"))
        return stores[-1]

    yield open_again
    for each in stores:
        each.close()


def test_the_next_coordinator_finds_what_the_last_one_recorded(opened):
    one = opened()
    assert one.lead() is None and one.lost == ""
    for decided in (FIRST, SECOND):
        one.save(decided)
    one.close()
    assert opened().lead() == SECOND


def test_what_was_recorded_survives_a_coordinator_that_was_killed(opened, tmp_path):
    child = os.fork()
    if child == 0:
        one = opened()
        one.lead()
        one.save(FIRST)
        os._exit(0)
    os.waitpid(child, 0)
    begun = time.monotonic()
    assert opened().lead() == FIRST
    assert time.monotonic() - begun < 10 * etcd.LEASE_S  # the dead leader's lease, with generous room


# ---- the journal


def test_a_second_coordinator_of_a_journal_is_refused(tmp_path):
    one = Journal(tmp_path, "run")
    one.lead()
    with pytest.raises(UsageError, match="in use: a coordinator of this job runs already"):
        Journal(tmp_path, "run").lead()
    one.close()


def test_the_journal_of_another_job_is_refused(tmp_path):
    one = Journal(tmp_path, "run")
    one.lead()
    one.save(FIRST)
    one.close()
    with pytest.raises(UsageError, match="the journal of run run, and this is run other"):
        Journal(tmp_path, "other").lead()


def test_the_journal_of_another_version_is_refused(tmp_path):
    one = Journal(tmp_path, "run")
    one.lead()
    one.save(msgspec.structs.replace(FIRST, schema=99))
    one.close()
    with pytest.raises(UsageError, match="written in schema 99, and this version reads 4"):
        Journal(tmp_path, "run").lead()


def test_a_journal_that_has_grown_begins_again_with_its_newest_record(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_JOURNAL_BYTES_MAX", 4 * len(encode(FIRST)))
    one = Journal(tmp_path, "run")
    one.lead()
    for step in range(100):
        one.save(msgspec.structs.replace(FIRST, newest_step=step))
    assert one.path.stat().st_size < 6 * len(encode(FIRST))
    with pytest.raises(UsageError, match="in use"):  # the new file is locked, too
        Journal(tmp_path, "run").lead()
    one.close()
    found = Journal(tmp_path, "run")
    assert found.lead().newest_step == 99
    found.close()


@settings(max_examples=200, deadline=None)
@given(
    cut=st.integers(0, 2000),
    changed=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=3),
    more=st.binary(max_size=40),
)
def test_of_a_damaged_journal_the_whole_records_before_the_damage_count(tmp_path_factory, cut, changed, more):
    folder = tmp_path_factory.getbasetemp() / "damaged"
    folder.mkdir(exist_ok=True)
    path = folder / store.JOURNAL_FILE
    path.unlink(missing_ok=True)
    one = Journal(folder, "run")
    one.lead()
    ends = [0]
    for step in range(4):
        one.save(msgspec.structs.replace(FIRST, newest_step=step))
        ends.append(path.stat().st_size)
    one.close()
    raw = bytearray(path.read_bytes())
    for at, value in changed:
        if at < len(raw):
            raw[at] = value
    intact = next((i for i, (old, new) in enumerate(zip(path.read_bytes(), raw, strict=True)) if old != new), len(raw))
    path.write_bytes(bytes(raw[:cut]) + more)
    whole = max(i for i, end in enumerate(ends) if end <= min(cut, intact))
    found, end = newest(path)
    if end == ends[whole]:  # else damage beyond it was bytes of a record by chance: the same ones
        assert (found.newest_step if found is not None else -1) == whole - 1
    assert end >= ends[whole] or whole == 0
    again = Journal(folder, "run")
    again.lead()
    again.save(SECOND)
    again.close()
    assert newest(path)[0] == SECOND


# ---- etcd


def test_a_leader_that_is_cut_off_records_nothing_and_another_one_leads(server):
    one, two = EtcdStore(server.name, "cut-off"), EtcdStore(server.name, "cut-off")
    one.lead()
    one.save(FIRST)
    one._over.set()  # its lease is not renewed any more
    one.announce("a:1")
    found = []
    waiting = threading.Thread(target=lambda: found.append(two.lead()))
    waiting.start()
    time.sleep(1.0)
    assert not found and one.lost == ""
    waiting.join(60)
    assert found == [FIRST]
    assert one.lost != ""  # before etcd let the other one lead
    with pytest.raises(Deposed, match="another coordinator may lead"):
        one.save(SECOND)
    ask = finder(server.name, None, "cut-off")
    assert ask() is None  # the dead one's address went with it
    two.announce("b:2")
    assert ask() == "b:2"
    two.close()


def test_a_record_that_lands_late_does_not_overwrite_a_newer_one(server):
    """etcd did not answer in time, so the coordinator has recorded again, something newer; the first request arrives after that, or had
    arrived and only its answer was lost."""
    one = EtcdStore(server.name, "late")
    assert one.lead() is None
    client, sent = one._clients[0], []
    transaction = client.transaction

    def times_out(asked):
        sent.append(asked)
        raise OSError("timed out")

    def is_not_heard(asked):
        transaction(asked)
        times_out(asked)

    for broken in (times_out, is_not_heard):
        client.transaction = broken
        with pytest.raises(OSError, match="timed out"):
            one.save(FIRST)
        client.transaction = transaction
        one.save(SECOND)
        assert not transaction(sent.pop()).get("succeeded")
    one.save(msgspec.structs.replace(SECOND, version=3))
    one.close()
    two = EtcdStore(server.name, "late")
    found = two.lead()
    assert found is not None and found.version == 3
    two.close()


def test_who_stood_by_hears_that_the_job_is_over(server):
    one, two = EtcdStore(server.name, "over"), EtcdStore(server.name, "over")
    one.lead()
    one.save(msgspec.structs.replace(FIRST, exit_code=0, exit_reason="training is done"))
    one.close()
    assert two.lead().exit_code == 0
    two.close()


def test_an_etcd_that_restarts_is_waited_for(tmp_path):
    serving = EtcdServer(tmp_path)
    one = EtcdStore(serving.name, "restarts")
    found = []
    waiting = threading.Thread(target=lambda: found.append(one.lead()))
    waiting.start()
    time.sleep(1.0)
    assert not found
    serving.start()
    try:
        waiting.join(60)
        assert found == [None]
        one.save(FIRST)
        serving.stop()
        with pytest.raises(OSError, match="does not answer"):
            one.save(SECOND)
        time.sleep(etcd.LEASE_S + 1)
        assert "has not reached etcd" in one.lost
        serving.start()
        two = EtcdStore(serving.name, "restarts")
        assert two.lead() == FIRST
        two.close()
        one.close()
    finally:
        serving.stop()


def test_an_endpoint_that_is_down_does_not_matter_while_another_answers(server):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        one = EtcdStore(f"etcd://127.0.0.1:{taken.getsockname()[1]},127.0.0.1:{server.port}", "two-endpoints")
        assert one.lead() is None
        one.save(FIRST)
        one.close()


def test_waiting_to_lead_ends_when_the_store_is_closed(server):
    one, two = EtcdStore(server.name, "closed"), EtcdStore(server.name, "closed")
    one.lead()
    waiting = threading.Thread(target=two.lead)
    waiting.start()
    two.close()
    waiting.join(60)
    assert not waiting.is_alive()
    one.close()


@pytest.mark.parametrize("name", ["etcd://", "etcd://host", "etcd://host:0", "etcd://a:1,b", "redis://a:1", "Journal", "etcd://a:70000"])
def test_a_store_that_is_none_is_refused(tmp_path, name):
    with pytest.raises(UsageError, match="--hot-swap-store"):
        open_store(name, tmp_path, "run")


# ---- recorded first


class SlowStore(store.Store):
    """Records when it is told to."""

    def __init__(self):
        self.saved, self.failures = [], []
        self.may = threading.Event()

    def lead(self):
        return None

    def announce(self, address):
        pass

    def save(self, decided):
        assert self.may.wait(60)
        if self.failures:
            raise self.failures.pop()
        self.saved.append(decided)

    def close(self):
        pass


def recording(story):
    async def play():
        control = Control(ControlConfig("run", "t", Grid(2), 2, 0))
        slow, told, deposed = SlowStore(), [], []
        first = RecordsFirst(control, slow, lambda decisions: told.extend(d.reason for d in decisions), deposed.append)
        await story(control, slow, told, deposed, lambda text: first.take([Log("k", text, {})]), first)

    asyncio.run(play())


def test_nothing_is_told_before_it_is_recorded_and_nothing_overtakes():
    async def story(control, slow, told, deposed, take, first):
        take("a")
        assert told == ["a"]  # nothing was decided
        control.revision += 1
        take("b")
        take("c")  # decides nothing, and still waits for its turn
        await asyncio.sleep(0.2)
        assert told == ["a"]
        slow.may.set()
        await first.settle()
        assert told == ["a", "b", "c"] and len(slow.saved) == 1

    recording(story)


def test_an_answer_that_says_nothing_decided_does_not_wait():
    """Else every agent takes a coordinator whose disk hangs for lost."""

    async def story(control, slow, told, deposed, take, first):
        carried = []
        order = InOrder(control, carried.append)
        control.revision += 1
        alive, halt = Send("a", m.Alive()), Send("a", m.Halt(1, "over"))
        assert order.take([alive, halt]) and carried == [[alive]] and order.waiting
        control.deadline_s = 10.0
        order.recorded(order.due(), took_s=5.0)
        assert carried == [[alive], [halt]] and not order.waiting and control.deadline_s == 15.0  # for who was told so late

    recording(story)


def test_what_is_decided_while_another_thing_is_recorded_is_recorded_next():
    async def story(control, slow, told, deposed, take, first):
        control.revision += 1
        take("a")
        await asyncio.sleep(0.2)  # it is being recorded
        control.revision += 1
        take("b")
        slow.may.set()
        await first.settle()
        assert told == ["a", "b"] and len(slow.saved) == 2

    recording(story)


def test_a_store_that_fails_is_tried_again_and_the_decision_waits(capsys):
    async def story(control, slow, told, deposed, take, first):
        slow.failures = [OSError("no space left")]
        slow.may.set()
        control.revision += 1
        take("a")
        await first.settle()
        assert told == ["a"] and "a decision cannot be recorded, and waits: no space left" in capsys.readouterr().err

    recording(story)


def test_a_deposed_coordinator_tells_nothing_more():
    async def story(control, slow, told, deposed, take, first):
        slow.failures = [Deposed("another one leads")]
        slow.may.set()
        control.revision += 1
        take("a")
        await first.settle()
        assert told == [] and deposed == ["another one leads"]

    recording(story)
