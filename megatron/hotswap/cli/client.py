"""A user's call to a running job's coordinator."""

from __future__ import annotations

import time
from pathlib import Path

import grpc

from ..control.messages import Injection
from ..coordinator import wire
from ..coordinator.job_file import running_job
from ..errors import Malformed, UsageError
from ..security import files as credentials
from ..security.tls import why_refused

_CALL_TIMEOUT_S = 5.0
_SAVE_POLL_S = 0.2


def call(
    run_dir: Path, injection: Injection | None = None, save: bool = False, detail: bool = False, release: str | None = None
) -> wire.Status:
    """Ask the coordinator of the job in `run_dir` for its status (with its lists: `detail`), for a fault, for a durable generation, or to
    release a node from quarantine.

    Raises:
        UsageError: no job runs there, it does not answer, or it refuses.
    """
    job = running_job(run_dir)
    if job is None:
        ended = "; it has ended: its summary.json is there" if (run_dir / "summary.json").is_file() else ""
        raise UsageError(
            f"no job runs in {run_dir}{ended}; give the --run-dir of a job that `deadpool run` has started and "
            "that still runs"
        )
    shown = credentials.read(run_dir, "user", job.run_id)
    with wire.blocking_channel(job.coordinator, shown) as channel:
        ask = channel.unary_unary(f"/{wire.SERVICE}/{wire.COMMAND}", request_serializer=wire.encode)
        try:
            status: wire.Status = wire.decode_status(ask(wire.Command(injection, save, release, detail), timeout=_CALL_TIMEOUT_S))
        except grpc.RpcError as failure:
            why = why_refused(job.coordinator, shown) or failure.code().name
            raise UsageError(
                f"the job in {run_dir} (process {job.pid}) does not answer at {job.coordinator} within {_CALL_TIMEOUT_S} s "
                f"({why}); it may be ending: try again, or look at {run_dir / 'events.jsonl'}"
            ) from failure
        except Malformed as noise:
            raise UsageError(
                f"the job in {run_dir} answered what this command cannot read ({noise}): it runs another version; use the `deadpool` "
                "that started it"
            ) from noise
    if not status.ok:
        raise UsageError(f"the job in {run_dir} refused: {status.text}")
    return status


def save(run_dir: Path) -> str:
    """Have the job write a durable generation; returns once one is whole, with words that say which and where.

    Raises:
        UsageError: the job refuses, could not write, or has ended meanwhile.
    """
    answer = call(run_dir, save=True)
    while answer.saving:
        time.sleep(_SAVE_POLL_S)
        answer = call(run_dir)
    if "is durable" not in answer.save_text:
        raise UsageError(answer.save_text or "the job did not write it")
    return answer.save_text
