"""What this project does on a GPU, checked and measured on one: python tools/gpu_check.py, under five minutes.

    copy           device to host, the engine's copy queue beside a plain pinned copy of torch
    communicators  abort of NCCL's communicators, new groups, a collective on them, in a world of one rank
    train          a GPT of 1 billion parameters (bf16, distributed optimizer) by Megatron's trainer, with snapshots on and off
                   in turn: ratio of step times and exposed stall; then a snapshot is restored and its step made again

It needs Linux, a GPU, a CUDA toolkit of 12.8 or later to build the engine with, torch, megatron-core, and about 40 GB each of device
and host memory. What is found goes to benchmarks/gpu_check-GPU-COMMIT.json with hardware, driver, versions and commit; nothing is
written that was not measured there.

Exit codes: 0 every part passed; 1 a part failed (the file says which, and how); 77 there is no GPU here, so nothing was checked.

--self-test-on-cpu runs the same parts through the CPU device layer with a tiny model, to test this script. It measures no GPU, and
writes no file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

NO_GPU = 77
#: Seconds for each part, so that one that hangs does not take the others' time.
TIMEOUTS_S = {"copy": 60.0, "communicators": 60.0, "train": 240.0}
COPY_BYTES = 4 << 30
COPY_BYTES_ON_CPU = 32 << 20
_TAIL = 4000


def main() -> int:
    """Check; returns the exit code."""
    options = _options()
    if options.part is not None:
        Path(options.answer).write_text(json.dumps(run_part(options.part, options.self_test_on_cpu)))
        return 0
    if not options.self_test_on_cpu:
        reason = no_gpu_here()
        if reason is not None:
            print(f"no GPU here, so nothing is checked ({reason}); the exit code {NO_GPU} says so")
            return NO_GPU
        build_engine()
    parts = {name: run_in_a_process(name, options.self_test_on_cpu) for name in TIMEOUTS_S}
    failed = [name for name, part in parts.items() if "error" in part or not passed(name, part)]
    for name, part in parts.items():
        print(f"{name}: {'failed' if name in failed else 'passed'}\n" + describe(name, part))
    if options.self_test_on_cpu:
        print("self-test on a CPU: no GPU was measured, no file is written")
    else:
        path = write({"hardware": hardware(), "passed": not failed, "failed": failed, "parts": parts})
        print(f"written: {path.relative_to(ROOT)}")
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check the project on one GPU.", epilog=f"Exit code {NO_GPU}: no GPU here.")
    parser.add_argument("--self-test-on-cpu", action="store_true", help="run the parts on a CPU, tiny; no GPU figures")
    parser.add_argument("--part", choices=sorted(TIMEOUTS_S), help="one part in this process (the script calls itself so)")
    parser.add_argument("--answer", help="where --part writes what it found")
    options = parser.parse_args()
    if (options.part is None) != (options.answer is None):
        parser.error("--part and --answer go together")
    return options


def no_gpu_here() -> str | None:
    """None where torch can use a GPU, else why it cannot."""
    import torch

    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False"
    return None


def build_engine() -> None:
    """Build the engine's CUDA part where it is not built yet, or cannot work."""
    works = "import sys, deadpool_ext; why = deadpool_ext.cuda_unavailable_reason(); print(why or '', file=sys.stderr); sys.exit(bool(why))"
    if subprocess.run([sys.executable, "-c", works], cwd=ROOT, capture_output=True).returncode == 0:
        return
    print("building the engine …", flush=True)
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, check=True)
    again = subprocess.run([sys.executable, "-c", works], cwd=ROOT, capture_output=True, text=True)
    if again.returncode:
        raise SystemExit(f"the engine cannot use the GPU: {again.stderr.strip()[-_TAIL:]}")


def run_part(name: str, on_cpu: bool) -> dict[str, Any]:
    """One part, in this process."""
    if on_cpu:
        from megatron.hotswap.device import cpu

        os.environ.update(cpu.environment())
    import torch

    torch.set_num_threads(1 if on_cpu else torch.get_num_threads())
    import gpu_parts

    if on_cpu and name == "train":
        cpu.install()  # it changes torch, so not before the other parts

    def train() -> dict[str, Any]:
        import gpu_train

        return gpu_train.train(on_cpu)

    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "copy": lambda: gpu_parts.copy_speed(COPY_BYTES_ON_CPU if on_cpu else COPY_BYTES, on_cpu),
        "communicators": lambda: gpu_parts.rebuild_communicators(on_cpu),
        "train": train,
    }
    return parts[name]()


def run_in_a_process(name: str, on_cpu: bool) -> dict[str, Any]:
    """What a part found, or {"error": …}; with its seconds."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, __file__, "--part", name, "--answer", str(answer)]
        if on_cpu:
            command.append("--self-test-on-cpu")
        try:
            run = subprocess.run(
                command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUTS_S[name]
            )
            ended = f"it ended with code {run.returncode}:\n{run.stdout[-_TAIL:]}"
        except subprocess.TimeoutExpired as late:
            output = late.stdout or b""
            ended = f"it did not end in {TIMEOUTS_S[name]} s:\n{output[-_TAIL:].decode(errors='replace')}"
        found: dict[str, Any] = json.loads(answer.read_text()) if answer.is_file() else {"error": ended}
    return {**found, "seconds": time.monotonic() - began}


def passed(name: str, part: dict[str, Any]) -> bool:
    """Whether what had to be equal was. Speeds are reported, not judged."""
    if name != "train":
        return True
    restore = part["restore"]
    changed = restore["tensors_changed_by_the_step"] > 0  # else the comparison would compare nothing
    return bool(changed and restore["tensors_different_after_restore"] == 0)


def describe(name: str, part: dict[str, Any]) -> str:
    """A part in lines."""
    if "error" in part:
        return "  " + part["error"].replace("\n", "\n  ")
    if name == "copy":
        return (
            f"  engine {part['engine_bytes_per_s'] / 1e9:.2f} GB/s from {part['pieces']} tensors, torch's pinned copy "
            f"{part['torch_pinned_bytes_per_s'] / 1e9:.2f} GB/s from one; the same bits"
        )
    if name == "communicators":
        abort = "not run (gloo has none)" if part["abort_s"] is None else f"{part['abort_s']:.3f} s"
        return f"  {part['backend']}: abort {abort}, rebuild {part['rebuild_s']:.3f} s, collectives work again"
    restore = part["restore"]
    again = (restore["loss_first"], restore["norm_first"]) == (restore["loss_again"], restore["norm_again"])
    return (
        f"  {part['parameters'] / 1e9:.4g} billion parameters, snapshots of {part['snapshot_bytes'] / 1e9:.4g} GB (D2H alone, no H2H)\n"
        f"  step {part['step_off_s']:.4f} s without, {part['step_on_s']:.4f} s with snapshots: {part['on_over_off']:.4f} times; "
        f"exposed stall {part['exposed_stall_s']:.4f} s\n"
        f"  restored {restore['bytes'] / 1e9:.4g} GB in {restore['restore_s']:.3f} s: {restore['tensors_different_after_restore']} of "
        f"{restore['tensors']} tensors differ; the step made again has {'the same' if again else 'other'} bits of loss and norm"
    )


def hardware() -> dict[str, Any]:
    """The GPU, its driver, this host, and what is installed."""
    import torch

    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "not known: nvidia-smi did not say"
    return {
        "gpu": device.name,
        "gpu_memory_bytes": device.total_memory,
        "compute_capability": [device.major, device.minor],
        "driver": driver,
        "cpu": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "cuda_of_torch": torch.version.cuda,
        "nccl": list(torch.cuda.nccl.version()),
        "versions": {name: _version(name) for name in ("torch", "megatron-core", "transformer-engine", "apex", "flash-attn", "numpy")},
        "commit": commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str:
    """The commit that was checked, with "-changed" where files differ from it; "unknown" outside a repository."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        changes = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("-changed" if changes.stdout.strip() else "")


def write(report: dict[str, Any]) -> Path:
    """Write the report under benchmarks/."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", report["hardware"]["gpu"]).strip("-")
    path = ROOT / "benchmarks" / f"gpu_check-{name}-{report['hardware']['commit']}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


if __name__ == "__main__":
    sys.exit(main())
