"""agent/scratch.py: a node's temporary files go with it, however it ends."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatron.hotswap.agent.scratch import Scratch, sweep

_OWNER = """
import sys
from megatron.hotswap.agent.scratch import Scratch
with Scratch() as scratch:
    print(scratch.path, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def base(monkeypatch):
    """A folder for temporary files with a short name, as sockets need it; pytest's own are too long."""
    with tempfile.TemporaryDirectory(prefix="dp-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


def owner() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", _OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, Path(process.stdout.readline().strip())


def test_it_is_removed_with_what_is_in_it(base):
    with Scratch() as scratch:
        (scratch.path / "pymp-1").mkdir()
        (scratch.path / "pymp-1/listener").touch()
    assert list(base.iterdir()) == []


def test_what_a_killed_owner_leaves_is_swept_and_what_a_living_one_has_is_not(base):
    (killed, his), (living, hers) = owner(), owner()
    (his / "file").touch()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    sweep()
    assert list(base.iterdir()) == [hers]
    living.communicate("\n")
    assert list(base.iterdir()) == []


def test_a_folder_that_a_user_has_named_like_ours_stays(base):
    mine = base / "deadpool-node-exercise"
    mine.mkdir()
    (mine / "file").touch()
    sweep()
    assert (mine / "file").exists()


def test_owners_that_begin_at_one_moment_leave_each_other_alone(base):
    owners = [owner() for _ in range(3)]
    started = [subprocess.Popen([sys.executable, "-c", _OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    owners += [(process, Path(process.stdout.readline().strip())) for process in started]
    assert all(path.is_dir() for _, path in owners)
    assert len({path for _, path in owners}) == 9
    for process, _ in owners:
        process.communicate("\n")
    assert list(base.iterdir()) == []


def test_sockets_of_multiprocessing_fit_however_long_the_usual_folder_is(base, monkeypatch):
    long = base / ("x" * 60)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with Scratch() as scratch:
        assert len(os.fsencode(scratch.path / "pymp-12345678/listener-12345678")) <= 107


def test_a_folder_that_is_swept_away_before_it_is_locked_is_made_again(monkeypatch):
    """Agents of a job start together, and each sweeps first."""
    real, made = tempfile.mkdtemp, []

    def swept_once(**where):
        made.append(real(**where))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", swept_once)
    with Scratch() as mine:
        assert str(mine.path) == made[1] and mine.path.is_dir()
