"""Speeds of this machine, measured with the parts that do the work: copy queue, checksum, a TCP connection over loopback.

Each is the best of several runs over blocks larger than the processor's caches.
"""

from __future__ import annotations

import mmap
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

import deadpool_ext

_BLOCK_BYTES = 256 << 20
_RUNS = 5
_TCP_BYTES = 1 << 30
_CHUNK_BYTES = 4 << 20
_TIMEOUT_S = 60.0
#: Reads all that comes and says how much it was; the bytes go straight into one buffer, as the agent's go into a slot.
_SINK = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
view, count = memoryview(bytearray(int(sys.argv[2]))), 0
while (got := connection.recv_into(view)) > 0:
    count += got
print(count)
"""


def measure_here() -> dict[str, float]:
    """Bytes a second: host copy under "d2h", CRC32C of one core under "checksum", loopback TCP under "h2h"."""
    source, target = (np.frombuffer(mmap.mmap(-1, _BLOCK_BYTES), dtype=np.uint8) for _ in range(2))
    for block in (source, target):
        deadpool_ext.prefault(block.ctypes.data, _BLOCK_BYTES)
    source[:] = 7
    return {
        "d2h": _BLOCK_BYTES / _best(lambda: _copy(source, target)),
        "checksum": _BLOCK_BYTES / _best(lambda: deadpool_ext.crc32c(source.ctypes.data, _BLOCK_BYTES)),
        "h2h": _TCP_BYTES / _loopback_s(memoryview(source)),
    }


def _best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def _copy(source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> None:
    flag = np.zeros(1, dtype=np.uint64)
    queue = deadpool_ext.CopyQueue()
    ticket = queue.submit(
        np.array([source.ctypes.data], dtype=np.uint64),
        np.array([target.ctypes.data], dtype=np.uint64),
        np.array([source.nbytes], dtype=np.uint64),
        flag.ctypes.data,
        1,
    )
    if not queue.wait(ticket, _TIMEOUT_S):
        raise OSError(f"copying {source.nbytes} bytes of host memory took longer than {_TIMEOUT_S} s")
    queue.close()


def _loopback_s(block: memoryview) -> float:
    """Seconds until another process has read _TCP_BYTES."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(_TIMEOUT_S)
        port = listener.getsockname()[1]
        sink = subprocess.Popen([sys.executable, "-c", _SINK, str(port), str(_CHUNK_BYTES)], stdout=subprocess.PIPE)
        try:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(_TIMEOUT_S)
                began = time.perf_counter()
                for _ in range(_TCP_BYTES // _CHUNK_BYTES):
                    connection.sendall(block[:_CHUNK_BYTES])
            answer, _ = sink.communicate(timeout=_TIMEOUT_S)
            seconds = time.perf_counter() - began
        finally:
            sink.kill()
            sink.wait()
    if int(answer) != _TCP_BYTES:
        raise OSError(f"{_TCP_BYTES} bytes were sent over loopback and {int(answer)} arrived")
    return seconds
