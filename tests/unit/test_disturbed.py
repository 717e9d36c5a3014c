"""What benchmarks/recovery.py, goodput.py and inprocess.py read out of runs that were disturbed."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import disturbed  # noqa: E402
import goodput  # noqa: E402
import inprocess  # noqa: E402
import recovery  # noqa: E402


def _write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _step(step: int, t: float, loss: str = "0x1p0", **more: Any) -> dict[str, Any]:
    return {"step": step, "t": t, "step_s": 1.0, "loss_hex": {"lm loss": loss}, "grad_norm_hex": None, "consumed_samples": step, **more}


def test_the_first_new_step_is_the_first_one_never_completed_before(tmp_path: Path) -> None:
    """Step 8 was new after the first restart, and ran again after the second: its first time counts."""
    _write(tmp_path / "injections.jsonl", [{"t": 100.0, "step": 8}, {"t": 120.0, "step": 9}])
    _write(tmp_path / "steps.jsonl", [_step(8, 130.0, first_t=112.0, again=1, same_bits=True), _step(9, 133.0)])
    line = {"kind": "restart", "phases": {}, "total_s": 9.0, "normal_step_s": 1.0, "attempts": 1}
    recoveries = [{**line, "generation": 5, "steps_rerun": 2}, {**line, "generation": 5, "steps_rerun": 3}]
    found = recovery.measured(tmp_path, {"recoveries": recoveries}, ["node killed", "node killed"])
    assert [row["to_new_step_s"] for row in found] == [11.0, 12.0]
    with pytest.raises(ValueError, match="3 faults were wanted, 2 struck, and there were 2 recoveries"):
        recovery.measured(tmp_path, {"recoveries": recoveries}, ["node killed"] * 3)


def test_steps_that_differ_are_counted_between_runs_and_within_one(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    _write(a / "steps.jsonl", [_step(1, 0.0), _step(2, 1.0), _step(3, 2.0)])
    _write(b / "steps.jsonl", [_step(1, 0.0), _step(2, 1.0)])
    assert disturbed.difference([a, b]) == (2, 0)
    _write(b / "steps.jsonl", [_step(1, 0.0, "0x1.8p0"), _step(2, 1.0, again=1, same_bits=False)])
    assert disturbed.difference([a, b]) == (2, 2)


def test_the_schedule_of_losses_is_the_seeds_and_keeps_its_distance() -> None:
    first, again, other = (goodput.schedule(300, 10, seed) for seed in (7, 7, 8))
    key = [(f.action, f.scope, f.rank, f.at_step, f.phase) for f in first]
    assert key == [(f.action, f.scope, f.rank, f.at_step, f.phase) for f in again]
    assert key != [(f.action, f.scope, f.rank, f.at_step, f.phase) for f in other]
    at = [f.at_step for f in first]
    assert at[0] >= goodput.FIRST_LOSS and at[-1] < 300
    assert all(b - a >= goodput.APART_STEPS for a, b in pairwise(at))
    with pytest.raises(ValueError, match="do not fit into 50 steps"):
        goodput.schedule(50, 10, 7)


def test_what_a_save_costs_is_the_longer_gap_behind_it(tmp_path: Path) -> None:
    t, lines = 0.0, []
    for step in range(1, 21):
        t += 1.0 + (0.25 if step % 5 == 1 and step > 1 else 0.0)  # the step behind a save ends later
        lines.append(_step(step, t))
    _write(tmp_path / "steps.jsonl", lines)
    assert goodput.save_s(tmp_path, 5) == pytest.approx(0.25)
    assert goodput.wall_s(tmp_path) == pytest.approx(20.75)
    steps, mtbf_s = goodput.best_interval(0.25, 1.0, 300.0, 10)
    assert mtbf_s == 30.0 and steps == 4  # sqrt(2 x 0.25 x 30) = 3.9, and Daly's terms


LOG_REFUSED = """\
  File "/x/site-packages/megatron/core/dist_checkpointing/strategies/torch.py", line 64, in <module>
  File "/x/site-packages/megatron/core/dist_checkpointing/strategies/nvrx.py", line 85, in is_nvrx_min_version
AttributeError: module 'nvidia_resiliency_ext' has no attribute '__version__'
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
LOG_BLOCKED = """\
in-process: rank 1 raises in step 8, t 10.500
x wrap.py:653 [2026] rank=1 exit_ex: HealthCheckError()
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 2935 in _coalescing_manager
  File "/x/site-packages/megatron/core/distributed/param_and_grad_buffer.py", line 702 in start_grad_sync
  File "/x/site-packages/megatron/training/training.py", line 2407 in train_step
[rank1]: RuntimeError: an error on purpose
"""
LOG_RESTARTED = """\
in-process: rank 1 raises in step 8, t 10.500
in-process: step 8 is complete, t 14.000
in-process: trained to the end
in-process: trained to the end
"""


def test_how_far_an_in_process_restart_came_is_read_from_its_log() -> None:
    refused, blocked, restarted = (inprocess.read("it", "0", log) for log in (LOG_REFUSED, LOG_BLOCKED, LOG_RESTARTED))
    assert refused.told.startswith("AttributeError")
    assert refused.stopped_at.startswith("megatron/core/dist_checkpointing/strategies/nvrx.py:85")
    assert (refused.trained, refused.raised, refused.seconds) == (False, False, None)
    assert blocked.raised and blocked.told == "rank=1 exit_ex: HealthCheckError()" and blocked.seconds is None
    assert blocked.stopped_at.startswith("megatron/core/distributed/param_and_grad_buffer.py:702 start_grad_sync < megatron/training")
    assert restarted.trained and restarted.seconds == 3.5
