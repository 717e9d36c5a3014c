"""A real job under `deadpool run`, its status, a fault, and Ctrl-C, which leaves no process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.hotswap.cli.launch import VirtualNodes

ROOT = Path(__file__).parents[2]
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 100000 --lr 1e-3 --mock-data --split 99,1,0 "
    "--tokenizer-type NullTokenizer --vocab-size 127 --use-distributed-optimizer --log-interval 1 --eval-iters 0 "
    "--num-workers 0"
)
START_TIMEOUT_S = 240.0
END_TIMEOUT_S = 30.0


def deadpool(*arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "megatron.hotswap.cli.main", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )


def ask(*arguments):
    process = deadpool(*arguments)
    said, _ = process.communicate(timeout=60)
    return process.returncode, said


def processes_of(run_id):
    """Whoever has the run in its environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if run_id.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def wait_for_step(run_dir, step):
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        code, said = ask("status", "--run-dir", run_dir, "--json")
        if code == 0 and (status := json.loads(said.splitlines()[-1]))["step"] >= step:
            return status
        time.sleep(0.5)
    raise AssertionError(f"no step {step} within {START_TIMEOUT_S} s: {said}")


@pytest.mark.timeout(400)
def test_status_inject_and_ctrl_c(tmp_path):
    run_dir = tmp_path / "run"
    job = deadpool(
        "run",
        "--nodes",
        2,
        "--ranks-per-node",
        1,
        "--run-dir",
        run_dir,
        "--no-picture",
        "--",
        "pretrain_gpt.py",
        *FLAGS.split(),
    )
    try:
        status = wait_for_step(run_dir, 2)
        assert status["nodes"] == {"node0": [0], "node1": [1]}
        run_id = json.loads((run_dir / "job.json").read_text())["run_id"]
        assert len(processes_of(run_id)) >= 4
        assert ask("inject", "--run-dir", run_dir, "--kill", "node:node9")[0] == 2
        code, said = ask(
            "run", "--nodes", 2, "--ranks-per-node", 1, "--run-dir", run_dir, "--", "pretrain_gpt.py", *FLAGS.split()
        )
        assert (code, "runs in" in said) == (2, True)
        code, said = ask(
            "inject", "--run-dir", run_dir, "--freeze", "worker:node1/0", "--at-step", 10**6, "--phase", "fence"
        )
        assert (code, "in step 1000000, phase fence" in said) == (0, True), said
        job.send_signal(signal.SIGINT)
        out, _ = job.communicate(timeout=END_TIMEOUT_S)
    finally:
        job.kill()
    assert job.returncode == 130, out
    assert processes_of(run_id) == []
    assert not (run_dir / "job.json").exists()
    assert json.loads((run_dir / "summary.json").read_text())["steps"] >= 2
    lines = out.splitlines()
    assert len([line for line in lines if "iteration        1/" in line]) == 1
    assert len([line for line in lines if line == "training ..."]) == 1
    assert not [line for line in lines if "Warning:" in line or "node lost" in line]


def test_nodes_that_end_before_training_are_not_waited_for(tmp_path, monkeypatch, capsys):
    def start(self, node):
        process = subprocess.Popen(
            ["sh", "-c", f"echo the disk of {node} is full >> {self.log(node)}; exit 3"], start_new_session=True
        )
        self._processes.setdefault(node, []).append(process)

    from megatron.hotswap.cli.main import main

    monkeypatch.setattr(VirtualNodes, "start", start)
    command = [
        "run",
        "--nodes",
        "2",
        "--ranks-per-node",
        "1",
        "--run-dir",
        str(tmp_path),
        "--no-picture",
        "--",
        str(ROOT / "pretrain_gpt.py"),
    ]
    monkeypatch.setattr("sys.argv", ["deadpool", *command])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().out
    assert ended.value.code == 1
    assert "node node0 ended with exit code 3 before training began: the disk of node0 is full" in said
