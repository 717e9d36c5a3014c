"""security/: who gets into a job, who does not, and what those are told. Against the real coordinator over real gRPC, and real files."""

import asyncio
import contextlib
import dataclasses
import datetime
import functools
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import grpc
import msgspec
import pytest

from megatron.hotswap import config
from megatron.hotswap.cli.client import call
from megatron.hotswap.control import messages as m
from megatron.hotswap.control.config import ControlConfig
from megatron.hotswap.coordinator import wire
from megatron.hotswap.coordinator.job_file import Job
from megatron.hotswap.coordinator.service import Coordinator
from megatron.hotswap.errors import UsageError
from megatron.hotswap.replication.transports import protection
from megatron.hotswap.security import authority, files, tls
from megatron.hotswap.topology.grid import Grid

ROOT = Path(__file__).parents[2]
RUN = "run-1"
EXPIRED = datetime.timedelta(seconds=-5)
DEADLINE_S = 60.0


class Running:
    """A coordinator that serves, waiting for two nodes."""

    def __init__(self, run_dir):
        self.run_dir = run_dir

    async def __aenter__(self):
        self.token = authority.issue(self.run_dir, RUN)
        self.coordinator = Coordinator.with_journal(ControlConfig(RUN, self.token, Grid(2), 2, 0), self.run_dir)
        self.address = await self.coordinator.start("127.0.0.1", 0)
        return self

    async def __aexit__(self, *error):
        self.coordinator.end_job(1, "the test is over")
        await self.coordinator.stop()

    @property
    def shown(self):
        return files.read(self.run_dir, "agent", RUN)

    def join(self, node="a", **changed):
        return msgspec.structs.replace(m.Join(m.PROTOCOL, RUN, self.token, node, f"{node}-1", 1, f"{node}:1"), **changed)

    async def hear(self, *says, shown=None, until=m.Refused):
        """Say this as an agent does; returns what comes, up to the first of the kind `until`."""
        heard, ended = [], asyncio.Event()

        async def saying():
            for message in says:
                yield message if isinstance(message, bytes) else wire.encode(message)
            await ended.wait()

        async with wire.channel(self.address, shown or self.shown) as channel:
            stream = channel.stream_stream(f"/{wire.SERVICE}/{wire.AGENT_STREAM}")(saying(), timeout=DEADLINE_S)
            async for raw in stream:
                heard.append(wire.decode_from_coordinator(raw))
                if isinstance(heard[-1], until):
                    break
            ended.set()
        return heard

    def refusals(self):
        lines = map(json.loads, (self.run_dir / "events.jsonl").read_text().splitlines())
        return [line["reason"] for line in lines if line["kind"] == "refused"]


def on_a_loop(test):
    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), DEADLINE_S))

    return run


def other_folder(tmp_path, run_dir, *names):
    """A run directory whose credentials are this job's, but for the named files, which are another job's with the same run id."""
    other = tmp_path / "other"
    authority.issue(made(other), RUN)
    for path in (run_dir / files.FOLDER).iterdir():
        if path.name not in names:
            shutil.copy(path, other / files.FOLDER / path.name)
    return files.read(other, "agent", RUN)


def made(path):
    path.mkdir(exist_ok=True)
    return path


# ---- files


def test_the_credentials_are_the_owners_alone_and_the_authoritys_key_is_nowhere(tmp_path):
    token = authority.issue(tmp_path, RUN)
    folder = tmp_path / files.FOLDER
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()} == {0o600}
    keys = [p.name for p in folder.iterdir() if b"PRIVATE KEY" in p.read_bytes()]
    assert sorted(keys) == ["agent.key", "coordinator.key", "user.key"]
    assert len({(folder / name).read_bytes() for name in keys}) == 3
    assert files.read(tmp_path, "agent", RUN).token == token
    files.forget(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_next_run_in_a_directory_has_other_secrets(tmp_path):
    first = authority.issue(tmp_path, RUN)
    before = files.read(tmp_path, "agent", RUN)
    assert authority.issue(tmp_path, RUN) != first
    after = files.read(tmp_path, "agent", RUN)
    assert before.authority != after.authority and before.key != after.key


@pytest.mark.parametrize("name", ["token", "agent.key"])
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o602])
def test_a_secret_that_others_can_read_or_write_is_refused(tmp_path, name, mode):
    authority.issue(tmp_path, RUN)
    path = tmp_path / files.FOLDER / name
    path.chmod(mode)
    with pytest.raises(UsageError, match=rf"{name} is open to other users \(mode {mode:04o}, at most 0600 is allowed\).*chmod 600"):
        files.read(tmp_path, "agent", RUN)


def _link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _pipe(path):
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (Path.unlink, "cannot be read: No such file or directory; the launcher writes it"),
        (_link, "cannot be read: Too many levels of symbolic links"),
        (_pipe, "must be a plain file"),
        (lambda path: path.write_text("guess\n"), "has 5 characters; it must have 32 to 256"),
        (lambda path: path.write_bytes(bytes(1 << 20)), "has more than 65536 bytes"),
    ],
    ids=["missing", "a link", "a pipe", "short", "long"],
)
def test_what_is_no_token_file_is_refused_in_words(tmp_path, spoil, words):
    authority.issue(tmp_path, RUN)
    spoil(tmp_path / files.FOLDER / files.TOKEN_FILE)
    with pytest.raises(UsageError, match=words):
        files.read(tmp_path, "agent", RUN)


def test_certificates_that_are_noise_are_refused_in_words(tmp_path):
    authority.issue(tmp_path, RUN)
    (tmp_path / files.FOLDER / "agent.crt").write_text("noise")
    with pytest.raises(UsageError, match=r"the certificates in .* cannot be used: .*; start the job anew"):
        tls.PeerTls(files.read(tmp_path, "agent", RUN))


@pytest.mark.parametrize("run_id", ["", "a b", "x" * 33, "../up", "-a"])
def test_a_run_id_that_cannot_be_in_a_name_is_refused(tmp_path, run_id):
    with pytest.raises(UsageError, match="a run id is 1 to 32 letters"):
        authority.issue(tmp_path, run_id)


# ---- joining


@on_a_loop
async def test_an_agent_of_the_job_is_welcome(tmp_path):
    async with Running(tmp_path) as job:
        heard = await job.hear(job.join(), until=m.Welcome)
        assert isinstance(heard[-1], m.Welcome)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"token": "0" * 64}, "node a does not have this job's token"),
        ({"token": ""}, "node a does not have this job's token"),
        ({"run_id": "run-2"}, "this is run 'run-1', node a belongs to run 'run-2'"),
        ({"protocol": m.PROTOCOL + 1}, f"protocol {m.PROTOCOL} is spoken here, node a speaks {m.PROTOCOL + 1}"),
        ({"workers": 7}, "every node of this job has 1 workers, node a has 7"),
        ({"node": "../../a"}, "no agent joins with this: node '../../a'"),
        ({"node": "a\x1b[2J"}, "no agent joins with this: node 'a\\x1b[2J'"),
        ({"node": "a" * 300}, "no agent joins with this: node 'aaa"),
        ({"h2h": "no address"}, "no agent joins with this: address 'no address'"),
        ({"domain": "d\n" * 400}, "no agent joins with this: failure domain"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
@on_a_loop
async def test_who_may_not_join_is_told_why_and_changes_nothing(tmp_path, changed, words):
    async with Running(tmp_path) as job:
        (refused,) = await job.hear(job.join(**changed))
        assert words in refused.reason
        assert job.coordinator.control.agents == {}
        assert any(words in line for line in job.refusals())
        assert isinstance((await job.hear(job.join("b"), until=m.Welcome))[-1], m.Welcome)  # others are served


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (b"\xc1noise", "what came is no message that is known here"),
        (b"", "what came is no message that is known here"),
        (b"\x91" * 100_000, "what came is no message that is known here"),
        (b"\x82\xa4type\xa9Heartbeat\xa1x" + b"\x91" * 100_000, "recursion"),
        (msgspec.msgpack.encode({"type": "Join", "protocol": 99, "node": "new", "shape": [1]}), "node 'new' speaks 99; install the same"),
        (wire.encode(m.Heartbeat(1)), "the first message must be Join, got Heartbeat"),
        (wire.encode(m.Stop(0, "now")), "Invalid value 'Stop'"),
    ],
    ids=["noise", "empty", "nested", "nested where nobody looks", "another version", "no join", "an order"],
)
@on_a_loop
async def test_a_first_message_that_is_none_is_refused_with_the_sender_named(tmp_path, first, words):
    async with Running(tmp_path) as job:
        (refused,) = await job.hear(first)
        assert re.search(words, refused.reason)
        assert re.match(r"a caller at ipv4:127\.0\.0\.1(:|%3A)\d+: ", refused.reason)
        assert job.refusals() == [refused.reason]
        assert job.coordinator.control.agents == {}


@pytest.mark.parametrize(
    ("later", "words"),
    [
        (b"noise", "no message that is known here"),
        (m.Acknowledged(7, 1, 1), "Acknowledged with rank 7 of 2"),
        (m.HaltReport(1, -1, 0, False, (), ""), "HaltReport with rank -1 of 2"),
        (m.WorkerReady(3, "s"), "WorkerReady with worker 3 of 1"),
        (m.ReplicaReport(1, {5: (1,)}), "ReplicaReport with rank 5 of 2"),
        (m.Restored(1, 0, float("nan"), 0.0, 0, 0), "Restored with rebuild_s nan"),
        (m.StepDone(m.StepRecord(1, 0, 8, 0.1, 0.0, {"loss": "not hex"}, None)), "StepDone with loss 'not hex', which is no float in hex"),
        (m.Acknowledged(0, 1 << 63, 1), "Acknowledged with generation 9223372036854775808"),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, str) else "",
)
@on_a_loop
async def test_a_later_message_that_cannot_be_meant_costs_its_sender_and_nobody_else(tmp_path, later, words):
    async with Running(tmp_path) as job:
        other = asyncio.ensure_future(job.hear(job.join("b"), m.WorkerReady(0, "b:2"), until=m.Stop))
        while "b-1" not in job.coordinator.control.agents:
            await asyncio.sleep(0.01)
        *_, refused = await job.hear(job.join(), later)
        assert refused.reason.startswith("node a: it sent what no agent of this job says: ") and words in refused.reason
        while "a-1" in job.coordinator.control.agents:
            await asyncio.sleep(0.01)
        assert words in job.coordinator.control.fenced["a-1"]
        assert "b-1" in job.coordinator.control.agents and job.coordinator.recorder.last_step is None
        job.coordinator.end_job(0, "done")
        assert isinstance((await other)[-1], m.Stop)


@on_a_loop
async def test_a_message_that_is_too_long_is_refused_by_its_length(tmp_path):
    async with Running(tmp_path) as job:
        with pytest.raises(grpc.aio.AioRpcError, match=r"(?i)larger than max|exceed"):
            await job.hear(job.join(), m.Note("n", "x" * (wire.MESSAGE_BYTES_MAX + 1)))
        assert isinstance((await job.hear(job.join("b"), until=m.Welcome))[-1], m.Welcome)


# ---- certificates


async def refused_by_tls(job, shown):
    """What gRPC says, which is little, and what this project makes of it."""
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await job.hear(job.join(), shown=shown)
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
    assert job.coordinator.control.agents == {}
    why = await asyncio.get_running_loop().run_in_executor(None, tls.why_refused, job.address, shown)
    assert isinstance((await job.hear(job.join("b"), until=m.Welcome))[-1], m.Welcome)  # others are served
    return why


@on_a_loop
async def test_a_certificate_of_another_authority_is_refused(tmp_path):
    async with Running(made(tmp_path / "run")) as job:
        why = await refused_by_tls(job, other_folder(tmp_path, job.run_dir, "agent.crt", "agent.key"))
        assert why.startswith("it refuses the certificate shown to it, which is not of this job, but of another one, or of an earlier run")


@on_a_loop
async def test_an_agent_of_another_job_does_not_believe_this_coordinator(tmp_path):
    async with Running(made(tmp_path / "run")) as job:
        why = await refused_by_tls(job, other_folder(tmp_path, job.run_dir, files.AUTHORITY_FILE, "agent.crt", "agent.key"))
        assert why.startswith("its certificate is not of this job, but of another one")


@on_a_loop
async def test_an_agent_of_another_run_id_does_not_believe_this_coordinator(tmp_path):
    """The authority is the same, the name in the certificate is not what it should be."""
    async with Running(made(tmp_path / "run")) as job:
        why = await refused_by_tls(job, dataclasses.replace(job.shown, run_id="run-2"))
        assert "Hostname mismatch" in why


@on_a_loop
async def test_a_certificate_that_has_expired_is_refused(tmp_path, monkeypatch):
    key = authority.ec.generate_private_key(authority.ec.SECP256R1())
    monkeypatch.setattr(authority.ec, "generate_private_key", lambda curve: key)  # the same authority signs both
    expired = made(tmp_path / "expired")
    authority.issue(expired, RUN, valid_for=EXPIRED)
    async with Running(made(tmp_path / "run")) as job:
        shutil.copy(job.run_dir / files.FOLDER / files.AUTHORITY_FILE, expired / files.FOLDER / files.AUTHORITY_FILE)
        why = await refused_by_tls(job, files.read(expired, "agent", RUN))
        assert why == "it refuses the certificate shown to it, which has expired"


@on_a_loop
async def test_a_coordinator_whose_certificate_has_expired_is_not_believed(tmp_path, monkeypatch):
    issue = authority.issue
    monkeypatch.setattr(authority, "issue", functools.partial(issue, valid_for=EXPIRED))
    async with Running(tmp_path) as job:
        why = await asyncio.get_running_loop().run_in_executor(None, tls.why_refused, job.address, job.shown)
        assert why == "its certificate has expired"


@on_a_loop
async def test_who_shows_no_certificate_is_refused(tmp_path):
    async with Running(tmp_path) as job:
        shown = job.shown
        name = ("grpc.ssl_target_name_override", files.name_of("coordinator", RUN))
        trust = grpc.ssl_channel_credentials(shown.authority)
        async with grpc.aio.secure_channel(job.address, trust, options=(*wire.OPTIONS, name)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await channel.unary_unary(f"/{wire.SERVICE}/{wire.COMMAND}")(wire.encode(wire.Command()), timeout=DEADLINE_S)
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        assert isinstance((await job.hear(job.join("b"), until=m.Welcome))[-1], m.Welcome)  # others are served
        assert set(job.coordinator.control.agents) | set(job.coordinator.control.fenced) == {"b-1"}


@on_a_loop
async def test_noise_and_plain_text_on_the_coordinators_port_change_nothing(tmp_path):
    async with Running(tmp_path) as job:
        host, port = job.address.rsplit(":", 1)
        http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100)
        for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", http2, os.urandom(100_000), b"\x16\x03\x01\xff\xff"):
            _, writer = await asyncio.open_connection(host, int(port))
            with contextlib.suppress(OSError):
                writer.write(noise)
                await writer.drain()
            writer.close()
        async with grpc.aio.insecure_channel(job.address, options=wire.OPTIONS) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary(f"/{wire.SERVICE}/{wire.COMMAND}")(wire.encode(wire.Command()), timeout=5)
        assert isinstance((await job.hear(job.join("b"), until=m.Welcome))[-1], m.Welcome)
        assert set(job.coordinator.control.agents) | set(job.coordinator.control.fenced) == {"b-1"}


@on_a_loop
async def test_a_users_certificate_is_no_agents(tmp_path):
    async with Running(tmp_path) as job:
        (refused,) = await job.hear(job.join(), shown=files.read(tmp_path, "user", RUN))
        assert "agents show an agent's certificate, this is one of the role 'user'" in refused.reason
        assert job.coordinator.control.agents == {}


# ---- commands


async def command(job, raw, role):
    async with wire.channel(job.address, files.read(job.run_dir, role, RUN)) as channel:
        return wire.decode_status(await channel.unary_unary(f"/{wire.SERVICE}/{wire.COMMAND}")(raw, timeout=DEADLINE_S))


@on_a_loop
async def test_commands_take_a_users_certificate(tmp_path):
    async with Running(tmp_path) as job:
        assert (await command(job, wire.encode(wire.Command()), "user")).ok
        status = await command(job, wire.encode(wire.Command()), "agent")
        assert not status.ok and "commands take a user's certificate, this is one of the role 'agent'" in status.text


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x91" * 10_000, msgspec.msgpack.encode({"injection": {"action": "format-disk"}})])
@on_a_loop
async def test_a_command_that_cannot_be_read_is_refused(tmp_path, raw):
    async with Running(tmp_path) as job:
        status = await command(job, raw, "user")
        assert not status.ok and "use the `deadpool` that started the job" in status.text
        assert "a command cannot be read" in job.refusals()[0]


@on_a_loop
async def test_the_command_line_uses_the_run_directorys_certificate(tmp_path):
    async with Running(tmp_path) as job:
        (tmp_path / "job.json").write_bytes(msgspec.json.encode(Job(job.address, RUN, os.getpid())))
        loop = asyncio.get_running_loop()
        assert (await loop.run_in_executor(None, call, tmp_path)).phase == "gathering"
        (tmp_path / files.FOLDER / "user.key").chmod(0o604)
        with pytest.raises(UsageError, match=r"user.key is open to other users \(mode 0604"):
            await loop.run_in_executor(None, call, tmp_path)
        authority.issue(tmp_path, RUN)  # another job's
        with pytest.raises(UsageError, match="its certificate is not of this job, but of another one"):
            await loop.run_in_executor(None, call, tmp_path)


# ---- the agent's own process


def agent_process(address, run_dir):
    """The real agent, told to join the job with the credentials of `run_dir`; its exit code and what it said."""
    place = {"COORDINATOR": address, "RUN_ID": RUN, "NODE": "a", "WORKERS": "1"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **{f"DEADPOOL_{name}": value for name, value in place.items()}}
    command = [sys.executable, "-m", "megatron.hotswap", "no_script.py", "--hot-swap", "--hot-swap-run-dir", str(run_dir)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    return run.returncode, run.stderr


@on_a_loop
async def test_an_agent_says_itself_why_it_is_not_let_in(tmp_path):
    async with Running(made(tmp_path / "run")) as job:
        loop, other = asyncio.get_running_loop(), tmp_path / "other"
        (await loop.run_in_executor(None, other_folder, tmp_path, job.run_dir, "agent.crt", "agent.key"))
        code, said = await loop.run_in_executor(None, agent_process, job.address, other)
        assert code == 3
        assert f"the coordinator at {job.address} is not reached: it refuses the certificate shown to it, which is not of this job" in said
        assert "megatron.hotswap.worker" not in said  # no worker has written a traceback
        (other / files.FOLDER / "agent.crt").unlink()
        code, said = await loop.run_in_executor(None, agent_process, job.address, other)
        assert (code, "agent.crt cannot be read: No such file or directory" in said) == (2, True)
        (other / files.FOLDER / files.TOKEN_FILE).chmod(0o644)
        code, said = await loop.run_in_executor(None, agent_process, job.address, other)
        assert (code, "token is open to other users (mode 0644" in said, "Traceback" in said) == (2, True, False)
        assert job.coordinator.control.agents == {}


@on_a_loop
async def test_an_agent_ends_in_words_when_the_coordinator_talks_nonsense(tmp_path):
    """One of another version, that has the right certificate."""
    authority.issue(tmp_path, RUN)

    async def nonsense(requests, context):
        async for _ in requests:
            yield b"\xc0"

    server = grpc.aio.server(options=wire.OPTIONS)
    handlers = {wire.AGENT_STREAM: grpc.stream_stream_rpc_method_handler(nonsense)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, handlers),))
    port = wire.listen(server, "127.0.0.1:0", files.read(tmp_path, "coordinator", RUN))
    await server.start()
    try:
        code, said = await asyncio.get_running_loop().run_in_executor(None, agent_process, f"127.0.0.1:{port}", tmp_path)
    finally:
        await server.stop(None)
    assert code == 3
    assert f"the coordinator at 127.0.0.1:{port} sent what an agent cannot read: what came is no message that is known here" in said


# ---- the flag


def test_transports_that_are_not_encrypted_by_us_are_refused_with_the_flag():
    assert config.parse(["--hot-swap-encrypt"]).encrypt and not config.parse([]).encrypt
    for transport in ("mpi", "nixl"):
        with pytest.raises(UsageError, match=rf"--hot-swap-encrypt .* this job has {transport}, whose library .* in clear: leave the"):
            config.parse(["--hot-swap-encrypt", "--hot-swap-transport", transport])


def test_how_snapshots_travel_is_said():
    said = {flags: protection(config.parse(flags.split())) for flags in ("", "--hot-swap-encrypt", "--hot-swap-transport mpi")}
    assert said[""] == "not encrypted (--hot-swap-encrypt does it)"
    assert said["--hot-swap-encrypt"] == "encrypted (TLS 1.3)"
    assert said["--hot-swap-transport mpi"] == "not encrypted, and connected by mpi itself: its network must be yours alone"
