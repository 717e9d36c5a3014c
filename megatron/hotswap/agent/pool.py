"""The agent's thread pool: for what would hold its loop, such as the checksums of gigabytes."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor


def started_pool() -> ThreadPoolExecutor:
    """As large as asyncio's own would become, and with all its threads from the start: that one begins another whenever none is idle, so
    on a full machine an agent would grow for hours (guarantee 8), at moments in which a snapshot waits."""
    count = min(32, (os.cpu_count() or 1) + 4)
    pool = ThreadPoolExecutor(count, thread_name_prefix="deadpool-pool")
    all_there = threading.Barrier(count)
    for _ in range(count):
        pool.submit(all_there.wait)
    return pool
