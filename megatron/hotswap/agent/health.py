"""Whether this node is fit to train: what its site's health command says, and what its GPUs say (devices.py).

Both are asked by threads that nobody waits for: a command that hangs in the kernel, or a driver that does not answer, is evidence, and
must neither hold the agent's loop nor its end. The command's processes are found by a variable in their environment, wherever they have
gone; they stay in the agent's process group, so that whatever ends the node as a whole takes them along.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable

from .. import environment
from ..config import HotSwapConfig
from ..control import messages as m
from ..control.sanity import REASON_CHARS_MAX
from ..processes import end_children
from .devices import Devices, Finding, NotWatched, load_nvml
from .pool import in_own_thread

_VARIABLE = ("DEADPOOL_HEALTH", "1")
#: What a command writes is read as it comes, and only its end is kept.
_OUTPUT_BYTES_MAX = 4096
_READS_AT_ONCE = 256
_LOOK_EVERY_S = 0.02
#: After its end, for what it has left behind to end, too.
_END_WITHIN_S = 2.0
#: An Xid is told at once; the rest is asked for this often.
_DEVICES_EVERY_S = 5.0
#: NVML answers in milliseconds, and in seconds where many ask at once.
DRIVER_SILENT_S = 60.0


def run_command(command: str, timeout_s: float) -> str:
    """Run a health command to its end; returns why the node is unhealthy, or nothing. Blocks: call it in a thread of its own."""
    variables = {**os.environ, _VARIABLE[0]: _VARIABLE[1]}
    process = subprocess.Popen(
        ["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=variables
    )
    assert process.stdout is not None
    with process.stdout:
        output, code = _follow(process, process.stdout.fileno(), time.monotonic() + timeout_s)
    ended = end_children("=".join(_VARIABLE), within_s=_END_WITHIN_S)
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    said = "".join(c for c in (lines[-1] if lines else "it said nothing") if c.isprintable())
    if code == 0:
        return ""
    if code is None:
        how = f"it did not end within {timeout_s:g} s" + ("" if ended else ", and cannot be ended")
    else:
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{said[: REASON_CHARS_MAX - 100]} ({how})"


def _follow(process: subprocess.Popen[bytes], pipe: int, deadline_s: float) -> tuple[bytes, int | None]:
    """The end of its output, and its exit code; None if it is not through in time. Its end counts, not that of its output: what it leaves
    behind keeps that open."""
    os.set_blocking(pipe, False)
    output = b""
    while True:
        code = process.poll()
        output = _read_on(pipe, output)
        if code is not None or time.monotonic() > deadline_s:
            return output, code
        time.sleep(_LOOK_EVERY_S)


def _read_on(pipe: int, output: bytes) -> bytes:
    with contextlib.suppress(BlockingIOError):
        for _ in range(_READS_AT_ONCE):
            more = os.read(pipe, _OUTPUT_BYTES_MAX)
            if not more:
                break
            output = (output + more)[-_OUTPUT_BYTES_MAX:]
    return output


class NodeHealth:
    """One per agent; `say` is to the coordinator."""

    def __init__(self, config: HotSwapConfig, say: Callable[[m.FromAgent], None]) -> None:
        self._config = config
        self._say = say
        self._devices: Devices | None = None
        self._watched = ""  # which devices are, or why none, in words
        self._warnings: list[Finding] = []  # before the node has joined
        self._fatal: list[str] = []  # what the devices said
        self._answered_s = 0.0
        self._closed = False

    async def at_start(self) -> str:
        """Ask both, before the node joins; returns why it must not, in words."""
        found = []
        if self._config.health_command is not None:
            reason = await self._ask_command()
            found += [f"its health command fails: {reason}"] if reason else []
        try:
            async with asyncio.timeout(DRIVER_SILENT_S):
                findings = await in_own_thread(self._begin_devices, "health")
        except TimeoutError:
            findings = [Finding(_silent(), True)]
        found += [f"a device fails: {finding.reason}" for finding in findings if finding.fatal]
        self._warnings = [finding for finding in findings if not finding.fatal]
        return "; ".join(found)[:REASON_CHARS_MAX]

    async def watch(self) -> None:
        """For as long as the agent lives, once it has joined."""
        if self._watched:
            self._say(m.Note("health-watch", self._watched))
        for warning in self._warnings:
            self._warn(warning.reason)
        watches = [self._watch_command()] if self._config.health_command is not None else []
        if self._devices is not None:
            self._answered_s = time.monotonic()
            threading.Thread(target=self._look_again, args=(asyncio.get_running_loop(),), name="gpu-health", daemon=True).start()
            watches.append(self._watch_driver())
        await asyncio.gather(*watches)

    def close(self) -> None:
        """The agent ends: so does a command that still runs. A thread that hangs in the driver ends with the process."""
        self._closed = True
        if self._config.health_command is not None:
            end_children("=".join(_VARIABLE), within_s=_END_WITHIN_S)

    # ---- the command

    def _ask_command(self) -> asyncio.Future[str]:
        command, timeout_s = str(self._config.health_command), self._config.health_timeout_s
        return in_own_thread(lambda: run_command(command, timeout_s), "health")

    async def _watch_command(self) -> None:
        before = ""
        while True:
            await asyncio.sleep(self._config.health_interval_s)
            reason = await self._ask_command()
            if reason and reason != before:
                self._say(m.Unhealthy("command", reason))
            elif before and not reason:
                self._say(m.HealthyAgain("command"))
            before = reason

    # ---- the devices

    def _begin_devices(self) -> list[Finding]:
        try:
            devices = Devices(load_nvml(), environment.visible_gpus())
            self._watched = devices.begin()
        except NotWatched as why:
            self._watched = str(why)
            return []
        self._devices = devices
        return devices.look(0.0)

    def _look_again(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._devices is not None
        while not self._closed:
            findings = self._devices.look(_DEVICES_EVERY_S)
            try:
                loop.call_soon_threadsafe(self._answered, findings)
            except RuntimeError:  # the loop is closed: the agent has ended
                return

    def _answered(self, findings: list[Finding]) -> None:
        self._answered_s = time.monotonic()
        if _silent() in self._fatal:
            self._fatal.remove(_silent())
            if not self._fatal:
                self._say(m.HealthyAgain("device"))
        for finding in findings:
            (self._blame if finding.fatal else self._warn)(finding.reason)

    def _warn(self, reason: str) -> None:
        self._say(m.Unhealthy("device", reason[:REASON_CHARS_MAX], fatal=False))

    def _blame(self, reason: str) -> None:
        if reason not in self._fatal:
            self._fatal.append(reason)
            self._say(m.Unhealthy("device", "; ".join(self._fatal)[:REASON_CHARS_MAX]))

    async def _watch_driver(self) -> None:
        while True:
            await asyncio.sleep(_DEVICES_EVERY_S)
            if time.monotonic() - self._answered_s > DRIVER_SILENT_S:
                self._blame(_silent())


def _silent() -> str:
    return f"the GPU driver has not answered for {DRIVER_SILENT_S:g} s"
