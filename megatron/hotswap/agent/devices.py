"""The detector of GPUs that are not fit to train, by what the driver says of them (NVML).

A process that dies of a sick GPU would be started again on the same GPU, and die again. The driver knows better, and says so before the
process has even noticed: an Xid error, an uncorrectable memory error, a row that could not be remapped, a device that is off the bus.

Not every Xid is the device's fault. NVIDIA's catalog (https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, Ampere and
newer) names for each what is to be done at once. Those whose answer is to reset the GPU, or to restart the machine, are fatal here. Those
whose answer is to restart the application, or nothing, are a warning: a process that dies of one is started again, as of anything else,
and a node where that happens again is given up by the count (control/ladder.py). So is 74 (NVLink), whose answer depends on registers,
and 109 (a context switch that took too long), which NVIDIA's own device plugin for Kubernetes does not hold against a device.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

#: Xid -> what it means. "Immediate action" in the catalog: RESET_GPU, RESTART_BM (79), RESTART_VM (151), or a reset by its workflow (48).
FATAL_XIDS = {
    46: "the GPU stopped processing",
    48: "double bit ECC error",
    62: "internal micro-controller halt",
    64: "a memory row could not be remapped",
    79: "the GPU has fallen off the bus",
    95: "uncontained memory error",
    110: "security fault",
    119: "GSP does not answer",
    120: "GSP error",
    136: "NVLink training failed",
    140: "unrecovered ECC error",
    143: "the GPU could not be initialized",
    151: "key rotation failed",
    155: "NVLink error",
    156: "resource retirement",
    158: "fatal timeout",
}
#: Where a driver is loaded, one of these is there. Without it NVML's library is not even looked for.
_DRIVER = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
#: A GPU whose temperature goes up and down is not spoken of every time.
_WARN_AGAIN_S = 3600.0
_EVENTS_AT_ONCE = 64


class Finding(NamedTuple):
    """Something that is wrong with a GPU."""

    reason: str
    fatal: bool


class NotWatched(Exception):
    """GPUs are not watched, for this reason."""


def load_nvml() -> Any:
    """The module that speaks to the driver.

    Raises:
        NotWatched: there is no driver, or no such module; the text is empty where there is nothing to watch.
    """
    if not any(path.exists() for path in _DRIVER):
        raise NotWatched("")
    try:
        return importlib.import_module("pynvml")
    except ImportError as missing:
        raise NotWatched(f"GPUs are not watched: {missing}; install nvidia-ml-py, or deadpool[gpu-health]") from missing


class Devices:
    """The GPUs of one node. Every call may hang if the driver does: make them all in one thread that nobody has to wait for."""

    def __init__(self, nvml: Any, visible: Sequence[str] | None) -> None:
        self._nvml = nvml
        self._visible = visible
        self._handles: dict[str, Any] = {}  # name for words -> handle
        self._events: Any = None
        self._ecc: dict[str, int] = {}  # uncorrectable errors when they were last read
        self._warned_s: dict[str, float] = {}

    def begin(self) -> str:
        """Find the GPUs, and have their Xids told; returns what is watched, in words.

        Raises:
            NotWatched: the driver is there and does not let itself be asked.
        """
        try:
            self._nvml.nvmlInit()
            self._handles = self._find()
            self._events = self._nvml.nvmlEventSetCreate()
        except self._nvml.NVMLError as failure:
            raise NotWatched(f"GPUs are not watched: NVML says: {failure}") from failure
        silent = [name for name, handle in self._handles.items() if not self._register(handle)]
        without = f"; without Xid events of {', '.join(silent)}" if silent else ""
        return f"{len(self._handles)} GPUs are watched by NVML{without}"

    def _find(self) -> dict[str, Any]:
        nvml = self._nvml
        every = {f"GPU {index}": nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())}
        if self._visible is None:
            return every
        try:
            return {f"GPU {x}": every[f"GPU {x}"] if x.isdigit() else nvml.nvmlDeviceGetHandleByUUID(x) for x in self._visible}
        except (KeyError, nvml.NVMLError):  # what CUDA may use is said in a way that NVML does not know: better too many than none
            return every

    def _register(self, handle: Any) -> bool:
        try:
            self._nvml.nvmlDeviceRegisterEvents(handle, self._nvml.nvmlEventTypeXidCriticalError, self._events)
        except self._nvml.NVMLError:  # not supported, or lost; `look` finds out which
            return False
        return True

    def look(self, wait_s: float) -> list[Finding]:
        """Wait so long for an Xid, then ask every GPU. What stays wrong is found again each time; warnings are rare."""
        return [*self._xids(wait_s), *(f for name, handle in self._handles.items() for f in self._ask(name, handle))]

    def _xids(self, wait_s: float) -> list[Finding]:
        found: list[Finding] = []
        while len(found) < _EVENTS_AT_ONCE:
            began_s = time.monotonic()
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0 if found else int(1000 * wait_s))
            except self._nvml.NVMLError as failure:
                if failure.value != self._nvml.NVML_ERROR_TIMEOUT:  # it returns at once, so the wait is ours
                    time.sleep(max(0.0, wait_s - (time.monotonic() - began_s)))
                return found
            if event.eventType == self._nvml.nvmlEventTypeXidCriticalError:
                found.append(self._xid(event.eventData, self._name(event.device)))
        return found

    @staticmethod
    def _xid(number: int, name: str) -> Finding:
        if number in FATAL_XIDS:
            return Finding(f"{name}: Xid {number}, {FATAL_XIDS[number]}", True)
        return Finding(f"{name}: Xid {number}, which says nothing against the device by itself", False)

    def _name(self, device: Any) -> str:
        try:
            uuid = self._nvml.nvmlDeviceGetUUID(device)
            return next((name for name, handle in self._handles.items() if self._nvml.nvmlDeviceGetUUID(handle) == uuid), str(uuid))
        except self._nvml.NVMLError:
            return "a GPU that does not tell its name"

    def _ask(self, name: str, handle: Any) -> list[Finding]:
        found: list[Finding] = []
        for question in (self._memory_errors, self._remapped_rows, self._heat):
            try:
                found += question(name, handle)
            except self._nvml.NVMLError as failure:
                if failure.value == self._nvml.NVML_ERROR_GPU_IS_LOST:
                    return [*found, Finding(f"{name} is lost: it has fallen off the bus, or cannot be reached", True)]
                if failure.value == self._nvml.NVML_ERROR_RESET_REQUIRED:
                    return [*found, Finding(f"{name} must be reset before it can be used again", True)]
                if failure.value != self._nvml.NVML_ERROR_NOT_SUPPORTED:
                    found += self._warn(f"{name}: NVML says: {failure}")
        return found

    def _memory_errors(self, name: str, handle: Any) -> list[Finding]:
        """Uncorrectable errors since the driver was loaded; those before this agent began are an earlier job's."""
        nvml = self._nvml
        now = nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        before = self._ecc.setdefault(name, now)
        return [Finding(f"{name}: uncorrectable memory errors since this agent began", True)] if now > before else []

    def _remapped_rows(self, name: str, handle: Any) -> list[Finding]:
        _, _, pending, failure = self._nvml.nvmlDeviceGetRemappedRows(handle)
        if failure:
            return [Finding(f"{name}: a memory row could not be remapped, the GPU has to be replaced", True)]
        return self._warn(f"{name}: a memory row is to be remapped at the next reset of the GPU") if pending else []

    def _heat(self, name: str, handle: Any) -> list[Finding]:
        """Slow, but right: all others wait for it, which the step times show."""
        nvml = self._nvml
        hot = nvml.nvmlClocksThrottleReasonHwThermalSlowdown | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
        if not nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & hot:
            return []
        return self._warn(f"{name} has slowed down because it is too hot")

    def _warn(self, text: str) -> list[Finding]:
        now = time.monotonic()
        if now - self._warned_s.get(text, -_WARN_AGAIN_S) < _WARN_AGAIN_S:
            return []
        self._warned_s[text] = now
        return [Finding(text, False)]
