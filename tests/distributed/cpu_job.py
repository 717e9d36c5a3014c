"""Starts pretrain_gpt.py as a real job of several processes on this machine, and reads back what it computed.

The rendezvous store lives in the test, on a port that the kernel chose, so jobs of different tests cannot meet.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torch.distributed import TCPStore

from megatron.hotswap.device import cpu

ROOT = Path(__file__).parents[2]
PROBE = Path(__file__).parent / "cpu_trainer_probe.py"
JOB_TIMEOUT_S = 240.0
POLL_INTERVAL_S = 0.1

# A model that takes no time to compute but has every part that a large one has.
TINY_MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 4 --lr 1e-3 --use-distributed-optimizer "
    "--tokenizer-type NullTokenizer --vocab-size 255 --log-interval 1 --eval-iters 0 --num-workers 0"
)
MOCK_DATA = "--mock-data --split 99,1,0"


@dataclass(frozen=True)
class Step:
    """One optimizer step as one rank saw it; floats are in hex, so that equal means equal bits."""

    iteration: int
    loss: str
    grad_norm: str


@dataclass(frozen=True)
class JobResult:
    steps: dict[int, list[Step]]
    """By rank. Ranks of the last pipeline stage know the loss, others have "none"."""
    digests: dict[int, dict[str, str]]
    """By rank: hash of each parameter at the end."""
    hot_swap_modules: set[str]
    """What of hot-swap was imported on any rank; "none" where nothing was."""

    @property
    def last_rank(self) -> list[Step]:
        return self.steps[max(self.steps)]


def run_job(ranks: int, flags: str, log_dir: Path) -> JobResult:
    """Train on this many ranks. Raises AssertionError with the end of a rank's output where one fails or none ends in
    time."""
    log_dir.mkdir(parents=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logs = [log_dir / f"rank{rank}.log" for rank in range(ranks)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            with logs[rank].open("wb") as log:
                processes.append(_start(rank, ranks, store.port, flags.split(), log))
        _wait(processes, logs)
    finally:
        for process in processes:
            _end(process)
    return JobResult(
        steps={rank: _read_steps(logs[rank]) for rank in range(ranks)},
        digests={rank: _read_digests(logs[rank]) for rank in range(ranks)},
        hot_swap_modules={words[0] for log in logs for words in _lines(log, "OURS")},
    )


def _start(rank: int, ranks: int, port: int, flags: list[str], log: BinaryIO) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        **cpu.environment(),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is ours: rank 0 is to connect to it, not to open one
    }
    command = [sys.executable, str(PROBE), *flags]
    # A session of its own, so that helpers which a rank starts (checkpoint writers) end with it.
    return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def _wait(processes: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
    deadline = time.monotonic() + JOB_TIMEOUT_S
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                raise AssertionError(f"rank {rank} exited with {code}:\n{_tail(logs[rank])}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            rank = codes.index(None)
            raise AssertionError(f"rank {rank} did not end within {JOB_TIMEOUT_S} s:\n{_tail(logs[rank])}")
        time.sleep(POLL_INTERVAL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a rank and its helpers: its session, which only they are in. Nothing is left of it if all ended by
    themselves."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])


def _read_steps(log: Path) -> list[Step]:
    return [Step(int(iteration), loss, norm) for _, iteration, loss, norm in _lines(log, "PROBE")]


def _read_digests(log: Path) -> dict[str, str]:
    return {name: digest for _, name, digest in _lines(log, "DIGEST")}


def _lines(log: Path, mark: str) -> list[list[str]]:
    lines = (line.split() for line in log.read_text(errors="replace").splitlines())
    return [words[1:] for words in lines if words and words[0] == mark]
