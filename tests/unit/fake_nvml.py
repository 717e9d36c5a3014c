"""A module that answers as NVML does, for machines without a GPU."""

from types import SimpleNamespace


class FakeNvml:
    """The part of pynvml that is used. `errors` is what a call about a GPU raises: (function, index) -> number."""

    class NVMLError(Exception):
        def __init__(self, value):
            super().__init__(f"NVML error {value}")
            self.value = value

    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_TIMEOUT, NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED = 3, 10, 15, 16
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    nvmlEventTypeXidCriticalError = 8
    nvmlClocksThrottleReasonHwThermalSlowdown, nvmlClocksThrottleReasonSwThermalSlowdown = 0x40, 0x20

    def __init__(self, gpus=2):
        self.gpus, self.errors, self.xids = gpus, {}, []
        self.ecc, self.rows, self.clocks = [5] * gpus, [(0, 0, 0, 0)] * gpus, [0] * gpus

    def _may_fail(self, function, index):
        if (function, index) in self.errors:
            raise self.NVMLError(self.errors[function, index])

    def nvmlInit(self):
        self._may_fail("init", 0)

    nvmlShutdown = nvmlEventSetCreate = lambda self: None

    def nvmlDeviceGetCount(self):
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if not uuid.startswith("GPU-"):
            raise self.NVMLError(6)
        return int(uuid[4:])

    def nvmlDeviceGetUUID(self, handle):
        self._may_fail("uuid", handle)
        return f"GPU-{handle}"

    def nvmlDeviceRegisterEvents(self, handle, kinds, events):
        assert kinds == 8
        self._may_fail("register", handle)

    def nvmlEventSetWait_v2(self, events, timeout_ms):
        if not self.xids:
            raise self.NVMLError(self.NVML_ERROR_TIMEOUT)
        handle, xid = self.xids.pop(0)
        return SimpleNamespace(device=handle, eventType=8, eventData=xid)

    def nvmlDeviceGetTotalEccErrors(self, handle, kind, counter):
        assert (kind, counter) == (1, 0)
        self._may_fail("ecc", handle)
        return self.ecc[handle]

    def nvmlDeviceGetRemappedRows(self, handle):
        self._may_fail("rows", handle)
        return self.rows[handle]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self.clocks[handle]
