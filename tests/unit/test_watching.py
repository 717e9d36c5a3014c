"""What a job shows of itself: metrics as Prometheus reads them, and `deadpool status`. A real coordinator over real gRPC, real snapshots
between real agents' parts, real HTTP."""

import ast
import asyncio
import io
import json
import os
import re
import socket
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from test_replicator import PAYLOAD, SLOT, pair
from test_security import RUN, Running, on_a_loop

from megatron.hotswap.agent.metrics import Metrics as AgentMetrics
from megatron.hotswap.cli.client import call
from megatron.hotswap.cli.status import describe, show_status
from megatron.hotswap.config import parse
from megatron.hotswap.control import messages as m
from megatron.hotswap.control.config import ControlConfig
from megatron.hotswap.control.decisions import EVENT_KINDS
from megatron.hotswap.control.state import Control, Phase
from megatron.hotswap.coordinator import wire
from megatron.hotswap.coordinator.job_file import Job
from megatron.hotswap.coordinator.metrics import Metrics as CoordinatorMetrics
from megatron.hotswap.coordinator.recorder import Recorder
from megatron.hotswap.errors import UsageError
from megatron.hotswap.metrics import FOLDER
from megatron.hotswap.metrics.endpoint import Endpoint, new_registry
from megatron.hotswap.patches.tensorboard import Scalars
from megatron.hotswap.replication.transfer import ReplicaStore
from megatron.hotswap.snapshot.slots import Word
from megatron.hotswap.topology.grid import Grid

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "watching.md").read_text()
SOURCES = sorted((ROOT / "megatron" / "hotswap").rglob("*.py"))


def read(target):
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=5) as answer:
        return answer.read().decode()


def scrape(target):
    """(name, its labels' values) -> value, as Prometheus reads it."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(read(target))
        for sample in family.samples
    }


def target_of(run_dir, name):
    (only,) = json.loads((run_dir / FOLDER / f"{name}.json").read_text())
    return only["targets"][0], only["labels"]


class Speaker:
    """An agent as far as the coordinator sees one: a connection of its own, over which it says what the test says."""

    def __init__(self, job, node):
        self.job, self.node, self.heard = job, node, []
        self._says = asyncio.Queue()
        self._task = asyncio.get_running_loop().create_task(self._talk())
        self.say(job.join(node), m.WorkerReady(0, f"{node}:2"))

    def say(self, *messages):
        for message in messages:
            self._says.put_nowait(message)

    async def _saying(self):
        while (message := await self._says.get()) is not None:
            yield wire.encode(message)

    async def _talk(self):
        async with wire.channel(self.job.address, self.job.shown) as channel:
            async for raw in channel.stream_stream(f"/{wire.SERVICE}/{wire.AGENT_STREAM}")(self._saying()):
                self.heard.append(wire.decode_from_coordinator(raw))

    async def close(self):
        self._task.cancel()
        await asyncio.wait([self._task])


async def until(true):
    while not true():
        await asyncio.sleep(0.01)


def step(number, version=1):
    return m.StepDone(m.StepRecord(number, version, 8 * number, 0.75, 0.002, {"lm loss": (1.5).hex()}, None))


async def train_lose_and_recover(job):
    """Two nodes train; b is lost after step 2, of which only generation 1 is committed; c takes over. Returns the agents that are left."""
    control = job.coordinator.control
    a, b = Speaker(job, "a"), Speaker(job, "b")
    await until(lambda: control.phase is Phase.TRAINING)
    b.say(step(1), m.Acknowledged(1, 1, 1, 0.01, 0.02))
    a.say(m.Acknowledged(0, 1, 1, 0.01, 0.02), m.Heartbeat(1, {0: m.Progress(2, 2, 9)}))
    await until(lambda: control.committed == 1)
    b.say(step(2))
    a.say(m.Skipped(0, 2, 1))
    await until(lambda: control.newest_step == 2 and control.commits.skipped_generations == 1)
    before = control.hang.progress[0], control.committed
    await b.close()
    await until(lambda: control.phase is Phase.HALTING)
    c = Speaker(job, "c")
    await until(lambda: any(isinstance(x, m.Assign) for x in c.heard))
    a.say(m.HaltReport(1, 0, 1, False, (1,), "a:3"), m.ReplicaReport(1, {1: (1,)}))
    c.say(m.HaltReport(1, 1, None, False, (), ""))
    await until(lambda: control.phase is Phase.RESUMING)
    for rank, agent in enumerate((a, c)):
        agent.say(m.Restored(2, rank, 0.1, 0.2, 1000 * rank, 1 - rank), m.FirstStep(2, rank))
    await until(lambda: job.coordinator.recorder.recoveries)
    assert before == (m.Progress(2, 2, 9), 1)
    return a, c


@on_a_loop
async def test_the_coordinators_metrics_tell_a_recovery(tmp_path):
    async with Running(tmp_path) as job:
        await job.coordinator.serve_metrics("127.0.0.1", 0, "127.0.0.1")
        target, labels = target_of(tmp_path, "coordinator")
        assert labels == {"run": RUN, "part": "coordinator"}
        before = scrape(target)  # from the loop's own thread: the answer comes while the loop stands still
        assert before["deadpool_phase", "gathering"] == 1 and ("deadpool_committed_generation",) not in before
        (tmp_path / FOLDER / "b-1.json").write_text("[]")
        a, c = await train_lose_and_recover(job)
        a.say(m.Note("a-word-of-its-own", "text"))
        await until(lambda: any(n.kind == "a-word-of-its-own" for n in job.coordinator.notices))
        found = scrape(target)
        expected = {
            ("deadpool_phase", "training"): 1,
            ("deadpool_membership_version",): 2,
            ("deadpool_step",): 1,
            ("deadpool_step_seconds_count",): 2,
            ("deadpool_step_seconds_sum",): 1.5,
            ("deadpool_exposed_stall_seconds_sum",): 0.004,
            ("deadpool_generations_skipped_total",): 1,
            ("deadpool_nodes_lost_total",): 1,
            ("deadpool_nodes", "active"): 2,
            ("deadpool_nodes", "spare"): 0,
            ("deadpool_recoveries_total", "swap"): 1,
            ("deadpool_recovery_seconds_count", "swap"): 1,
            ("deadpool_recovery_phase_seconds_sum", "swap", "rebuild"): 0.1,
            ("deadpool_steps_rerun_total",): 1,
            ("deadpool_restored_bytes_total",): 1000,
            ("deadpool_events_total", "node-lost"): 1,
            ("deadpool_events_total", "other"): 1,
            ("deadpool_durable_writes_total", "whole"): 0,
        }
        assert {key: found.get(key) for key in expected} == expected
        assert 0 <= found["deadpool_heartbeat_age_seconds", "a"] < 60 and ("deadpool_heartbeat_age_seconds", "b") not in found
        assert found["deadpool_committed_generation",] == 0 and found["deadpool_generation_lag",] == 1  # 1 needs replicas again
        assert not (tmp_path / FOLDER / "b-1.json").exists()  # the lost node's target
        for agent in (a, c):
            await agent.close()
    assert list((tmp_path / FOLDER).iterdir()) == []
    with pytest.raises(urllib.error.URLError):
        read(target)


@on_a_loop
async def test_a_port_that_is_taken_is_said_and_costs_only_the_numbers(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with Running(tmp_path) as job:
            await job.coordinator.serve_metrics("127.0.0.1", port, "127.0.0.1")
            assert isinstance((await job.hear(job.join(), until=m.Welcome))[-1], m.Welcome)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (said,) = [line for line in lines if line["kind"] == "metrics-refused"]
    assert f"metrics are not served at 127.0.0.1:{port}: " in said["reason"] and "give another --hot-swap-metrics-port" in said["reason"]
    assert "in use" in said["reason"] and said["reason"].endswith("the job goes on without the coordinator's")


def test_endpoints_are_read_only_and_where_they_were_asked_for(tmp_path):
    endpoint = Endpoint(new_registry(), "127.0.0.1", 0)
    assert endpoint.announce(tmp_path, "n-1", "here", {}) == f"127.0.0.1:{endpoint.port}"
    try:
        for method in ("POST", "PUT", "DELETE"):
            request = urllib.request.Request(f"http://127.0.0.1:{endpoint.port}/metrics", data=b"x", method=method)
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=5)
            assert refused.value.code == 405
            refused.value.close()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", endpoint.port), timeout=5)
    finally:
        endpoint.close().join()
    wide = Endpoint(new_registry(), "0.0.0.0", 0)
    assert wide.announce(tmp_path, "n-2", "host-7", {"node": "n"}) == f"host-7:{wide.port}"
    wide.close().join()
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_the_port_is_off_by_default_and_checked():
    assert (parse([]).metrics_port, parse([]).metrics_address) == (0, "127.0.0.1")
    for port in ("-1", "65536"):
        with pytest.raises(UsageError, match=f"must be a port, 1 to 65535, or 0 for no metrics, got {port}"):
            parse(["--hot-swap-metrics-port", port])


def test_an_agents_metrics_tell_what_moved(tmp_path):
    async def test():
        owner, holder, membership = await pair()
        loop = asyncio.get_running_loop()
        metrics = AgentMetrics([owner.worker], owner.store, lambda: loop.time() - 2.0, loop.time)
        held = AgentMetrics([], holder.store, loop.time, loop.time)
        owner.replicator.on_moved = metrics.moved
        told = metrics.serve("127.0.0.1", tmp_path, "n0-life", "here", {"node": "n0"})
        held.serve("127.0.0.1", tmp_path, "n1-life", "here", {"node": "n1"})
        assert told.kind == "metrics" and target_of(tmp_path, "n0-life")[0] in told.text
        owner.take(5, os.urandom(PAYLOAD), b"metadata", copied=False)
        owner.replicator.begin(owner.worker, membership, 5, keep=-1)
        await asyncio.sleep(0.05)
        owner.worker.control.set(Word.COPIED, 6)
        lag = scrape(target_of(tmp_path, "n0-life")[0])["deadpool_rank_generation_lag", "0"]
        await owner.replicated(5)
        metrics.said(m.CopyDamaged(0, 5, 3, "n0-life", "text"))
        metrics.said(m.WriteFailed(1, 0, "medium", "full"))
        metrics.said(m.SnapshotWritten(2, 0, m.DurableFile(123, 0, "")))
        found, of_holder = (scrape(target_of(tmp_path, name)[0]) for name in ("n0-life", "n1-life"))
        assert lag == 6  # nothing was acknowledged yet, and words are generations plus one
        moved = PAYLOAD + len(b"metadata")
        expected = {
            ("deadpool_d2h_seconds_count",): 1,
            ("deadpool_h2h_seconds_count",): 1,
            ("deadpool_d2h_bytes_total",): moved,
            ("deadpool_h2h_bytes_total",): moved,
            ("deadpool_slot_bytes",): 2 * SLOT,
            ("deadpool_replica_bytes",): 0,
            ("deadpool_rank_copied_generation", "0"): 5,
            ("deadpool_rank_replicated_generation", "0"): 5,
            ("deadpool_rank_generation_lag", "0"): 0,
            ("deadpool_copies_damaged_total",): 1,
            ("deadpool_durable_writes_total", "failed"): 1,
            ("deadpool_durable_write_bytes_total",): 123,
        }
        assert {key: found.get(key) for key in expected} == expected
        assert found["deadpool_d2h_seconds_sum",] >= 0.05 and found["deadpool_coordinator_age_seconds",] > 1.9
        assert of_holder["deadpool_replica_bytes",] == 2 * SLOT
        # The same generation once more, complete under its header: nothing was copied, and the holder has it already.
        owner.worker.control.set(Word.ACKNOWLEDGED, 0)
        owner.replicator.begin(owner.worker, membership, 5, keep=-1)
        await owner.replicated(5)
        again = scrape(target_of(tmp_path, "n0-life")[0])
        assert (again["deadpool_d2h_seconds_count",], again["deadpool_h2h_bytes_total",]) == (1, moved)
        metrics.close().join(), held.close().join()
        await owner.transport.close(), await holder.transport.close()

    asyncio.run(asyncio.wait_for(test(), 30))


# ---- status


@on_a_loop
async def test_status_has_holders_losses_and_recoveries_with_their_reasons(tmp_path):
    async with Running(tmp_path) as job:
        (tmp_path / "job.json").write_bytes(msgspec.json.encode(Job(job.address, RUN, os.getpid())))
        loop = asyncio.get_running_loop()
        early = await loop.run_in_executor(None, call, tmp_path, None, False, True)
        assert (early.committed, early.generation_lag, early.ranks, early.recoveries) == (-1, None, [], [])
        assert "committed none yet" in describe(early) and "recoveries: none" in describe(early)
        a, c = await train_lose_and_recover(job)
        a.say(m.Heartbeat(2, {0: m.Progress(2, 1, 11)}), m.Acknowledged(0, 1, 2))
        c.say(m.Acknowledged(1, 1, 2), step(2, 2), step(3, 2))
        await until(lambda: job.coordinator.control.newest_step == 3 and job.coordinator.control.committed == 1)
        await until(lambda: 0 in job.coordinator.control.hang.progress)
        found = await loop.run_in_executor(None, call, tmp_path, None, False, True)
        assert found.nodes == {"a": [0], "c": [1]} and (found.step, found.generation_lag, found.world_size) == (3, 2, 2)
        assert found.ranks == [wire.RankStatus(0, "a", 0, 2, "forward", ["c"]), wire.RankStatus(1, "c", 0, None, "", ["a"])]
        assert {agent.node: agent.state for agent in found.agents} == {"a": "active", "c": "active"}
        assert [(lost.node, "its connection closed" in lost.reason) for lost in found.lost] == [("b", True)]
        (done,) = found.recoveries
        assert (done.kind, done.nodes_lost, done.reasons, done.generation) == ("swap", ["b"], ["its connection closed"], 1)
        assert done.phases["rebuild_s"] == 0.1 and found.recoveries_total == found.nodes_lost_total == 1
        said = describe(found)
        assert "a: rank 0; holds the replicas of rank 1" in said and "committed 1 (2 behind)" in said
        assert re.search(r"swap: the loss of b, -?\d+\.\d\d s \(detect .*\), from generation 1; 1 completed steps ran again", said)
        assert "because its connection closed" in said
        brief = await loop.run_in_executor(None, call, tmp_path)  # what inject and save ask for: no lists
        assert (brief.ranks, brief.recoveries, brief.recoveries_total) == ([], [], 1)
        for agent in (a, c):
            await agent.close()


@on_a_loop
async def test_watching_on_a_terminal_is_one_picture_that_changes_until_the_job_ends(tmp_path, capsys):
    async with Running(tmp_path) as job:
        path, screen = tmp_path / "job.json", io.StringIO()
        path.write_bytes(msgspec.json.encode(Job(job.address, RUN, os.getpid())))
        console = Console(file=screen, force_terminal=True, width=120)
        watching = asyncio.get_running_loop().run_in_executor(None, show_status, tmp_path, False, True, console)
        await until(lambda: "gathering" in screen.getvalue())
        agents = [Speaker(job, node) for node in ("a", "b")]
        await until(lambda: "b: rank 1; holds the replicas of rank 0" in screen.getvalue())
        path.unlink()
        await watching
        assert "\x1b[1A" in screen.getvalue()  # the picture before is overwritten
        assert "no job runs in" in capsys.readouterr().err
        for agent in agents:
            await agent.close()


def test_the_largest_status_fits_into_one_message():
    """Bounded lists; `nodes` grows with the job: 12,500 nodes of 8 ranks here."""
    from megatron.hotswap.coordinator import status as bounds

    name, reason = "rack-12-node-1234.cluster.example", "x" * 300
    rank = wire.RankStatus(99_999, name, 7, 1_000_000, "param-gather", [name])
    done = wire.RecoveryStatus(1e9, "swap", [name] * 8, list(range(64)), [reason] * 8, 10**6, 1, 1.0, {"first_step_s": 1.0})
    largest = wire.Status(
        True,
        reason,
        nodes={f"{name}{i}": list(range(8 * i, 8 * i + 8)) for i in range(12_500)},
        ranks=[rank] * bounds.RANKS_MAX,
        agents=[wire.NodeStatus(name, "starting", 0.123)] * bounds.AGENTS_MAX,
        recoveries=[done] * bounds.RECOVERIES_MAX,
    )
    assert len(wire.encode(largest)) < wire.MESSAGE_BYTES_MAX


def test_the_schema_of_status_is_documented_and_stable():
    """A field that is taken away or renamed takes another STATUS_SCHEMA: programs read these."""
    assert wire.STATUS_SCHEMA == 1
    for kind in (wire.Status, wire.RankStatus, wire.NodeStatus, wire.LostStatus, wire.RecoveryStatus):
        missing = [name for name in kind.__struct_fields__ if f"`{name}`" not in DOCS]
        assert not missing, f"docs/watching.md does not say what {missing} of {kind.__name__} are"


# ---- events, and what the docs say of them


def logs():
    """(file, line, kind, arguments) of every line for events.jsonl that the code can write."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in ("Log", "Note") and node.args:
                kind = node.args[0]
                if isinstance(kind, ast.Constant):
                    yield path.name, node.lineno, kind.value, node
                elif ast.unparse(kind) == "injection.action":
                    yield from ((path.name, node.lineno, fault, node) for fault in m.CABLE_FAULTS)
                else:  # a line that is passed on
                    assert ast.unparse(kind) in ("event.kind", "log.kind"), (path.name, ast.unparse(node))


def test_every_kind_of_event_is_known_and_documented():
    assert {kind for _, _, kind, _ in logs()} == EVENT_KINDS
    rows = re.findall(r"^\| (`[a-z`, -]+) \|", DOCS.split("## Events")[1], re.M)
    table = {kind for row in rows for kind in re.findall(r"`([a-z-]+)`", row)}
    assert table == EVENT_KINDS, "docs/watching.md says what each kind means"


def test_every_decision_has_its_evidence():
    """A line in events.jsonl has a reason in words and, but for an agent's note (which gets its node), data."""
    bare = [f"{file}:{line}: {kind}" for file, line, kind, node in logs() if ast.unparse(node.func) == "Log" and len(node.args) < 3]
    assert not bare


def test_every_metric_is_documented_with_its_type(tmp_path):
    control = Control(ControlConfig(RUN, "token", Grid(2), 2, 0))
    registries = [CoordinatorMetrics(control, Recorder(tmp_path)).registry]
    registries.append(AgentMetrics([], ReplicaStore(RUN, lambda wanted: None), lambda: 0.0).registry)
    families = [family for registry in registries for family in registry.collect() if family.name.startswith("deadpool_")]
    assert len(families) > 35
    for family in families:
        name = family.name + ("_total" if family.type == "counter" else "")
        rows = [line for line in DOCS.splitlines() if line.startswith("|") and re.search(rf"`{name}[`{{]", line)]
        assert rows and all(f"| {family.type} |" in row for row in rows), f"docs/watching.md: {name}, a {family.type}"
        assert name.endswith(("_seconds", "_bytes", "_total")) or family.type == "gauge"


# ---- TensorBoard


class Lines:
    """A writer as Megatron hands it out."""

    def __init__(self):
        self.lines = []

    def add_scalar(self, name, value, iteration):
        self.lines.append((name, value, iteration))


def test_scalars_go_through_the_writer_and_nothing_goes_without_one():
    scalars, writer = Scalars(), Lines()
    scalars.write(None, 1, 0.5, 0)
    scalars.write(writer, 1, 0.5, -1)
    assert writer.lines == [("hot-swap/exposed-stall-seconds", 0.5, 1), ("hot-swap/recoveries", 0, 1)]
    scalars.recovered(1.5)
    scalars.recovered(0.25)
    writer.lines.clear()
    scalars.write(writer, 2, None, 1)
    scalars.write(writer, 3, None, 2)
    told = [("committed-generation", 1, 2), ("recoveries", 2, 2), ("recovery-seconds", 1.75, 2)]
    told += [("committed-generation", 2, 3), ("recoveries", 2, 3)]
    assert writer.lines == [(f"hot-swap/{name}", value, iteration) for name, value, iteration in told]
