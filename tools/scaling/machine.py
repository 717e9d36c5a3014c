"""What a run was made on, and with which versions: a figure without them cannot be compared with another."""

from __future__ import annotations

import subprocess
from collections import Counter

from run import commit, hardware, versions

_QUERY = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
_TIMEOUT_S = 30.0


def hardware_here() -> str:
    """This node's: `4 x NVIDIA A100-SXM4-40GB (driver 550.54), 64 cores of AMD EPYC 7763, 251.2 GiB`."""
    host = hardware()
    return ", ".join([*_gpus(), f"{host['cores']} cores of {host['cpu']}", f"{host['memory_gib']} GiB"])


def software_here() -> str:
    """`commit 1234abc, python 3.12.3, torch 2.13.0, …`"""
    return ", ".join([f"commit {commit()}", *(f"{name} {version}" for name, version in versions().items())])


def _gpus() -> list[str]:
    """GPUs that this node shows, alike ones together; empty: none, or no driver."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return []
    kinds = Counter(tuple(word.strip() for word in line.split(",")) for line in done.stdout.splitlines() if "," in line)
    return [f"{count} x {name} (driver {driver})" for (name, driver), count in kinds.items()]
