"""Many schedules, with what the processors have left: beside tests that mostly wait, they cost no time.

    python tests/sim/sweep.py FIRST COUNT

Exit code 1 where a guarantee does not hold; its seed is said (`PYTHONPATH=. python tests/sim/sim_driver.py SEED` repeats it).
"""

from __future__ import annotations

import collections
import concurrent.futures
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sim_driver import simulate

from megatron.hotswap.processes import die_with_parent

CHUNK = 500
SAID_EVERY = 20_000


def yield_to_all(parent: int) -> None:
    """This process runs where nobody else wants to, and ends with the one that has started it."""
    die_with_parent(parent)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def sweep(seeds: range) -> tuple[collections.Counter[str], list[str]]:
    """How these schedules ended, and what was broken by which."""
    endings: collections.Counter[str] = collections.Counter()
    broken = []
    for seed in seeds:
        try:
            endings[str(simulate(seed).exit_code)] += 1
        except Exception as violation:  # whatever a schedule brings out of the real parts is one
            broken.append(f"schedule {seed}: {type(violation).__name__}: {violation}")
    return endings, broken


def main(first: int, count: int) -> int:
    """Run them on every core; returns the exit code."""
    chunks: Iterable[range] = (range(i, min(i + CHUNK, first + count)) for i in range(first, first + count, CHUNK))
    began, endings, broken = time.monotonic(), collections.Counter[str](), list[str]()
    with concurrent.futures.ProcessPoolExecutor(initializer=yield_to_all, initargs=(os.getpid(),)) as pool:
        for found, bad in pool.map(sweep, chunks):
            before, endings = endings.total(), endings + found
            broken += bad
            for text in bad:
                print(f"sweep: {text}", flush=True)
            if endings.total() // SAID_EVERY > before // SAID_EVERY:
                print(f"sweep: {endings.total()} schedules, {time.monotonic() - began:.0f} s", flush=True)
    print(f"sweep: {endings.total()} schedules from {first} on, {len(broken)} broke a guarantee; exit codes {dict(endings)}", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
