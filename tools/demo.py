"""make demo: a GPT loses a node in mid-training, and its losses are bit for bit those of a run that did not.

Trains a small GPT on real text (tools/make_corpus.py) on two virtual nodes of two ranks each, three times:

    undisturbed   no fault; writes a checkpoint on the way
    hot-swap      a spare waits; one node is killed by SIGKILL in mid-step, the spare takes its ranks over
    restart       what is done without hot-swap: the command is started anew from that checkpoint, and timed

Then says whether the first two are bit-identical, and sets the time of the recovery beside that of the restart.
Exit code 1 if they are not identical.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import demo_report
from rich.console import Console

from megatron.hotswap.cli.verify import verify_runs

ROOT = Path(__file__).resolve().parents[1]
STEPS = 50
SAVED_STEP = 25
FAULT_STEP = 26  # the step after the checkpoint: the best case for the restart, which then has no step to repeat
KILLED_RANK = 2  # of node1; rank 2 and 3 train there
RESTART_TIMEOUT_S = 300.0
POLL_INTERVAL_S = 0.02

MODEL_FLAGS = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--attention-dropout 0.1 --hidden-dropout 0.1 --tensor-model-parallel-size 2 --use-distributed-optimizer"
)
TRAINING_FLAGS = (
    f"--micro-batch-size 4 --global-batch-size 16 --train-iters {STEPS} --lr 4e-3 --min-lr 4e-4 "
    "--lr-warmup-iters 5 --lr-decay-style cosine --clip-grad 1.0 --log-interval 5 --eval-iters 0 --num-workers 0 "
    "--split 98,1,1 --seed 1234"
)
#: Bytes are their own ids, so no tokenizer is needed: 256 bytes and the end of a document.
TOKEN_FLAGS = "--tokenizer-type NullTokenizer --vocab-size 257 --null-tokenizer-eod-id 256"

console = Console(highlight=False, soft_wrap=True)


class DemoFailed(Exception):
    """A part of the demo ended in a way that leaves nothing to show."""


def say(text: str) -> None:
    """A heading."""
    console.print(f"\n== {text}", style="bold", markup=False)


def prepare_data(folder: Path) -> Path:
    """The corpus as Megatron's .bin and .idx, made once; returns the prefix."""
    prefix = folder / "corpus_text_document"
    if prefix.with_suffix(".idx").is_file() and prefix.with_suffix(".bin").is_file():
        return prefix
    say("data: the English and the code that every Python carries, as bytes")
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus.jsonl"
    tool([str(ROOT / "tools/make_corpus.py"), "--output", str(corpus), "--max-mb", "4", "--overwrite"])
    outputs = ["--output-prefix", str(folder / "corpus"), "--overwrite"]
    how = ["--tokenizer-type", "ByteLevelTokenizer", "--append-eod", "--workers", "2"]
    tool([str(ROOT / "tools/preprocess_data.py"), "--input", str(corpus), *outputs, *how])
    return prefix


def tool(arguments: list[str]) -> None:
    """Run one of the tools."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, check=False)
    if done.returncode:
        raise DemoFailed(f"{' '.join(arguments)} ended with exit code {done.returncode}")


def job(run_dir: Path, ours: list[str], megatron: list[str]) -> list[str]:
    """The command line of one run."""
    flags = f"{MODEL_FLAGS} {TRAINING_FLAGS} {TOKEN_FLAGS}"
    nodes = ["--nodes", "2", "--ranks-per-node", "2", "--run-dir", str(run_dir)]
    return [
        *[sys.executable, "-m", "megatron.hotswap.cli.main", "run", *nodes, *ours],
        *["--", str(ROOT / "pretrain_gpt.py"), *flags.split(), *megatron],
    ]


def run(command: list[str]) -> None:
    """Run a job to its end.

    Raises:
        DemoFailed: it did not end well.
    """
    done = subprocess.run(command, cwd=ROOT, env=environment(), check=False)
    if done.returncode:
        raise DemoFailed(f"the run ended with exit code {done.returncode}; its own words stand above")


def environment() -> dict[str, str]:
    """As this process's, with the project importable from its checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def step_times(run_dir: Path) -> list[tuple[int, float, float]]:
    """(step, when it was complete, its seconds) of the steps that a run has recorded."""
    path = run_dir / "steps.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    steps = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(step["step"], step["t"], step["step_s"]) for step in steps]


def measure_restart(command: list[str], run_dir: Path) -> float:
    """Seconds from starting the command to the end of its first step; then it is ended.

    Raises:
        DemoFailed: there is no step within the time limit.
    """
    shutil.rmtree(run_dir, ignore_errors=True)
    began, deadline = time.time(), time.monotonic() + RESTART_TIMEOUT_S
    process = subprocess.Popen(command, cwd=ROOT, env=environment())
    try:
        while not (steps := step_times(run_dir)):
            if process.poll() is not None or time.monotonic() > deadline:
                raise DemoFailed("the restarted job came to no step; its own words stand above")
            time.sleep(POLL_INTERVAL_S)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
    return steps[0][1] - began


def demonstrate(folder: Path) -> bool:
    """The whole of it; returns whether the runs were bit-identical."""
    data = ["--data-path", str(prepare_data(folder / "data")), "--data-cache-path", str(folder / "data/cache")]
    undisturbed, swapped, restarted = (folder / name for name in ("undisturbed", "hot-swap", "restart"))
    checkpoint = folder / "checkpoint"
    shutil.rmtree(checkpoint, ignore_errors=True)
    began = time.monotonic()
    say(f"1 of 3: an undisturbed run of {STEPS} steps; it writes a checkpoint after step {SAVED_STEP}")
    save = ["--save", str(checkpoint), "--save-interval", str(SAVED_STEP)]
    run(job(undisturbed, [], [*data, *save]))
    (checkpoint / "latest_checkpointed_iteration.txt").write_text(str(SAVED_STEP))
    say(f"2 of 3: the same job with a spare; node1 is killed (SIGKILL) in the backward pass of step {FAULT_STEP}")
    run(job(swapped, ["--spares", "1", "--inject", f"kill:node:{KILLED_RANK}:{FAULT_STEP}:backward"], data))
    say(f"3 of 3: what a restart costs here: the same command, started anew from the checkpoint of step {SAVED_STEP}")
    command = job(restarted, ["--no-picture"], [*data, "--load", str(checkpoint)])
    first_step_s = measure_restart(command, restarted)
    normal_s = statistics.median(seconds for _, _, seconds in step_times(undisturbed))
    found = verify_runs(undisturbed, swapped)
    resumed = verify_runs(undisturbed, restarted, common_only=True)
    demo_report.finish(folder, undisturbed, swapped, max(0.0, first_step_s - normal_s))
    say("result")
    demo_report.show(console, folder, found, resumed)
    console.print(f"Took {time.monotonic() - began:.0f} s without set-up, on {os.cpu_count()} cores.", markup=False)
    return found.identical


def main() -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dir", type=Path, default=ROOT / "runs/demo", help="where everything goes (default: runs/demo)"
    )
    args = parser.parse_args()
    try:
        return 0 if demonstrate(args.dir) else 1
    except DemoFailed as failure:
        console.print(f"demo: {failure}", markup=False, style="bold red")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
