"""Noise, and valid things with a byte changed, at every reader of messages and files: the named error or a value, nothing else.

No crash, no hang (each test has a deadline), no memory beyond what the bytes themselves justify. Control messages have more in
test_messages.py, the H2H listener its own file, test_fuzz_h2h.py.
"""

import array
import asyncio
import contextlib
import json
import os
import socket
import sys
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_messages import FROM_AGENT, structs

from megatron.hotswap.agent import inject, local
from megatron.hotswap.agent.lives import Lives
from megatron.hotswap.agent.worker_process import WorkerProcess
from megatron.hotswap.cli import picture, verify
from megatron.hotswap.cli.log_tail import LogTail
from megatron.hotswap.codec import decoder
from megatron.hotswap.control import messages as m
from megatron.hotswap.control.config import ControlConfig
from megatron.hotswap.control.sanity import nonsense
from megatron.hotswap.control.state import Control, Phase
from megatron.hotswap.coordinator import wire
from megatron.hotswap.coordinator.job_file import Command, Job, read_command, running_job, write_command
from megatron.hotswap.errors import Malformed, PeerFault, SnapshotMismatch, UsageError
from megatron.hotswap.replication import envelope, link, pmi, side, side_loop
from megatron.hotswap.replication.tcp_stream import Offer, sealed
from megatron.hotswap.snapshot import layout
from megatron.hotswap.snapshot.layout import HEADER_BYTES, Header
from megatron.hotswap.topology.grid import Grid

pytestmark = pytest.mark.timeout(120)
FAST = settings(max_examples=150, deadline=None)
#: What a value may take, against the bytes it was read from: an empty tuple's place is 8 bytes where msgpack has one.
GROWTH_MAX = 100

VALID_HEADER = Header("run-1", 3, 7, bytes(32), 1000, 1 << 20, 12345)
VALID_OFFER = Offer(VALID_HEADER, 1, -1, 1 << 21, 1 << 20, 4, True, bytes(16))


@st.composite
def damaged(draw, raw):
    """The bytes, with some of them changed, cut off, or repeated."""
    data = bytearray(raw)
    for _ in range(draw(st.integers(0, 4))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    cut = draw(st.integers(0, len(data)))
    return bytes(draw(st.sampled_from([data, data[:cut], data + data[:cut]])))


# ---- messages


READERS = {
    "agent": (wire.decode_from_agent, m.Join(m.PROTOCOL, "r", "t", "n", "n-1", 2, "n:1")),
    "coordinator": (wire.decode_from_coordinator, m.Resume(m.Membership(1, (m.Member("n", "i", 0, "h:1"),), ((0,),)), 3, "s", {}, False)),
    "command": (wire.decode_command, wire.Command(m.Injection("kill", "node", "n"))),
    "status": (wire.decode_status, wire.Status(True, "text", nodes={"n": [1, 2]})),
    "worker": (decoder(local.FromWorker), local.NeedSlots(bytes(32), 1000, 1 << 20, (1, 2))),
    "to worker": (decoder(local.FromAgent), local.Plan(2, 7, "s", False, 0, None, (1,))),
    "link": (link._decode, link.Push(VALID_HEADER.pack()[:100], True, 1, -1, 1 << 20, 1 << 20)),
    "side": (side._decode, side.Offered(3, b"ticket")),
    "to side": (decoder(side.FromAgent), side.Take(0, 1, 2, 3, b"ticket")),
    "pmi": (pmi._decode_put, {"key": "value"}),
}


@pytest.mark.parametrize("name", READERS)
def test_a_message_is_read_or_refused(name):
    read, message = READERS[name]
    raw = msgspec.msgpack.encode(message)
    assert read(raw) == message

    @FAST
    @given(st.one_of(damaged(raw), st.binary(max_size=300)))
    def check(noise):
        with contextlib.suppress(Malformed):
            read(noise)

    check()


BOMBS = {
    "announced array": b"\xdd\xff\xff\xff\xff",
    "announced map": b"\xdf\xff\xff\xff\xff",
    "announced bytes": b"\xc6\xff\xff\xff\xff",
    "announced text": b"\xdb\xff\xff\xff\xff",
    "nested arrays": b"\x91" * (1 << 20),
    "nested maps": b"\x81\xa1a" * (1 << 20),
    "nested in a field": b"\x82\xa4type\xa9Heartbeat\xa1x" + b"\x91" * (1 << 20),
    "many numbers": b"\x83\xa4type\xadReplicaReport\xa7version\x01\xa8replicas\x81\x00\xdd\x00\x10\x00\x00" + bytes(1 << 20),
    "many texts": b"\x82\xa4type\xa9Heartbeat\xa1x\xdd\x00\x10\x00\x00" + b"\xa0" * (1 << 20),
    "many maps": b"\x82\xa4type\xa9Heartbeat\xa1x\xdd\x00\x10\x00\x00" + b"\x80" * (1 << 20),
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("name", READERS)
def test_no_message_takes_more_memory_than_its_bytes_justify(name, bomb):
    read, raw = READERS[name][0], BOMBS[bomb]
    tracemalloc.start()
    try:
        with contextlib.suppress(Malformed):
            read(raw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000 + GROWTH_MAX * len(raw)


@FAST
@given(st.one_of(damaged(envelope.pack(VALID_HEADER, b"metadata", (1, 2))), st.binary(max_size=300)))
def test_an_envelope_is_read_or_refused(noise):
    with contextlib.suppress(SnapshotMismatch):
        _ = envelope.unpack(noise).inner


def test_the_side_processes_reader_is_the_one_tested_here():
    assert side_loop.FromAgent is side.FromAgent


# ---- frames and headers


@FAST
@given(st.one_of(damaged(VALID_HEADER.pack()), st.binary(max_size=300)))
def test_a_header_is_read_or_refused(noise):
    with contextlib.suppress(SnapshotMismatch):
        assert isinstance(Header.unpack(noise), Header)


@FAST
@given(damaged(VALID_HEADER.pack()[: layout._HEADER.size]))
def test_a_header_whose_own_checksum_is_right_is_read_or_refused(body):
    """What somebody has written on purpose: texts that are no UTF-8, numbers at their ends."""
    raw = body + layout._HEADER_CHECK.pack(layout._fold(body))
    with contextlib.suppress(SnapshotMismatch):
        header = Header.unpack(raw + bytes(max(0, HEADER_BYTES - len(raw))))
        assert header.pack()


@FAST
@given(damaged(VALID_OFFER.pack()), damaged(VALID_OFFER.pack()[HEADER_BYTES:-4]))
def test_an_offer_is_read_or_refused(noise, rest):
    with contextlib.suppress(SnapshotMismatch):
        Offer.unpack(noise)
    with contextlib.suppress(SnapshotMismatch):
        if len(rest) == len(VALID_OFFER.pack()[HEADER_BYTES:-4]):  # the listener reads a fixed length
            Offer.unpack(sealed(VALID_HEADER.pack() + rest)).require_sane()


# ---- worker and agent


@FAST
@given(st.one_of(damaged(msgspec.msgpack.encode(READERS["worker"][1])), st.binary(min_size=1, max_size=300)), st.integers(0, 6))
def test_noise_from_a_worker_is_refused_and_its_descriptors_do_not_stay(noise, descriptors):
    ours, theirs = local.pair()
    with ours, theirs, open(os.devnull) as some:
        before = len(os.listdir("/proc/self/fd"))
        sent = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [some.fileno()] * descriptors))] if descriptors else []
        theirs.sendmsg([noise], sent)
        taken = ()
        with contextlib.suppress(Malformed, EOFError):
            _, taken = local.Link(ours, local.FromWorker).receive()
        assert len(taken) <= 4
        for fd in taken:
            os.close(fd)
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_message_longer_than_any_is_refused_by_its_length(monkeypatch):
    """Shorter here: this system may not let a megabyte be sent as one message."""
    monkeypatch.setattr(local, "_MESSAGE_BYTES_MAX", 1000)
    ours, theirs = local.pair()
    with ours, theirs:
        theirs.send(bytes(1001))
        with pytest.raises(Malformed, match="has more than 1000 bytes"):
            local.Link(ours, local.FromWorker).receive()


@pytest.mark.parametrize("noise", [b"noise", b"\xc1", msgspec.msgpack.encode({"type": "Copying", "generation": 1, "slot": 99, "keep": 0})])
def test_a_worker_that_talks_nonsense_is_lost_and_its_agent_is_not(tmp_path, monkeypatch, noise):
    """A real child that got hold of the link: a user's script, a library with a wild pointer."""
    program = tmp_path / "worker"
    program.write_text(f"#!{sys.executable}\nimport os, time\nos.write(int(os.environ['DEADPOOL_LINK_FD']), {noise!r})\ntime.sleep(60)\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    place = {"run_id": "r", "incarnation": "i", "node": "n", "workers": 1, "address": "127.0.0.1", "agent_pid": os.getpid(), "tmp": "/tmp"}

    async def scene():
        lost = asyncio.get_running_loop().create_future()
        lives = Lives(lambda worker, message: lost.set_exception(AssertionError(message)), lambda w, why: lost.set_result(why), lambda: 1.0)
        lives.add(WorkerProcess(0, ["script"], tmp_path / "log", place, {}))
        try:
            return await asyncio.wait_for(lost, 30)
        finally:
            lives.close()

    assert asyncio.run(scene()).startswith("it told its agent what is no message: ")


# ---- the core


def training():
    """A job of two nodes that trains."""
    control = Control(ControlConfig("r", "t", Grid(2), 2, 0))
    for node in "ab":
        control.handle(f"{node}-1", m.Join(m.PROTOCOL, "r", "t", node, f"{node}-1", 1, f"{node}:1"), 0.0)
        control.handle(f"{node}-1", m.WorkerReady(0, f"{node}:2"), 0.0)
    assert control.phase is Phase.TRAINING
    return control


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["a-1", "b-1", "stranger"]), st.sampled_from(FROM_AGENT).flatmap(structs)), max_size=12))
def test_no_message_that_passes_the_service_breaks_the_core(said):
    """Types are checked by the decoder, ranges by control/sanity.py; what is left is late, repeated or mistaken, and never an exception."""
    control = training()
    for at, (who, message) in enumerate(said):
        if not nonsense(message, 2, 1):
            control.handle(who, message, float(at))
        control.tick(float(at))


RANKED = (m.Acknowledged, m.Skipped, m.CopyDamaged, m.WorkerError, m.HaltReport, m.ReplicaReport, m.Restored, m.FirstStep)
RANKED += (m.WorkerLost, m.Finished)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_messages_with_ranks_that_exist_do_not_break_the_core_either(data):
    """The same, where most messages are about something: small numbers, present versions."""
    control = training()
    small = st.integers(0, 3)
    for at in range(data.draw(st.integers(1, 12))):
        message = data.draw(st.sampled_from(RANKED).flatmap(structs))
        changed = {name: data.draw(small) for name in ("rank", "worker", "generation", "step", "done") if hasattr(message, name)}
        if hasattr(message, "version"):
            changed["version"] = control.version - data.draw(st.integers(0, 1))
        if hasattr(message, "replicas"):
            changed["replicas"] = {data.draw(small): (data.draw(small),)}
        message = msgspec.structs.replace(message, **changed)
        if not nonsense(message, 2, 1):
            control.handle(data.draw(st.sampled_from(["a-1", "b-1"])), message, float(at))
        control.tick(float(at))


# ---- files of a run


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["pid", "step", "t", "node", "run_id"]), inner)),
    max_leaves=8,
)
STEP = {"step": 1, "loss": {"lm loss": 1.5}, "loss_hex": {"lm loss": "0x1.8p0"}, "grad_norm_hex": None, "consumed_samples": 8}
SUMMARY = {"steps": 1, "recoveries": [], "bit_identical": None}
JOB = {"coordinator": "127.0.0.1:1", "run_id": "r", "pid": os.getpid()}
COMMAND = {"script": "pretrain_gpt.py", "argv": ["--hot-swap"], "folder": "/", "workers": 1}
DEEP = b"[" * 100_000


def texts(valid):
    other = JSON.map(lambda x: json.dumps(x).encode())
    return st.one_of(damaged(json.dumps(valid).encode()), other, st.binary(max_size=200), st.just(DEEP))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@FAST
@given(content=texts(JOB))
def test_job_json_names_a_job_or_none(folder, content):
    (folder / "job.json").write_bytes(content)
    job = running_job(folder)
    assert job is None or isinstance(job, Job)


@FAST
@given(content=texts(COMMAND))
def test_command_json_is_a_command_or_refused_in_words(folder, content):
    path = folder / "command.json"
    path.write_bytes(content)
    path.chmod(0o600)
    with contextlib.suppress(UsageError):
        assert isinstance(read_command(folder), Command)


def test_a_command_that_another_user_may_have_written_is_not_run(tmp_path):
    write_command(tmp_path, Command("x.py", ["--hot-swap"], "/", 1))
    assert read_command(tmp_path).argv == ["--hot-swap"]
    (tmp_path / "command.json").chmod(0o622)
    with pytest.raises(UsageError, match=r"command.json is open to other users \(mode 0622"):
        read_command(tmp_path)


@pytest.mark.parametrize("pid", [0, -1, -2, 1 << 40, 10**40])
def test_a_process_id_that_is_none_is_no_running_job(tmp_path, pid):
    """Zero and less would be whole groups of processes."""
    (tmp_path / "job.json").write_text(json.dumps({**JOB, "pid": pid}))
    assert running_job(tmp_path) is None


@FAST
@given(content=texts(STEP), summary=texts(SUMMARY))
def test_what_a_run_has_left_is_read_or_refused_by_file_and_line(folder, content, summary):
    (folder / "steps.jsonl").write_bytes(content)
    (folder / "summary.json").write_bytes(summary)
    with contextlib.suppress(UsageError):
        verify.verify_runs(folder, folder)
    with contextlib.suppress(UsageError):
        picture.read_run(folder)


@FAST
@given(content=texts({"t": 1.0, "node": "n"}))
def test_injections_that_were_cut_off_are_left_out(folder, content):
    (folder / inject.INJECTIONS_FILE).write_bytes(content + b'\n{"t": 5.0, "node": "n", "action": "kill"}\n')
    assert inject.last_strike(folder, ["n"], 6.0) in (5.0, *(float(x) for x in range(6)))


def test_floats_that_are_none_are_compared_and_shown(tmp_path):
    for name, text in (("a", "no hex"), ("b", "0x1p99999999")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "steps.jsonl").write_text(json.dumps({**STEP, "loss_hex": {"lm loss": text}}))
    found = verify.compare(verify.read_steps(tmp_path / "a"), verify.read_steps(tmp_path / "b"))
    assert "'no hex', which is no float in hex" in found.difference


def peak_of(work):
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_line_without_end_is_not_read_into_memory(tmp_path):
    """64 MiB of it, in a file with a hole."""
    for name in ("steps.jsonl", "job.json", inject.INJECTIONS_FILE):
        with open(tmp_path / name, "wb") as file:
            file.truncate(64 << 20)
    with pytest.raises(UsageError, match="line 1 is not the record of a step"):
        assert peak_of(lambda: verify.read_steps(tmp_path)) < 8 << 20
    assert running_job(tmp_path) is None


def test_a_log_without_ends_of_line_does_not_fill_the_displays_memory(tmp_path):
    path = Path(tmp_path, "node0-1-0.log")
    path.touch()
    tail = LogTail(tmp_path)

    def follow():
        for _ in range(32):
            with open(path, "ab") as file:
                file.write(b"x" * (1 << 20))
            for _ in tail.read():
                pass

    assert peak_of(follow) < 16 << 20


# ---- what an MPI says to its process manager


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(damaged(b"cmd=put kvsname=x key=a value=b"), damaged(b"cmd=get key=a"), st.just(b"cmd=barrier_in")), max_size=6))
def test_the_process_manager_answers_or_gives_up(lines):
    async def scene():
        ours, theirs = socket.socketpair()

        async def exchange(blob):
            return blob

        served = asyncio.ensure_future(pmi.serve(theirs, exchange))
        with ours, theirs, contextlib.suppress(OSError):
            ours.sendall(b"".join(line + b"\n" for line in lines))
            ours.shutdown(socket.SHUT_WR)
            with contextlib.suppress(PeerFault):
                await asyncio.wait_for(served, 10)

    asyncio.run(scene())


def test_the_other_end_cannot_put_a_command_into_this_ends_lines():
    with pytest.raises(PeerFault, match="no line of PMI-1"):
        pmi._printable({"a": "b\ncmd=finalize_ack"})
