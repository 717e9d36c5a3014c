"""The coordinator with many agents: real gRPC and TLS, real messages, simulated agents that train without training.

    python benchmarks/coordinator.py [--agents 4096] [--clients 2] [--rest-s 15]

The coordinator runs in a process of its own; agents of one rank each are connections of a few client processes. They join, are
warm, get the membership, beat and report acknowledged snapshots; then one connection closes. Measured: processor time of the
coordinator while nothing happens but heartbeats, and the time from the closing until every other agent has heard the halt. All of it
shares this machine's cores, so the clients' own work is in the time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import resource
import secrets
import sys
import tempfile
import time
import zlib
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import psutil

from megatron.hotswap.codec import PACKED
from megatron.hotswap.control import messages as m
from megatron.hotswap.control.state import ControlConfig
from megatron.hotswap.coordinator import wire
from megatron.hotswap.coordinator.service import Coordinator
from megatron.hotswap.security import files as credentials
from megatron.hotswap.security.authority import issue, new_token
from megatron.hotswap.topology.grid import Grid

HEARTBEAT_S = 1.0
LEASE_S = 30.0  # the clients share two cores with what they measure: nobody is to be given up for silence here
JOIN_TIMEOUT_S = 600.0
HALT_TIMEOUT_S = 120.0


def serve(config: ControlConfig, run_dir: Path, link: Connection) -> None:
    """The coordinator's process."""

    async def run() -> None:
        coordinator = Coordinator.with_journal(config, run_dir)
        link.send(await coordinator.start("127.0.0.1", 0))
        await coordinator.ended.wait()

    asyncio.run(run())


class Agent:
    """One simulated agent: a connection of its own, as a real one has."""

    def __init__(self, number: int, run_id: str, shown: credentials.Credentials, address: str) -> None:
        self.name = f"node{number:05d}"
        self._run_id, self._shown, self._address = run_id, shown, address
        self._outbox: asyncio.Queue[m.FromAgent | None] = asyncio.Queue()
        self._channel: grpc.aio.Channel | None = None
        self.started = asyncio.Event()
        self.halted_s: float | None = None
        self.ended = ""

    async def live(self) -> None:
        """Join, and obey."""
        self._channel = wire.channel(self._address, self._shown, ("grpc.use_local_subchannel_pool", 1))
        stream = self._channel.stream_stream(
            f"/{wire.SERVICE}/{wire.AGENT_STREAM}", request_serializer=wire.encode, response_deserializer=lambda raw: raw
        )
        self._outbox.put_nowait(m.Join(m.PROTOCOL, self._run_id, self._shown.token, self.name, f"{self.name}-1", 1, "127.0.0.1:1"))
        self._outbox.put_nowait(m.WorkerReady(0, "store"))
        try:
            async for raw in stream(self._outgoing()):
                # What the membership's thousands of members are is not of interest here, and every client would read all of them.
                head = raw[:16] if raw[:1] != PACKED else zlib.decompressobj().decompress(raw[1:], 16)
                if b"\xa5Start" in head:
                    self.started.set()
                elif b"\xa4Halt" in head:
                    self.halted_s = time.monotonic()
                elif b"\xa7Refused" in head or b"\xa4Stop" in head:
                    self.ended = repr(raw[:300])
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as over:
            self.ended = self.ended or f"{type(over).__name__}: {over}"

    async def _outgoing(self) -> Any:
        while (message := await self._outbox.get()) is not None:
            yield message

    def beat(self, sequence: int, step: int) -> None:
        """Say that it lives, and how far its rank is."""
        rank = int(self.name[4:])
        self._outbox.put_nowait(m.Heartbeat(sequence, {rank: m.Progress(step, 1, step)}))

    async def die(self) -> float:
        """Its connection closes; when."""
        assert self._channel is not None
        now = time.monotonic()
        await self._channel.close()
        return now


def client(numbers: range, run_id: str, run_dir: Path, address: str, link: Connection) -> None:
    """A process full of agents, told what to do by the driver."""
    asyncio.run(_client(numbers, run_id, run_dir, address, link))


async def _client(numbers: range, run_id: str, run_dir: Path, address: str, link: Connection) -> None:
    loop = asyncio.get_running_loop()
    shown = credentials.read(run_dir, "agent", run_id)
    agents = [Agent(number, run_id, shown, address) for number in numbers]
    lives = []
    for i, agent in enumerate(agents):
        lives.append(loop.create_task(agent.live()))
        if i % 32 == 31:
            await asyncio.sleep(0.05)  # a job's nodes do not start in the same millisecond either

    async def beat() -> None:
        for sequence in itertools.count(1):
            due = loop.time()
            for i, agent in enumerate(agents):
                agent.beat(sequence, sequence)
                if i % 64 == 63:  # spread over the interval
                    await asyncio.sleep(due + HEARTBEAT_S * i / len(agents) - loop.time())
            await asyncio.sleep(max(0.01, due + HEARTBEAT_S - loop.time()))

    beating = loop.create_task(beat())
    deadline = loop.time() + JOIN_TIMEOUT_S
    while not all(agent.started.is_set() for agent in agents):
        if any(life.done() for life in lives) or loop.time() > deadline:
            raise RuntimeError(f"not all agents have started: {next((a.ended for a in agents if a.ended), 'no answer')}")
        await asyncio.sleep(0.05)
    link.send("started")
    while (order := await loop.run_in_executor(None, link.recv)) != "end":
        if order == "die":
            link.send(await agents[0].die())
        elif order == "halted":
            waited = agents[1:] if numbers.start == 0 else agents
            deadline = time.monotonic() + HALT_TIMEOUT_S
            while any(a.halted_s is None for a in waited) and time.monotonic() < deadline:
                await asyncio.sleep(0.005)
            link.send([a.halted_s if a.halted_s is not None else a.ended or "heard nothing" for a in waited])
    beating.cancel()
    os._exit(0)


def measure(agents: int, clients: int, rest_s: float) -> dict[str, Any]:
    """One job of so many agents."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as folder:
        run_dir = Path(folder)
        config = ControlConfig(
            secrets.token_hex(8), new_token(), Grid(agents), agents, 0, lease_s=LEASE_S, heartbeat_interval_s=HEARTBEAT_S,
            halt_timeout_s=60.0, hang_min_s=600.0, settle_s=0.0,
        )
        issue(run_dir, config.run_id, token=config.token)
        ours, theirs = context.Pipe()
        serving = context.Process(target=serve, args=(config, run_dir, theirs), daemon=True)
        serving.start()
        address = ours.recv()
        share = -(-agents // clients)
        links, processes = [], []
        began = time.monotonic()
        try:
            for first in range(0, agents, share):
                mine, its = context.Pipe()
                arguments = (range(first, min(agents, first + share)), config.run_id, run_dir, address, its)
                processes.append(context.Process(target=client, args=arguments, daemon=True))
                processes[-1].start()
                links.append(mine)
            for link in links:
                link.recv()
            gathered_s = time.monotonic() - began
            print(f"{agents} agents have joined and started after {gathered_s:.1f} s", file=sys.stderr)
            process = psutil.Process(serving.pid)
            before, since = process.cpu_times(), time.monotonic()
            time.sleep(rest_s)
            after, rested_s = process.cpu_times(), time.monotonic() - since
            cores = (after.user + after.system - before.user - before.system) / rested_s
            links[0].send("die")
            closed_s = links[0].recv()
            for link in links:
                link.send("halted")
            heard = [when for link in links for when in link.recv()]
            lost = [when for when in heard if not isinstance(when, float)]
            if lost:
                raise RuntimeError(f"{len(lost)} of {len(heard)} agents did not hear the halt: {lost[0]}")
            times = sorted(when - closed_s for when in heard)
            return {
                "agents": agents, "gathered_s": round(gathered_s, 2), "cores_at_rest": round(cores, 3),
                "halt_first_s": round(times[0], 4), "halt_median_s": round(times[len(times) // 2], 4), "halt_last_s": round(times[-1], 4),
                "memory_mib": round(process.memory_info().rss / 2**20),
            }
        finally:
            for each in [*processes, serving]:
                each.kill()
                each.join()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=4096)
    parser.add_argument("--clients", type=int, default=2, help="processes that the agents are in")
    parser.add_argument("--rest-s", type=float, default=15.0)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found = measure(options.agents, options.clients, options.rest_s)
    what = f"{found['agents']} agents on {os.cpu_count()} cores, clients included; heartbeats every {HEARTBEAT_S:g} s"
    spread = f"first {found['halt_first_s']} s, median {found['halt_median_s']} s"
    figures = {
        "halt_delivered_s": {"value": found["halt_last_s"], "note": f"{what}; {spread}"},
        "cores_at_rest": {"value": found["cores_at_rest"], "note": what},
    }
    print(json.dumps({**figures, "detail": found}))


if __name__ == "__main__":
    main()
