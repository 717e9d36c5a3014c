"""How far Megatron's own `--inprocess-restart` (nvidia-resiliency-ext) comes on this machine, and where it stops.

    python benchmarks/inprocess.py

The package goes into a folder of its own, never into the environment. Two ranks train a tiny GPT over gloo, wrapped as NVIDIA's own
pretrain_gpt.py wraps it (inprocess_job.py): without a fault, and with an exception in one rank's forward step, first as it is, then without
the package's health checks, which need NVML. What the ranks say, and where one is blocked, goes into the result.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jobs import ROOT, environment

JOB = Path(__file__).resolve().with_name("inprocess_job.py")
PACKAGE = "nvidia-resiliency-ext"
#: What release 0.7 imports, less what the environment has.
NEEDS = ("defusedxml", "pynvml", "nvidia-ml-py", "pyyaml", "httpx", "fastapi", "pydantic-settings", "slowapi", "uvicorn")
#: Its newest wheels are built for a newer C library than many machines have; its in-process part is Python alone.
NEWEST_WHEEL = ("--only-binary", ":all:", "--platform", "manylinux_2_39_x86_64")
STEPS, RAISES_IN = 12, 8
RUN_TIMEOUT_S, PIP_TIMEOUT_S = 120, 180
_TOLD_CHARS_MAX = 400

MODEL = (
    f"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 "
    f"--global-batch-size 8 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 128 --log-interval 1 --eval-iters 0 "
    f"--split 90,9,1 --num-workers 0 --train-iters {STEPS} --use-distributed-optimizer --save-interval 5 --ckpt-format torch "
    "--inprocess-restart --inprocess-active-world-size 2 --inprocess-granularity rank --inprocess-soft-timeout 20 "
    "--inprocess-hard-timeout 30 --inprocess-heartbeat-interval 5 --inprocess-heartbeat-timeout 20"
)


@dataclass(frozen=True)
class Tried:
    """One attempt."""

    what: str
    version: str
    trained: bool  # to the end
    raised: bool  # the fault struck
    seconds: float | None  # from the exception to the end of the next step, if there was one
    told: str  # why a rank gave up, or the first error that one printed
    stopped_at: str  # file and line of Megatron's, innermost first: of the error, or where a rank stood ten seconds after the fault


def install(folder: Path, *how: str) -> str:
    """Install the package into the folder; returns its version, or why not, in words."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(folder)]
    for words in ((*pip, "--no-deps", *how, PACKAGE), (*pip, *NEEDS)):
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return f"not installed: pip took longer than {PIP_TIMEOUT_S} s"
        if done.returncode:
            return f"not installed: {(done.stderr.strip().splitlines() or ['pip failed'])[-1][:_TOLD_CHARS_MAX]}"
    found = sorted(folder.glob("nvidia_resiliency_ext-*.dist-info"))
    return found[0].name.removeprefix("nvidia_resiliency_ext-").removesuffix(".dist-info")


def attempt(what: str, version: str, package: Path, folder: Path, *, raises: bool, without_nvml: bool = False) -> Tried:
    """Run the job once, to its end or the time limit."""
    folder.mkdir()
    env = environment() | {"TORCH_CPP_LOG_LEVEL": "error", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "TMPDIR": str(folder)}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(package), os.environ.get("PYTHONPATH", "")])
    env |= {"DEADPOOL_BENCH_RAISES_IN": str(RAISES_IN)} if raises else {}
    env |= {"DEADPOOL_BENCH_WITHOUT_NVML": "1"} if without_nvml else {}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    checkpoints = str(folder / "checkpoints")
    command = [*torchrun, "--log-dir", str(folder / "torchrun"), str(JOB), *MODEL.split(), "--save", checkpoints, "--load", checkpoints]
    limit = ["timeout", "--kill-after", "10", str(RUN_TIMEOUT_S)]  # ends the whole group
    done = subprocess.run([*limit, *command], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return read(what, version, done.stdout + done.stderr)


def read(what: str, version: str, log: str) -> Tried:
    """What a log says."""
    raised = re.search(r"in-process: rank \d+ raises in step \d+, t ([0-9.]+)", log)
    behind = log[raised.end() :] if raised else ""
    recovered = re.search(rf"in-process: step {RAISES_IN} is complete, t ([0-9.]+)", behind)
    given_up = re.findall(r"rank=\d+ exit_ex: .*", log)
    errors = re.findall(r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception)\b.*)", log, re.MULTILINE)
    told = given_up or [error for error in errors if "torch.distributed.elastic" not in error and "on purpose" not in error]
    where = re.findall(r'File "[^"]*/(megatron/(?:core|training)/[^"]+)", line (\d+)(,?) in (\w+)', behind or log)
    frames = [(path, line, name) for path, line, comma, name in where if not comma]  # as faulthandler writes them
    frames = frames or [(path, line, name) for path, line, comma, name in where if comma][::-1]
    return Tried(
        what,
        version,
        log.count("in-process: trained to the end") == 2,
        raised is not None,
        float(recovered[1]) - float(raised[1]) if raised and recovered else None,
        told[0][:_TOLD_CHARS_MAX] if told else "",
        " < ".join(list(dict.fromkeys(f"{path}:{line} {name}" for path, line, name in frames))[:4]),
    )


def try_all(folder: Path) -> list[Tried]:
    """One after another, until one stops for a reason that the next would have too."""
    tried: list[Tried] = []
    for name, how in (("pip", ()), ("newest", NEWEST_WHEEL)):
        package = folder / f"nvrx-{name}"
        version = install(package, *how)
        if version.startswith("not installed"):
            tried.append(Tried("install", version, False, False, None, version, ""))
            continue
        tried.append(attempt("no fault", version, package, folder / f"{name}-no-fault", raises=False))
        if tried[-1].trained:
            tried.append(attempt("an exception", version, package, folder / f"{name}-exception", raises=True))
            if not tried[-1].trained:
                what = "an exception, health checks by NVML left out"
                tried.append(attempt(what, version, package, folder / f"{name}-no-nvml", raises=True, without_nvml=True))
            break
    return tried


def figures(folder: Path) -> dict[str, Any]:
    """The figure, null where it does not restart, and all that was tried."""
    tried = try_all(folder)
    last = tried[-1]
    note = f"{last.version}, {last.what}: " + (
        "restarted" if last.seconds is not None else f"stops: {last.told}" + (f"; at {last.stopped_at}" if last.stopped_at else "")
    )
    return {"in_process_restart_s": {"value": last.seconds, "note": note}, "in_process": [asdict(each) for each in tried]}


def main() -> None:
    """Try, and print."""
    with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as folder:
        print(json.dumps(figures(Path(folder)), indent=1))


if __name__ == "__main__":
    main()
