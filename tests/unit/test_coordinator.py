"""coordinator/service.py over real gRPC: who is given up for silence, and who is not."""

import asyncio
import os
import signal
import subprocess
import sys
import time

from megatron.hotswap.control.config import ControlConfig
from megatron.hotswap.control.state import Phase
from megatron.hotswap.coordinator.service import Coordinator
from megatron.hotswap.security.authority import issue
from megatron.hotswap.topology.grid import Grid

#: An agent as far as the coordinator sees one: it joins, its worker is warm, then it beats.
_AGENT = """
import asyncio, sys
from pathlib import Path
from megatron.hotswap.control import messages as m
from megatron.hotswap.coordinator import wire
from megatron.hotswap.security import files

async def say(node, shown):
    yield m.Join(m.PROTOCOL, "run", shown.token, node, f"{node}-1", 1, f"{node}:1", "")
    yield m.WorkerReady(0, f"{node}:2")
    while True:
        yield m.Heartbeat(1)
        await asyncio.sleep(INTERVAL)

async def main(address, node, run_dir):
    shown = files.read(Path(run_dir), "agent", "run")
    async with wire.channel(address, shown) as channel:
        call = channel.stream_stream(f"/{wire.SERVICE}/{wire.AGENT_STREAM}", request_serializer=wire.encode)(say(node, shown))
        async for _ in call:
            pass

asyncio.run(main(*sys.argv[1:]))
"""
LEASE_S, INTERVAL_S = 0.9, 0.3
WAIT_S = 60.0


def agent(address: str, node: str, run_dir) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", _AGENT.replace("INTERVAL", str(INTERVAL_S)), address, node, str(run_dir)])


async def until(true) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def story(run_dir) -> None:
    control = ControlConfig("run", issue(run_dir, "run"), Grid(2), 2, 0, lease_s=LEASE_S, heartbeat_interval_s=INTERVAL_S)
    coordinator = Coordinator.with_journal(control, run_dir)
    address = await coordinator.start("127.0.0.1", 0)
    agents = {node: agent(address, node, run_dir) for node in ("a", "b")}
    try:
        await until(lambda: coordinator.control.phase is Phase.TRAINING)
        for pause in (2.0, 0.2, 0.28, 1.0, 0.28, 0.28, 0.28, 3.0):
            time.sleep(pause)  # the loop stands still: nothing is read, and then the timer goes off first
            await asyncio.sleep(0)
            await asyncio.sleep(0.005)
        await asyncio.sleep(2 * LEASE_S)
        assert set(coordinator.control.agents) == {"a-1", "b-1"}
        agents["b"].send_signal(signal.SIGSTOP)
        await until(lambda: set(coordinator.control.agents) == {"a-1"})
        assert "silent for" in coordinator.control.fenced["b-1"]
    finally:
        for process in agents.values():
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        await coordinator.stop()


def test_a_coordinator_that_stands_still_gives_up_only_who_is_silent(tmp_path):
    asyncio.run(story(tmp_path))
