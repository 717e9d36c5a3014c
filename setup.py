"""Builds the compiled engine; everything else about the package is in pyproject.toml.

deadpool_ext._engine is always built, deadpool_ext._cuda where a CUDA toolkit is found (CUDA_HOME, CUDA_PATH, or
nvcc on PATH): no GPU is needed for that, and no torch.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

COMPILE_FLAGS = ["-O3", "-Wall", "-Wextra", "-Wno-psabi"]
HEADERS = sorted(str(path) for path in Path("csrc").glob("*.[hi]*"))


class CudaToolkit(NamedTuple):
    include: Path
    library: Path


def toolkit_folders() -> list[Path]:
    """Roots to look in, best first."""
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    if nvcc := shutil.which("nvcc"):
        # nvcc may be a wrapper script far from its toolkit (Cray, Debian): only nvcc itself knows.
        dry_run = subprocess.run(
            [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=False
        )
        roots += re.findall(r"^#\$ TOP=(.+)$", dry_run.stderr, flags=re.MULTILINE)
    return [Path(root) for root in roots if root]


def find_cuda_toolkit() -> CudaToolkit | str:
    """The toolkit, or why there is none to use."""
    folders = toolkit_folders()
    if not folders:
        return "no nvcc on PATH, and neither CUDA_HOME nor CUDA_PATH is set"
    for root in folders:
        tops = [root, *sorted(root.glob("targets/*-linux"))]
        # crt/ is missing from some partial installs (the PyPI wheel of the runtime alone).
        include = next((top / "include" for top in tops if (top / "include/crt/host_defines.h").exists()), None)
        library = next(
            (top / name for top in tops for name in ("lib64", "lib") if (top / name / "libcudart_static.a").exists()),
            None,
        )
        if include and library:
            return CudaToolkit(include.resolve(), library.resolve())
    return f"no CUDA headers with a libcudart_static.a under {', '.join(map(str, folders))}"


def engine() -> Pybind11Extension:
    names = ["bindings", "copy_queue", "crc32c", "crc32c_arm", "crc32c_x86", "memory", "referrers", "rendezvous", "socket_io"]
    return Pybind11Extension(
        "deadpool_ext._engine",
        [f"csrc/{name}.cpp" for name in names],
        depends=HEADERS,
        cxx_std=17,
        extra_compile_args=COMPILE_FLAGS,
        extra_link_args=["-pthread"],
    )


def cuda_module(toolkit: CudaToolkit) -> Pybind11Extension:
    extension = Pybind11Extension(
        "deadpool_ext._cuda",
        ["csrc/bindings.cpp", "csrc/cuda_copy.cpp", "csrc/memory.cpp"],
        depends=HEADERS,
        cxx_std=17,
        define_macros=[("DEADPOOL_CUDA_MODULE", None)],
        extra_compile_args=[*COMPILE_FLAGS, "-isystem", str(toolkit.include)],
        # The runtime's symbols stay inside: torch puts those of its own libcudart in the global scope, and they would
        # win.
        extra_link_args=[
            "-pthread",
            f"-L{toolkit.library}",
            "-lcudart_static",
            "-lrt",
            "-ldl",
            "-Wl,--exclude-libs,ALL",
        ],
    )
    extension.optional = True  # a toolkit that does not compile it costs CUDA copies, not the installation
    return extension


def extensions() -> list[Pybind11Extension]:
    toolkit = find_cuda_toolkit()
    if isinstance(toolkit, str):
        print(f"deadpool: building without deadpool_ext._cuda: {toolkit}")
        return [engine()]
    return [engine(), cuda_module(toolkit)]


ParallelCompile("DEADPOOL_BUILD_JOBS", default=2).install()

setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": build_ext},
    package_data={"deadpool_ext": ["py.typed", "*.pyi"]},
)
