"""Guarantee 10: a coordinator is killed, training goes on, another one takes the job up, and a node lost after that is replaced."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hot_swap_job import BY_TWO, ROOT, argv, events, run_job, steps

from megatron.hotswap.cli.launch import Launch, VirtualNodes, prepare
from megatron.hotswap.coordinator.job_file import JOB_FILE, Setup, read_job, write_setup

_ITERATIONS = 40
_PATIENCE_S = 180.0


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def written(run_dir: Path) -> int:
    path = run_dir / "steps.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def coordinator(run_dir: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "megatron.hotswap.coordinator", "--run-dir", str(run_dir)], cwd=ROOT)


def test_training_goes_on_without_a_coordinator_and_another_takes_the_job_up(tmp_path: Path) -> None:
    command, run_dir = argv(BY_TWO, _ITERATIONS, None), tmp_path / "disturbed"
    assert run_job(BY_TWO, tmp_path / "reference", command)["exit_code"] == 0
    launch = Launch(2, BY_TWO.world_size // 2, 1, str(ROOT / "pretrain_gpt.py"), command, run_dir)
    control = prepare(launch)
    write_setup(run_dir, Setup(control))
    serving = coordinator(run_dir)
    nodes: VirtualNodes | None = None
    try:
        until(lambda: read_job(run_dir) is not None)
        job = read_job(run_dir)
        assert job is not None
        nodes = VirtualNodes(launch, job.coordinator, control.run_id)
        for index in range(3):
            nodes.start(f"node{index}")
        until(lambda: written(run_dir) >= 5)
        serving.kill()
        serving.wait()
        (run_dir / JOB_FILE).unlink()
        before = written(run_dir)
        time.sleep(3.0)  # steps are completed meanwhile, which nobody writes down
        serving = coordinator(run_dir)
        until(lambda: written(run_dir) > before + 1)
        nodes.kill("node1")
        assert serving.wait(timeout=_PATIENCE_S) == 0
    finally:
        serving.kill()
        serving.wait()
        if nodes is not None:
            nodes.end()
    assert steps(run_dir) == steps(tmp_path / "reference")
    assert len(events(run_dir, "coordinator-back")) == 1
    (recovered,) = json.loads((run_dir / "summary.json").read_text())["recoveries"]
    assert recovered["kind"] == "swap" and recovered["nodes_lost"] == ["node1"] and recovered["steps_rerun"] <= 1
