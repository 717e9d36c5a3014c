"""The job's credentials as files of its run directory: where they are, and who may read them.

    RUN_DIR/credentials/      mode 0700
        authority.crt         the job's certificate authority, whose key is nowhere
        token                 what an agent says to join
        ROLE.crt, ROLE.key    of coordinator, agent and user

All of one job's agents share one certificate: a spare may come at any time, when nobody is left who could sign one for it.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError

FOLDER = "credentials"
TOKEN_FILE = "token"
AUTHORITY_FILE = "authority.crt"
ROLES = ("coordinator", "agent", "user")
#: 128 bits as hex is what the launcher makes; a token that a person has chosen can be found by trying.
TOKEN_CHARS_MIN, TOKEN_CHARS_MAX = 32, 256
_FILE_BYTES_MAX = 64 << 10
_FOR_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True)
class Credentials:
    """What one process of a job shows to the others, and by what it believes them. PEM where it is bytes."""

    run_id: str
    role: str
    token: str
    authority: bytes
    certificate: bytes
    key: bytes
    folder: Path

    @property
    def certificate_file(self) -> Path:
        """Where the certificate is."""
        return self.folder / f"{self.role}.crt"

    @property
    def key_file(self) -> Path:
        """Where its key is."""
        return self.folder / f"{self.role}.key"


def name_of(role: str, run_id: str) -> str:
    """The name in a role's certificate. It is no host's: a spare may take over any node's part, a coordinator another's.

    Raises:
        UsageError: the run id cannot be part of a name.
    """
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?", run_id):
        raise UsageError(f"a run id is 1 to 32 letters, digits and inner hyphens, since it is part of certificates' names; got {run_id!r}")
    return f"{role}.{run_id.lower()}.deadpool"


def read(run_dir: Path, role: str, run_id: str) -> Credentials:
    """The credentials of a role.

    Raises:
        UsageError: a file is missing, or others than the owner can read it.
    """
    folder = run_dir / FOLDER
    token = read_private(folder / TOKEN_FILE).decode(errors="replace").strip()
    if not TOKEN_CHARS_MIN <= len(token) <= TOKEN_CHARS_MAX:
        raise UsageError(
            f"the job's token in {folder / TOKEN_FILE} has {len(token)} characters; it must have {TOKEN_CHARS_MIN} to "
            f"{TOKEN_CHARS_MAX}: start the job anew, and the launcher writes one"
        )
    authority, certificate, key = (read_private(folder / name) for name in (AUTHORITY_FILE, f"{role}.crt", f"{role}.key"))
    return Credentials(run_id, role, token, authority, certificate, key, folder)


def read_private(path: Path) -> bytes:
    """The content of a small file that nobody but its owner may read or write.

    Raises:
        UsageError: others may, it is no plain file of this user, it is too long, or it cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe in its place must not hold us up
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            _require_private(path, status)
            content = file.read(_FILE_BYTES_MAX + 1)
    except OSError as failure:
        raise UsageError(
            f"{path} cannot be read: {failure.strerror}; the launcher writes it when the job starts, for the job's own user, on a file "
            "system that all its nodes share: give the --run-dir of a job of yours"
        ) from failure
    if len(content) > _FILE_BYTES_MAX:
        raise UsageError(f"{path} has more than {_FILE_BYTES_MAX} bytes, so it is no credential of a job; start the job anew")
    return content


def _require_private(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path} must be a plain file; start the job anew, and the launcher writes it")
    if os.geteuid() not in (0, status.st_uid):
        raise UsageError(
            f"{path} belongs to user {status.st_uid}, and this process is user {os.geteuid()}: only the user whose job it is may use it; "
            "give the --run-dir of a job of yours"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & _FOR_OTHERS:
        raise UsageError(
            f"{path} is open to other users (mode {mode:04o}, at most 0600 is allowed): whoever has read it can join the job. If nobody "
            f"can have read it, chmod 600 {path}; else start the job anew, and it gets other secrets"
        )


def write_folder(run_dir: Path, contents: dict[str, bytes]) -> None:
    """Make the credentials' folder anew; what an earlier run left there goes.

    Raises:
        UsageError: it cannot be written.
    """
    folder = run_dir / FOLDER
    try:
        forget(run_dir)
        folder.mkdir(mode=0o700)
        for name, content in contents.items():
            with os.fdopen(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
                file.write(content)
    except OSError as failure:
        raise UsageError(f"the job's credentials cannot be written to {folder}: {failure}; give a --run-dir of your own") from failure


def forget(run_dir: Path) -> None:
    """Remove the credentials of a job that is over: they are of no more use, and should not lie about.

    Raises:
        OSError: something else lies there.
    """
    folder = run_dir / FOLDER
    if folder.is_dir() and not folder.is_symlink():
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
