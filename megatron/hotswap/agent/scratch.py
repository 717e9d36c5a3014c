"""Where a node's workers have their temporary files, so that nothing of a job stays behind, however it ends.

A worker that is killed cannot remove what it has in /tmp: the folders and sockets of Python's multiprocessing, which torch_dist
checkpoints and data loaders use. So the workers of an agent get a folder of their own as TMPDIR. The agent removes it at its end, and
where the agent is killed too, the launcher does, or the next agent or launcher on the machine: a lock on the folder, which the kernel
drops with its holder, tells whether anybody still owns it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "deadpool-node-"
#: Only a folder with this in it is removed with its content: a user may have named one like ours.
_MARK = ".scratch-of-a-deadpool-agent"
#: A socket's path may have 107 bytes (man 7 unix); multiprocessing's is TMPDIR/pymp-XXXXXXXX/listener-XXXXXXXX.
_BASE_BYTES_MAX = 107 - len("/pymp-XXXXXXXX/listener-XXXXXXXX") - len(f"/{_PREFIX}XXXXXXXX")


class Scratch:
    """An agent's folder for its workers; see the module docstring. Removed with all that is in it at the end of the `with` block."""

    def __init__(self) -> None:
        sweep()
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_base()))
            with contextlib.suppress(FileNotFoundError):  # somebody swept it away before the lock was held
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    fcntl.flock(self._lock, fcntl.LOCK_EX)
                    (self.path / _MARK).touch()
                    return
                except FileNotFoundError:
                    os.close(self._lock)
                    raise

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *failure: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep() -> None:
    """Remove the folders of this user's agents that have died."""
    for path in _base().glob(f"{_PREFIX}????????"):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            if path.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if (path / _MARK).exists():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.rmdir()
            finally:
                os.close(lock)


def _base() -> Path:
    usual = tempfile.gettempdir()
    return Path(usual if len(os.fsencode(usual)) <= _BASE_BYTES_MAX else "/tmp")
