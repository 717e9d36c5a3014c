"""tools/demo_report.py on runs that the real recorder wrote: what `make demo` promises stands in its files, and it draws its picture."""

import io
import json
import sys
from pathlib import Path

from rich.console import Console

from megatron.hotswap.cli import verify
from megatron.hotswap.control import messages as m
from megatron.hotswap.control.decisions import Log
from megatron.hotswap.control.timeline import Recovery
from megatron.hotswap.coordinator.recorder import Recorder

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import demo_report


def write_run(folder, recoveries):
    recorder = Recorder(folder)
    for step in range(1, 9):
        recorder.step(m.StepRecord(step, 1, 16 * step, 0.5, 0.0, {"lm loss": (4.0 - step / 8).hex()}, (1.0).hex()))
        recorder.committed(step)
    for lost in recoveries:
        done = Recovery(10.0, 9.9, [lost], ["its connection closed"], 10.0)
        done.halted_s, done.planned_s, done.restored_s, done.generation = 10.1, 10.1, 10.5, 7
        done.restored[0] = m.Restored(2, 0, 0.2, 0.2, 1000, 1)
        recorder.event(Log("recovered", "swap complete", {"recovery": done.time_line(2, 11.0)}))
    recorder.close(0, "training is done")
    return folder


def test_the_demos_files_and_words(tmp_path):
    undisturbed, swapped = write_run(tmp_path / "undisturbed", []), write_run(tmp_path / "hot-swap", ["node1"])
    found = verify.verify_runs(undisturbed, swapped)
    demo_report.finish(tmp_path, undisturbed, swapped, 20.0)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary) == {"steps", "bit_identical", "recoveries", "restart_baseline_s", "exposed_stall_fraction"}
    assert summary["bit_identical"] is True and summary["restart_baseline_s"] == 20.0
    assert set(summary["recoveries"][0]) == set(demo_report.RECOVERY_KEYS)
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    console = Console(record=True, width=100, file=io.StringIO())
    demo_report.show(console, tmp_path, found, found)
    said = console.export_text()
    assert "bit_identical: true" in said and "Restart from a checkpoint: 20.00 s" in said
