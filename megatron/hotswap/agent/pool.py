"""The agent's threads, for what would hold its loop: a pool for what takes a while, such as the checksums of gigabytes, and threads
of their own for what may never end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def started_pool() -> ThreadPoolExecutor:
    """As large as asyncio's own would become, and with all its threads from the start: that one begins another whenever none is idle, so
    on a full machine an agent would grow for hours (guarantee 8), at moments in which a snapshot waits."""
    count = min(32, (os.cpu_count() or 1) + 4)
    pool = ThreadPoolExecutor(count, thread_name_prefix="deadpool-pool")
    all_there = threading.Barrier(count)
    for _ in range(count):
        pool.submit(all_there.wait)
    return pool


def in_own_thread[T](work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """As run_in_executor, in a thread that nothing waits for, not even the end of the process: a file system or a driver may hang."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, failure: BaseException | None) -> None:
        if done.done():
            return
        if failure is None:
            done.set_result(result)
        else:
            done.set_exception(failure)

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as raised:  # it is the caller's to handle
            failure = raised
        with contextlib.suppress(RuntimeError):  # the agent has ended meanwhile
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done
