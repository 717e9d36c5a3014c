"""The scaling study on this machine, whole: `python tools/scaling sweep --local` on its smallest point."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCALING = [sys.executable, str(ROOT / "tools/scaling")]
SMALLEST = ["--only", "tiny-0002", "--pairs", "1", "--warm-up", "2", "--steps", "6", "--after", "2"]
_TIMEOUT_S = 300.0


def call(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SCALING, *words], capture_output=True, text=True, timeout=_TIMEOUT_S)


def figures_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "figures.json").read_text())["points"][0]
    return found


@pytest.mark.skipif(os.environ.get("DEADPOOL_FULL_MATRIX") != "1", reason="takes about a minute: DEADPOOL_FULL_MATRIX=1")
def test_a_sweep_on_this_machine(tmp_path: Path) -> None:
    """Laid out, run, followed, collected, drawn. A run whose result is taken away is made again, and no other."""
    folder = tmp_path / "sweep"
    done = call("sweep", str(folder), "--local", *SMALLEST)
    assert done.returncode == 0, done.stdout + done.stderr + (folder / "tiny-0002/local.out").read_text()
    assert "tiny-0002: running, 1/2 runs" in done.stdout and "tiny-0002: done, 2/2 runs" in done.stdout
    figures = figures_of(folder)
    (swap,), (plain,) = figures["hot_swap"].values(), figures["plain"].values()
    assert figures["missing"] == [] and len(figures["step_ratios"]) == 1
    assert swap["recovery"]["nodes_lost"] == ["node1"] and swap["recovery"]["kind"] == "swap"
    assert 0 < swap["recovery"]["total_s"] < plain["restart"]["total_s"]
    assert all(seconds > 0 for seconds in plain["restart"]["phases"].values())
    # What one node holds is what the plan says, but for metadata, of which the plan has an upper bound.
    assert 0.9 * figures["planned_host_bytes"] < swap["host_bytes"] <= figures["planned_host_bytes"]
    pair = folder / "tiny-0002/pair-1"
    assert not (pair / "plain/checkpoint").exists(), "a checkpoint is removed once its restart is measured"
    for name in ("report.md", "steps.png", "recovery.png", "memory.png"):
        assert (folder / name).stat().st_size > 0

    (pair / "plain/result.json").unlink()
    before = (pair / "hot-swap/result.json").read_bytes()
    assert call("report", str(folder)).returncode == 1
    again = call("sweep", str(folder), "--local", *SMALLEST)
    assert again.returncode == 0, again.stdout + again.stderr
    assert (pair / "hot-swap/result.json").read_bytes() == before and (pair / "plain/result.json").is_file()
    assert "pair-1/hot-swap: done before" in (folder / "tiny-0002/local.out").read_text()


def test_a_sweep_that_is_ended_ends_its_jobs_and_goes_on_later(tmp_path: Path) -> None:
    """Ctrl-C while a job starts: nothing is left (conftest looks), no result is written, and the point is said not to be over."""
    folder = tmp_path / "sweep"
    words = [*SCALING, "sweep", str(folder), "--local", *SMALLEST]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True) as sweep:
        deadline = time.monotonic() + _TIMEOUT_S
        while not (folder / "tiny-0002/pair-1/hot-swap/run/job.json").is_file():
            assert time.monotonic() < deadline and sweep.poll() is None
            time.sleep(0.1)
        family = psutil.Process(sweep.pid).children(recursive=True)
        os.killpg(sweep.pid, signal.SIGINT)
        assert sweep.wait(_TIMEOUT_S) != 0
    gone, left = psutil.wait_procs(family, timeout=30)
    assert len(gone) >= 2 and not left
    done = call("report", str(folder))
    assert done.returncode == 1 and "tiny-0002/pair-1/hot-swap: is not over" in done.stdout


def test_a_run_that_takes_too_long_fails_alone_with_its_reason(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    done = call("sweep", str(folder), "--local", *SMALLEST, "--run-limit-s", "1")
    assert done.returncode == 1
    for kind in ("hot-swap", "plain"):
        assert f"- tiny-0002/pair-1/{kind}: failed: it was ended after 1 s (--run-limit-s)" in done.stdout
