"""The agent's threads are there from the start."""

import threading

from megatron.hotswap.agent.pool import started_pool


def pool_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("deadpool-pool")}


def test_work_starts_no_more_threads():
    with started_pool() as pool:
        before = pool_threads()
        assert before
        full = threading.Barrier(len(before))
        for done in [pool.submit(full.wait, 60) for _ in before]:  # all at once: as much as there can be
            done.result()
        assert pool_threads() == before
    assert not pool_threads()
