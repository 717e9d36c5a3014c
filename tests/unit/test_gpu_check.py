"""tools/gpu_check.py where there is no GPU: it says so with a code of its own, and its parts run, tiny, on the CPU device layer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "gpu_check.py"
#: Under load a start of torch and Megatron takes a minute; each part has a timeout of its own in the script.
TIMEOUT_S = 400.0


def check(*flags: str) -> subprocess.CompletedProcess[str]:
    """In an environment that shows no GPU, whatever this machine has."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), *flags]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)


def reports() -> set[Path]:
    return set((ROOT / "benchmarks").glob("gpu_check-*"))


def test_without_a_gpu_nothing_is_checked_and_nothing_written() -> None:
    before = reports()
    run = check()
    assert run.returncode == 77, run.stderr
    assert run.stdout.startswith("no GPU here, so nothing is checked")
    assert reports() == before


def test_the_parts_run_on_a_cpu_and_restore_the_same_bits() -> None:
    before = reports()
    run = check("--self-test-on-cpu")
    assert run.returncode == 0, run.stdout + run.stderr
    for part in ("copy", "communicators", "train"):
        assert f"{part}: passed" in run.stdout
    assert "0 of 140 tensors differ; the step made again has the same bits of loss and norm" in run.stdout
    assert run.stdout.rstrip().endswith("no GPU was measured, no file is written")
    assert reports() == before


def test_a_part_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import gpu_check

    monkeypatch.setattr(gpu_check, "TIMEOUTS_S", {"copy": 0.01})
    part = gpu_check.run_in_a_process("copy", on_cpu=True)
    assert part["error"].startswith("it did not end in 0.01 s") and part["seconds"] < 30
