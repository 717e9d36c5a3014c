"""--hot-swap-store by name: where decisions are recorded, and how an agent finds whoever decides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..errors import UsageError
from .job_file import read_job
from .store import Journal, Store

JOURNAL = "journal"
_ETCD = ("etcd://", "etcds://")


def require_store(name: str) -> str:
    """The name, if it is one.

    Raises:
        UsageError: says what is.
    """
    if name != JOURNAL and not name.startswith(_ETCD):
        raise UsageError(
            f"--hot-swap-store must be {JOURNAL} (a file of the run directory) or etcd://HOST:PORT[,HOST:PORT…] (etcds:// for TLS), got "
            f"{name!r}"
        )
    if name != JOURNAL:
        from .etcd import endpoints

        endpoints(name)
    return name


def open_store(name: str, run_dir: Path, run_id: str) -> Store:
    """The store of a job.

    Raises:
        UsageError: there is no such store, or the package that it needs is missing.
    """
    if require_store(name) == JOURNAL:
        return Journal(run_dir, run_id)
    from .etcd import EtcdStore

    return EtcdStore(name, run_id)


def finder(name: str, run_dir: Path, run_id: str) -> Callable[[], str | None]:
    """A function that says where the job's coordinator is now, host:port; None: nobody says. It may block for some seconds."""

    def from_file() -> str | None:
        job = read_job(run_dir)
        return job.coordinator if job is not None and job.run_id == run_id else None

    if name == JOURNAL:
        return from_file

    from .etcd import EtcdStore

    asked = EtcdStore(name, run_id)

    def from_etcd() -> str | None:
        try:
            return asked.coordinator()
        except OSError:
            return None

    return from_etcd
