"""NVML of two GPUs, for agents of a job on a machine that has none: a file says which Xid the second of them has, and when."""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).resolve().parents[2] / "unit"))

from fake_nvml import FakeNvml


class Nvml(FakeNvml):
    """An Xid is told once, as NVML does."""

    told = False

    def nvmlEventSetWait_v2(self, events, timeout_ms):
        path = Path(os.environ["XIDS"]) / f"sick-{os.environ['DEADPOOL_NODE']}"
        deadline = time.monotonic() + timeout_ms / 1000
        while self.told or not path.exists():
            if time.monotonic() > deadline:
                raise self.NVMLError(self.NVML_ERROR_TIMEOUT)
            time.sleep(0.02)
        self.told = True
        return SimpleNamespace(device=1, eventType=self.nvmlEventTypeXidCriticalError, eventData=int(path.read_text()))


_nvml = Nvml()


def __getattr__(name):
    return getattr(_nvml, name)
