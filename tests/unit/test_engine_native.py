"""The engine's C++ core under the sanitizers, on AArch64, and its CUDA half against a stand-in for the CUDA runtime.

Each test builds a small program of csrc/tests and runs it. Where a compiler or a runtime is missing the test is skipped
and says which: none of that is needed to use Deadpool.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
CORE = [f"{name}.cpp" for name in ("copy_queue", "memory", "rendezvous", "socket_io", "crc32c", "crc32c_x86", "crc32c_arm")]
CUDA = ["copy_queue.cpp", "memory.cpp", "cuda_copy.cpp", "tests/fake_cuda.cpp"]
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
SANITIZERS = ["address,undefined", "thread"]


def run(*command: str | Path, timeout_s: float = 300) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=timeout_s, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(map(str, command))} exited with {done.returncode}:\n{output}"
    return output


def compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        pytest.skip("no C++ compiler here: set CXX or install g++")
    return found


def sanitizing_compiler(sanitizer: str, scratch: Path) -> list[str]:
    """The compiler with its flags, if an empty program built so can run."""
    command = [
        compiler(),
        "-std=c++17",
        "-O0",
        "-g1",
        f"-fsanitize={sanitizer}",
        "-fno-sanitize-recover=all",
        "-pthread",
    ]
    source, program = scratch / "empty.cpp", scratch / "empty"
    source.write_text("int main() { return 0; }\n")
    for step in ([*command, str(source), "-o", str(program)], [str(program)]):
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"the {sanitizer} sanitizer does not work here: {(done.stderr or done.stdout).strip()[-300:]}")
    return command


def cuda_include_folder() -> Path:
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    if nvcc := shutil.which("nvcc"):
        dry_run = subprocess.run(
            [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=False
        )
        roots += re.findall(r"^#\$ TOP=(.+)$", dry_run.stderr, flags=re.MULTILINE)
    for root in filter(None, roots):
        for header in Path(root).glob("**/include/crt/host_defines.h"):
            return header.parents[1]
    pytest.skip("no CUDA headers here: nvcc is not on PATH and CUDA_HOME is not set")


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_core_is_clean_under_sanitizers(sanitizer: str, tmp_path: Path) -> None:
    command = sanitizing_compiler(sanitizer, tmp_path)
    program = tmp_path / "engine_test"
    run(*command, *WARNINGS, CSRC / "tests/engine_test.cpp", *(CSRC / name for name in CORE), "-o", program)
    assert "all passed" in run(program)


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_cuda_half_against_a_stand_in_runtime(sanitizer: str, tmp_path: Path) -> None:
    include = cuda_include_folder()
    command = sanitizing_compiler(sanitizer, tmp_path)
    program = tmp_path / "cuda_copy_test"
    sources = [CSRC / "tests/cuda_copy_test.cpp", *(CSRC / name for name in CUDA)]
    run(*command, "-Wall", "-Wextra", "-Werror", "-isystem", include, *sources, "-o", program)
    assert "all passed" in run(program)


def test_cuda_half_compiles_with_nvcc(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on PATH")
    run(nvcc, "-std=c++17", "-c", CSRC / "cuda_copy.cpp", "-o", tmp_path / "cuda_copy.o")


def test_core_builds_for_aarch64_and_runs_where_an_emulator_is(tmp_path: Path) -> None:
    cross = shutil.which("aarch64-linux-gnu-g++")
    if cross is None:
        pytest.skip("no AArch64 cross-compiler here (Debian: g++-aarch64-linux-gnu)")
    program = tmp_path / "engine_test"
    sources = [CSRC / "tests/engine_test.cpp", *(CSRC / name for name in CORE)]
    run(cross, "-std=c++17", "-O1", *WARNINGS, "-static", "-pthread", *sources, "-o", program)
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None:
        pytest.skip("built for AArch64, but not run: no qemu-aarch64 here (Debian: qemu-user)")
    output = run(emulator, "-cpu", "neoverse-n1", program)  # has the instructions, as every server's processor
    assert "armv8+pmull" in output and "all passed" in output
