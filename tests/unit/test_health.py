"""agent/health.py: the site's health command, and what an agent says of its node."""

import asyncio
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.hotswap.agent import health
from megatron.hotswap.agent.devices import Finding, NotWatched
from megatron.hotswap.agent.health import NodeHealth, run_command
from megatron.hotswap.agent.retold import Retold
from megatron.hotswap.control import messages as m
from megatron.hotswap.processes import adopt_orphans


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("true", ""),
        ("echo all is well; exit 0", ""),
        ("echo first; echo; echo '  no GPU 3 '; echo; exit 1", "no GPU 3 (exit code 1)"),
        ("echo to stderr >&2; exit 2", "to stderr (exit code 2)"),
        ("exit 4", "it said nothing (exit code 4)"),
        ("kill -9 $$", "it said nothing (killed by signal 9)"),
        (r"printf '\033[31mred\033[0m\n'; exit 1", "[31mred[0m (exit code 1)"),
        ("head -c 100000 /dev/zero | tr '\\0' x; echo; echo end; exit 1", "end (exit code 1)"),
    ],
)
def test_the_last_line_of_a_command_that_fails_is_the_reason(command, reason):
    assert run_command(command, 10.0) == reason


def test_an_endless_line_is_cut():
    assert len(run_command("head -c 100000 /dev/zero | tr '\\0' x; exit 1", 10.0)) < 500


def alive(pid):
    return os.path.exists(f"/proc/{pid}") and Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.parametrize("through", [False, True])
def test_a_command_that_hangs_is_ended_with_all_that_it_has_started(tmp_path, through):
    """And so is what it leaves behind when it is through in time: it keeps the output open, and is not waited for."""
    adopt_orphans()
    child = tmp_path / "child"
    began = time.monotonic()
    wait = "exit 0" if through else "wait"
    reason = run_command(f"setsid sleep 60 & echo $! > {child}; echo looking; {wait}", 1.0)
    assert reason == ("" if through else "looking (it did not end within 1 s)")
    assert time.monotonic() - began < (1.0 if through else 5.0)
    assert not alive(int(child.read_text()))


def node_health(monkeypatch, said, command=None, interval_s=0.05, devices=None):
    def no_driver():
        raise NotWatched("")

    monkeypatch.setattr(health, "load_nvml", (lambda: devices) if devices is not None else no_driver)
    config = SimpleNamespace(health_command=command, health_interval_s=interval_s, health_timeout_s=5.0)
    return NodeHealth(config, said.append)


def test_a_node_says_once_that_it_is_unhealthy_and_once_that_it_is_well_again(monkeypatch, tmp_path):
    said = []

    async def test():
        node = node_health(monkeypatch, said, f"cat {tmp_path}/why 2>/dev/null && exit 1; exit 0")
        assert await node.at_start() == ""
        watching = asyncio.get_running_loop().create_task(node.watch())
        for text in ("no disk", None, "no fan"):
            (tmp_path / "why").write_text(text) if text else (tmp_path / "why").unlink()
            await asyncio.sleep(0.5)
        watching.cancel()
        node.close()

    asyncio.run(test())
    unwell = [m.Unhealthy("command", f"{what} (exit code 1)") for what in ("no disk", "no fan")]
    assert said == [unwell[0], m.HealthyAgain("command"), unwell[1]]


def test_a_node_whose_command_fails_at_start_says_why_it_must_not_join(monkeypatch):
    async def test():
        return await node_health(monkeypatch, [], "echo no InfiniBand; exit 3").at_start()

    assert asyncio.run(test()) == "its health command fails: no InfiniBand (exit code 3)"


def test_a_command_that_runs_is_ended_with_its_agent(monkeypatch, tmp_path):
    adopt_orphans()

    async def test():
        second = f"{{ echo $$ > {tmp_path}/pid; sleep 60; }}"
        node = node_health(monkeypatch, [], f"test -e {tmp_path}/began && {second}; touch {tmp_path}/began")
        assert await node.at_start() == ""
        watching = asyncio.get_running_loop().create_task(node.watch())
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.01)
        watching.cancel()
        node.close()

    asyncio.run(asyncio.wait_for(test(), 30))
    assert not alive(int((tmp_path / "pid").read_text()))


class FakeDevices:
    """Says what it is told to say; hangs where that is None."""

    def __init__(self, *looks):
        self.looks = list(looks)

    def begin(self):
        return "1 GPUs are watched by NVML"

    def look(self, wait_s):
        found = self.looks.pop(0) if self.looks else []
        time.sleep(0.02 if found is not None else 0.6)
        return found or []


def test_what_devices_say_is_told_once_and_a_driver_that_hangs_is_evidence(monkeypatch):
    said = []
    sick, warm = Finding("GPU 0 is lost", True), Finding("GPU 0 is hot", False)
    devices = FakeDevices([warm], [], None, [], [sick], [sick])
    monkeypatch.setattr(health, "Devices", lambda nvml, visible: devices)
    monkeypatch.setattr(health, "DRIVER_SILENT_S", 0.2)
    monkeypatch.setattr(health, "_DEVICES_EVERY_S", 0.02)

    async def test():
        node = node_health(monkeypatch, said, devices=object())
        assert await node.at_start() == ""
        watching = asyncio.get_running_loop().create_task(node.watch())
        await asyncio.sleep(1.2)
        watching.cancel()
        node.close()

    asyncio.run(test())
    assert said == [
        m.Note("health-watch", "1 GPUs are watched by NVML"),
        m.Unhealthy("device", "GPU 0 is hot", fatal=False),
        m.Unhealthy("device", "the GPU driver has not answered for 0.2 s"),
        m.HealthyAgain("device"),
        m.Unhealthy("device", "GPU 0 is lost"),
    ]


def test_a_driver_that_hangs_at_start_keeps_the_node_out(monkeypatch):
    monkeypatch.setattr(health, "DRIVER_SILENT_S", 0.1)
    monkeypatch.setattr(health, "Devices", lambda nvml, visible: FakeDevices(None))

    async def test():
        return await node_health(monkeypatch, [], devices=object()).at_start()

    assert asyncio.run(test()) == "a device fails: the GPU driver has not answered for 0.1 s"


def test_what_is_wrong_with_a_node_is_told_again_to_the_next_coordinator():
    """For as long as it is; a warning is a line that was written, or is said among the notes."""
    retold = Retold()
    command, device = m.Unhealthy("command", "no disk"), m.Unhealthy("device", "GPU 0 is lost")
    for said in (m.Unhealthy("command", "no fan"), device, command, m.Unhealthy("device", "hot", fatal=False)):
        retold.said(said)
    retold.halted()
    assert retold.messages() == [device, command]
    retold.said(m.HealthyAgain("device"))
    assert retold.messages() == [command]
