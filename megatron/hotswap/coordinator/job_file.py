"""What a run directory says of its job: job.json, where the coordinator is (for agents that look for it, and for `deadpool`'s commands);
setup.json, from which a coordinator can be started (again); command.json, from which an agent can be started that joins later."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import replace
from pathlib import Path

import msgspec

from ..control.config import ControlConfig
from ..errors import UsageError
from ..records import parse, read_object, replace_file
from ..security.files import read_private

JOB_FILE = "job.json"
SETUP_FILE = "setup.json"
COMMAND_FILE = "command.json"
_ADDRESS = re.compile(r"[\w.-]+:\d{1,5}")


class Job(msgspec.Struct, frozen=True):
    """job.json: where a job's coordinator is."""

    coordinator: str  # host:port
    run_id: str
    pid: int  # of the process that serves it
    host: str = ""  # on which it runs; empty: this one


class Setup(msgspec.Struct, frozen=True):
    """setup.json: what a coordinator is told of its job. The token is not in it; it lies with the credentials."""

    control: ControlConfig
    store: str = "journal"
    metrics_address: str = ""
    metrics_port: int = 0  # 0: none are served


class Command(msgspec.Struct, frozen=True):
    """command.json: what every agent of the job runs."""

    script: str
    argv: list[str]  # with all that launchers add
    folder: str  # in which it was started: names in it may be relative
    workers: int  # ranks of an agent


def announce(run_dir: Path, address: str, run_id: str) -> None:
    """Replace job.json, whole or not at all."""
    replace_file(run_dir / JOB_FILE, msgspec.json.encode(Job(address, run_id, os.getpid(), socket.gethostname())), 0o600)


def read_job(run_dir: Path) -> Job | None:
    """What job.json says, or None: there is no such file, or it is none of ours."""
    try:
        job: Job = read_object(run_dir / JOB_FILE, Job)
    except (OSError, UsageError):
        return None
    if not _ADDRESS.fullmatch(job.coordinator) or not 0 < job.pid < 1 << 31:  # 0 and less are whole groups of processes
        return None
    return job


def running_job(run_dir: Path) -> Job | None:
    """What job.json says of the job that runs there, or None: there is none, or its process, if it was on this host, is gone."""
    job = read_job(run_dir)
    if job is None or job.host not in ("", socket.gethostname()):
        return job
    try:
        os.kill(job.pid, 0)
    except PermissionError:
        return job
    except OSError:
        return None
    return job


def write_setup(run_dir: Path, setup: Setup) -> None:
    """Replace setup.json.

    Raises:
        OSError: it cannot be written.
    """
    told = msgspec.structs.replace(setup, control=replace(setup.control, token=""))
    replace_file(run_dir / SETUP_FILE, msgspec.json.encode(told))


def read_setup(run_dir: Path) -> Setup:
    """What a coordinator is to know.

    Raises:
        OSError: setup.json cannot be read.
        UsageError: it is none.
    """
    setup: Setup = read_object(run_dir / SETUP_FILE, Setup)
    return setup


def write_command(run_dir: Path, command: Command) -> None:
    """Replace command.json.

    Raises:
        OSError: it cannot be written.
    """
    replace_file(run_dir / COMMAND_FILE, msgspec.json.encode(command), 0o600)


def read_command(run_dir: Path) -> Command:
    """What an agent is to run. It is run as this user, so nobody else may have written it.

    Raises:
        UsageError: command.json cannot be read, others may write it, or it is none.
    """
    path = run_dir / COMMAND_FILE
    try:
        command: Command = parse(read_private(path), Command)
    except ValueError as wrong:
        raise UsageError(f"{path} is not what a launcher writes ({wrong}); start the job anew") from wrong
    return command
