"""Detection on a machine that has far more to do than it can: nobody is given up, nothing is recovered."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hot_swap_job import GRIDS, argv, events, run_job, steps

MINUTES = 15
#: Processes that only compute, for each core: with the job's own the machine's load is well above three.
BUSY_PER_CORE = 3

pytestmark = [
    pytest.mark.timeout(3000),
    pytest.mark.skipif(os.environ.get("DEADPOOL_FULL_MATRIX") != "1", reason="takes a quarter of an hour: make test-all"),
]


def compute() -> None:
    while True:
        pass


@contextlib.contextmanager
def stress() -> Iterator[None]:
    """Keep every core busy."""
    context = multiprocessing.get_context("fork")
    busy = [context.Process(target=compute, daemon=True) for _ in range(BUSY_PER_CORE * len(os.sched_getaffinity(0)))]
    for process in busy:
        process.start()
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.join()


def test_a_quarter_of_an_hour_under_stress_gives_nobody_up(tmp_path: Path) -> None:
    """With the deadlines that a user gets: a lease of 3 s."""
    case = GRIDS["tp2-dp2"]
    defaults = "--hot-swap-lease-s 3 --hot-swap-collective-timeout-s 20 --hot-swap-halt-timeout-s 45"
    command = [*argv(case, 1_000_000, None), *defaults.split(), "--exit-duration-in-mins", str(MINUTES)]
    with stress():
        summary = run_job(case, tmp_path / "run", command, spares=1)
    assert summary["exit_code"] == 0, summary["ended"]
    assert summary["recoveries"] == []
    for kind in ("node-lost", "worker-lost", "recovery", "error", "unhealthy"):
        assert not events(tmp_path / "run", kind)
    assert len(steps(tmp_path / "run")) > 100
