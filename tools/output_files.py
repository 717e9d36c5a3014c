"""Output files that appear complete and together, or not at all.

Used by the tools of this folder:

    with OutputFiles([Path("c.bin"), Path("c.idx")], overwrite=False) as out:
        write_to(out.partial(Path("c.bin")))
        write_to(out.partial(Path("c.idx")))
    # here both exist under their own names; after any exception neither does

A partial file is named after its target (".c.bin.partial") and locked while its writer lives. So two runs cannot write
the same target, and what a run left that was killed outright (SIGKILL, power) is taken over by the next run instead of
piling up.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# What file systems without flock answer (some Lustre and NFS mounts). Only the check for a second writer is lost there.
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class UserError(Exception):
    """A mistake that the user can correct. The message says the rule, the actual values and what to do next."""


class Interrupted(BaseException):
    """A signal asked this process to end. Not an Exception: no handler of ordinary errors may swallow it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Turns SIGINT, SIGTERM and SIGHUP into `Interrupted`, so that `with` blocks clean up. Main thread only."""

    def interrupt(signal_number: int, _frame: FrameType | None) -> None:
        raise Interrupted(signal_number)

    previous = {number: signal.signal(number, interrupt) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def signals_held_back() -> Iterator[None]:
    """Delivers the ending signals only after the block: for steps that must not stop in the middle."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


class OutputFiles:
    """Context manager around a set of files that must appear together.

    Args:
        paths: the final names, in the order in which they appear. Put last the file whose presence says that the set
            is complete; of an overwritten set it is also the first to go.
        overwrite: whether files of these names may be replaced.

    Raises (on entering):
        UserError: a file exists and overwrite is false, its folder does not exist or cannot be written, or another
            process is writing it now.
    """

    def __init__(self, paths: Sequence[Path], overwrite: bool) -> None:
        self._paths = tuple(paths)
        self._overwrite = overwrite
        self._locks: dict[Path, int] = {}  # final path -> descriptor of its partial file

    def partial(self, path: Path) -> Path:
        """The name under which to write what will be `path`. The file exists, empty, and may be opened with "wb"."""
        if path not in self._locks:
            raise ValueError(f"{path} is not one of this set's files: {[str(p) for p in self._paths]}")
        return _partial_name(path)

    def __enter__(self) -> OutputFiles:
        try:
            for path in self._paths:
                self._locks[path] = _open_locked(path)
            # Under the locks, so that a set finished by another run a moment ago is seen.
            existing = [str(path) for path in self._paths if path.exists()]
            if existing and not self._overwrite:
                raise UserError(
                    f"will not replace what exists: {', '.join(existing)}. Pass --overwrite to replace it, or choose "
                    "another output name."
                )
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with signals_held_back():
            try:
                if kind is None:
                    self._commit()
            finally:
                self._discard()

    def _commit(self) -> None:
        for descriptor in self._locks.values():
            os.fsync(descriptor)
        # The marker (last) goes first: at no moment does an old index stand beside new data.
        for path in reversed(self._paths):
            path.unlink(missing_ok=True)
        for path in self._paths:
            _partial_name(path).rename(path)
            _sync_folder(path.parent)

    def _discard(self) -> None:
        """Removes the partial files that are still there (none after a commit) and drops the locks."""
        for path, descriptor in self._locks.items():
            _partial_name(path).unlink(missing_ok=True)
            os.close(descriptor)
        self._locks.clear()


def _partial_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _open_locked(path: Path) -> int:
    """Opens and locks the partial file of `path`, emptied; returns its descriptor."""
    name = _partial_name(path)
    while True:
        try:
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError as error:
            raise UserError(f"the output folder must exist: {path.parent} does not. Create it first.") from error
        except OSError as error:
            raise UserError(f"cannot write {name}: {error.strerror}. Choose an output folder you may write.") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                os.close(descriptor)
                raise UserError(
                    f"one process at a time may write {path}: another one holds {name}. Wait for it to end, or choose "
                    "another output name."
                ) from error
        if _is_still(name, descriptor):
            os.ftruncate(descriptor, 0)
            return descriptor
        os.close(descriptor)  # its former owner renamed or removed it between our open and our lock


def _is_still(name: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(name), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    """Makes a rename durable: the name is the folder's data, not the file's."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
