"""coordinator/recorder.py: how long copies took, in the summary."""

from __future__ import annotations

import json

from megatron.hotswap.control.decisions import Log
from megatron.hotswap.control.messages import Acknowledged
from megatron.hotswap.coordinator.recorder import Recorder


def test_the_slowest_rank_of_each_committed_generation_counts(tmp_path):
    recorder = Recorder(tmp_path)
    for generation, slow in enumerate((0.1, 0.3, 0.2)):
        recorder.copied(Acknowledged(0, generation, 1, 0.01, slow))
        recorder.copied(Acknowledged(1, generation, 1, 0.05, 0.02))
        recorder.committed(generation)
    recorder.copied(Acknowledged(0, 3, 1, 9.0, 9.0))  # not committed, and the job goes back: it says nothing
    recorder.rolled_back(2, 2)
    recorder.close(0, "done")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["copy"] == {"d2h_s": 0.05, "h2h_s": 0.2, "total_s": 0.21, "generations": 3}


def test_an_acknowledgement_without_a_copy_is_no_copy(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.copied(Acknowledged(0, 0, 1))
    recorder.committed(0)
    recorder.close(0, "done")
    assert json.loads((tmp_path / "summary.json").read_text())["copy"] is None


def test_every_skipped_generation_is_counted(tmp_path):
    recorder = Recorder(tmp_path)
    for generation in (4, 8):
        recorder.event(Log("generation-skipped", f"generation {generation}: rank 1 still waits", {"generation": generation}))
    recorder.event(Log("resumed", "membership 2 trains on"))
    recorder.close(0, "done")
    assert json.loads((tmp_path / "summary.json").read_text())["generations_skipped"] == 2
