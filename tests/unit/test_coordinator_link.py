"""agent/coordinator_link.py over real gRPC: coordinators come and go, and what the agent does meanwhile."""

import asyncio
import contextlib
import socket
import time

import pytest

from megatron.hotswap.agent.coordinator_link import Calls, CoordinatorLink
from megatron.hotswap.control import messages as m
from megatron.hotswap.control.config import ControlConfig
from megatron.hotswap.control.state import Phase
from megatron.hotswap.coordinator import clock
from megatron.hotswap.coordinator.service import Coordinator
from megatron.hotswap.coordinator.store import Store
from megatron.hotswap.errors import Fenced
from megatron.hotswap.security import files
from megatron.hotswap.security.authority import issue
from megatron.hotswap.topology.grid import Grid

pytestmark = pytest.mark.timeout(240)
LEASE_S, INTERVAL_S = 0.6, 0.1
WAIT_S = 60.0


async def until(true):
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


class Job:
    """One job's coordinators, one after another, and the links of its agents. Nothing listens at `nowhere`."""

    def __init__(self, run_dir):
        self.run_dir = run_dir
        self.config = ControlConfig("run", issue(run_dir, "run"), Grid(2), 2, 0, lease_s=LEASE_S, heartbeat_interval_s=INTERVAL_S)
        self.shown = files.read(run_dir, "agent", "run")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.nowhere = self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.coordinator = None
        self.agents, self.tasks = [], []

    async def begin(self):
        """A coordinator, at an address of its own."""
        self.coordinator = Coordinator.with_journal(self.config, self.run_dir)
        self.address = await self.coordinator.start("127.0.0.1", 0)

    async def lose(self):
        """It is gone; its journal stays."""
        self.coordinator.leave("the test ends it")
        await self.coordinator.stop()

    def agent(self, node, **options):
        self.agents.append(LinkedAgent(self, node, **options))
        return self.agents[-1]

    async def end(self):
        for agent in self.agents:
            for task in agent.tasks:
                task.cancel()
        await asyncio.gather(*(task for agent in self.agents for task in agent.tasks), return_exceptions=True)
        if self.coordinator is not None and not self.coordinator.deposed:
            self.coordinator.end_job(1, "the test is over")
            await self.coordinator.stop()


class LinkedAgent:
    """As much of an agent as its link asks for."""

    def __init__(self, job, node, timeout_s=WAIT_S):
        self.join = m.Join(m.PROTOCOL, "run", job.shown.token, node, f"{node}-1", 1, f"{node}:1", "")
        self.heard, self.stops, self.step = [], [], 1
        self.version, self.rank = 0, None
        calls = Calls(
            self.obey,
            self.rejoin,
            lambda: {} if self.rank is None else {self.rank: m.Progress(self.step, 1, self.step)},
            self.stops.append,
            lambda: job.address,
        )
        self.link = CoordinatorLink(job.nowhere, job.shown, calls, lease_s=LEASE_S, interval_s=INTERVAL_S, timeout_s=timeout_s)
        self.link.say(self.join)
        self.link.say(m.WorkerReady(0, f"{node}:2"))
        self.talking = asyncio.get_running_loop().create_task(self.link.talk())
        self.tasks = [self.talking, asyncio.get_running_loop().create_task(self.link.beat())]

    def obey(self, message):
        self.heard.append(message)
        if isinstance(message, m.Start):
            self.version = message.membership.version
            (self.rank,) = (r for r, x in enumerate(message.membership.members) if x.incarnation == self.join.incarnation)
        elif isinstance(message, m.Refused):
            raise Fenced(message.reason)

    def rejoin(self, away_s):
        ranks = {} if self.rank is None else {0: self.rank}
        return m.Rejoin(self.join, self.version, ranks, self.link.stopped, away_s)

    def kinds(self):
        return [type(x).__name__ for x in self.heard]


def play(story, tmp_path):
    async def played():
        job = Job(tmp_path)
        try:
            await story(job)
        finally:
            await job.end()

    asyncio.run(played())


async def trained(job):
    """Two agents, told where nobody is, find the coordinator that comes later; their job trains."""
    a, b = job.agent("a"), job.agent("b")
    await asyncio.sleep(0.5)
    await job.begin()
    await until(lambda: a.rank is not None and b.rank is not None)
    return a, b


def test_a_coordinator_that_stood_still_for_its_lease_writes_nothing_down_when_it_goes_on(tmp_path, monkeypatch):
    async def story(job):
        a, b = await trained(job)
        record = m.StepRecord(1, 1, 8, 1.0, 0.0, {"lm loss": (1.0).hex()}, None)
        a.link.say(m.StepDone(record))
        await until(lambda: job.coordinator.recorder.last_step == record)
        before = (tmp_path / "events.jsonl").read_text()
        monkeypatch.setattr(Store, "lost", property(lambda store: "its lease is over"))
        for agent in (a, b):  # said before, and read now: before the next tick
            job.coordinator._apply(job.coordinator.control.handle(agent.join.incarnation, m.Acknowledged(agent.rank, 1, 1), clock.now()))
        assert job.coordinator.control.committed == 1
        assert job.coordinator.deposed == "its lease is over" and job.coordinator.may_lead_again
        await job.coordinator.stop()
        assert (tmp_path / "steps.jsonl").read_text() == "" and (tmp_path / "events.jsonl").read_text() == before

    play(story, tmp_path)


def test_training_goes_on_under_the_next_coordinator(tmp_path, capfd):
    async def story(job):
        a, b = await trained(job)
        a.link.say(m.Acknowledged(a.rank, 3, 1))
        await job.lose()
        b.link.say(m.Acknowledged(b.rank, 3, 1))  # to nobody
        await job.begin()
        await until(lambda: job.coordinator.control.phase is Phase.TRAINING)
        await until(lambda: job.coordinator.control.committed == 3)  # one had heard the one word, and nobody the other
        assert job.coordinator.control.version == 1 and a.stops == b.stops == []
        assert a.kinds().count("Start") == 1

    play(story, tmp_path)
    assert "no coordinator is at" in capfd.readouterr().err


def test_ranks_are_stopped_when_neither_a_coordinator_nor_a_step_is_there(tmp_path):
    async def story(job):
        a, b = await trained(job)
        await job.lose()
        deadline = time.monotonic() + 10 * LEASE_S
        while time.monotonic() < deadline:  # a's ranks complete steps, b's do not
            a.step += 1
            await asyncio.sleep(INTERVAL_S)
        assert a.stops == [] and len(b.stops) == 1 and "no step was completed" in b.stops[0]
        assert b.link.stopped
        await job.begin()
        await until(lambda: job.coordinator.control.phase is Phase.HALTING)
        await until(lambda: "Halt" in b.kinds())
        assert not b.link.stopped

    play(story, tmp_path)


def test_an_agent_ends_when_nobody_is_found_in_time(tmp_path):
    async def story(job):
        agent = job.agent("a", timeout_s=1.0)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.wait([agent.talking]), WAIT_S)
        assert "no coordinator was found for 1 s (--hot-swap-coordinator-timeout-s)" in str(agent.talking.exception())

    play(story, tmp_path)


def test_an_agent_that_was_given_up_is_told_so_by_the_next_coordinator(tmp_path):
    async def story(job):
        _, b = await trained(job)
        b.talking.cancel()
        await asyncio.gather(b.talking, return_exceptions=True)
        await until(lambda: job.coordinator.control.fenced)
        await job.coordinator._first.settle()
        await job.lose()
        await job.begin()
        again = job.agent("b")
        await asyncio.wait_for(asyncio.wait([again.talking]), WAIT_S)
        assert "was given up" in str(again.talking.exception()) or "was fenced" in str(again.talking.exception())

    play(story, tmp_path)
