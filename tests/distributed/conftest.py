"""Every test here starts jobs, and each must leave nothing behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hot_swap_job import GRIDS, REFERENCE_STEPS, argv, run_job


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a job of the first grid that nothing happens to: a shorter one, and one on other nodes, has the same steps
    (hot_swap_job.argv). Many tests compare with it, and a job costs half a minute."""
    folder = tmp_path_factory.mktemp("undisturbed")
    case = GRIDS["tp2-dp2"]
    assert run_job(case, folder / "run", argv(case, REFERENCE_STEPS, folder / "checkpoints"))["exit_code"] == 0
    return folder / "run"


def own_shared_memory() -> set[str]:
    """What this user has in /dev/shm: others may come and go."""
    return {entry.name for entry in os.scandir("/dev/shm") if entry.stat(follow_symlinks=False).st_uid == os.getuid()}


@pytest.fixture(autouse=True)
def nothing_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No process, nothing in /dev/shm and nothing among temporary files outlives a test.

    Temporary files go into a folder of the test's own, since other programs use /tmp too. Its name is short, as sockets need it.
    """
    tmp_path_factory.getbasetemp()  # pytest's own folder is to stay where it is
    shared = own_shared_memory()
    with tempfile.TemporaryDirectory(prefix="dp-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield
        left = [p.cmdline() for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
        assert not [c for c in left if "megatron.hotswap" in " ".join(c)]
        assert own_shared_memory() <= shared
        # What torch has compiled is kept on purpose, for the next job.
        assert [name for name in os.listdir(folder) if not name.startswith("torchinductor_")] == []
