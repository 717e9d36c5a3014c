"""The cluster that all tests of this folder share; it ends with them, however they end."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "tools" / "slurm_lab")]

from lab import Lab, Settings, missing  # noqa: E402 - from the folder named above

from megatron.hotswap.agent import scratch  # noqa: E402

NODES = 7


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A Slurm of seven nodes."""
    if reason := missing():
        pytest.skip(reason)
    # Not below pytest's own folders: munge wants every user to reach its socket, and the path must be short.
    cluster = Lab(Path(tempfile.mkdtemp(prefix="slurm-lab-")))
    try:
        cluster.start(Settings(nodes=NODES), owner=os.getpid())
        yield cluster
    finally:
        cluster.stop(clean=True)
        scratch.sweep()  # of nodes that were killed whole: on a cluster the next agent there does it
