"""Host memory is four slots a rank, and nothing grows (guarantee 8): benchmarks/memory.py on a short job."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import memory

STEPS, FROM_STEP, WINDOW = 120, 50, 20
#: The allocator's noise over so few steps; what leaks with every step shows in the benchmark's 400.
NOISE_KIB = 2048
#: Threads that move one snapshot come and go with it: a median may find one more on each of the two agents.
MOVING_THREADS = 2
#: Where the system gives huge pages to shared memory, the last one of them is only partly used.
PAGE_MAX_BYTES = 2 << 20


def test_host_memory_is_four_slots_a_rank_and_nothing_grows(tmp_path: Path) -> None:
    found = memory.measure(tmp_path, STEPS, FROM_STEP, WINDOW)
    assert found["own_slots_vs_promised"]["value"] == 1.0, found["own_slots_vs_promised"]["note"]
    for piece in found["slots"]:  # and all of it is there, from the start
        assert piece["bytes"] <= piece["present_bytes"] < piece["bytes"] + PAGE_MAX_BYTES
    assert found["descriptor_growth"]["value"] <= 0
    assert found["thread_growth"]["value"] <= MOVING_THREADS
    assert found["memory_growth_vs_plain_kib"]["value"] <= NOISE_KIB, found["growth_by_process_kib"]
    assert found["agent_growth_kib"]["value"] <= NOISE_KIB, found["growth_by_process_kib"]
    # Each generation was copied, and how long that took is in the summary. No fence waits for the last one: the job may end first.
    assert found["copy"]["generations"] in (STEPS, STEPS + 1)
    assert 0 < found["copy"]["d2h_s"] < found["copy"]["total_s"]
