"""Messages that are of the right types and yet cannot be meant: ranks that do not exist, times that are no times. Pure.

The service asks before the core and the recorder see a message, so no number grows without bound, no name leads a file elsewhere, and
what a run leaves can be written and read again. A message that is merely late or repeated is none of these; the core drops it.
"""

from __future__ import annotations

import math
import re

from . import messages as m

_GENERATION_MAX = 1 << 62
_NAME_CHARS_MAX = 255
#: Of what a node says of its own health.
REASON_CHARS_MAX = 500
#: Names become parts of file names and of lines that a terminal shows.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_ADDRESS = re.compile(r"[A-Za-z0-9._-]{1,255}:[0-9]{1,5}")


def nonsense(event: m.Event, world_size: int, workers: int) -> str:
    """What is impossible about a message in a job of so many ranks, and so many workers a node, in words; empty where it may be meant."""
    if isinstance(event, m.Join):
        return _of_join(event)
    if isinstance(event, m.Rejoin):
        return _of_rejoin(event, world_size, workers)
    if isinstance(event, m.StepDone):
        return _of_step(event.record)
    wrong = []
    rank, worker = getattr(event, "rank", None), getattr(event, "worker", None)
    if rank is not None and not 0 <= rank < world_size:
        wrong.append(f"rank {rank} of {world_size}")
    if worker is not None and not 0 <= worker < workers:
        wrong.append(f"worker {worker} of {workers}")
    if isinstance(event, m.Heartbeat):
        wrong += [f"rank {r} of {world_size}" for r in event.progress if not 0 <= r < world_size][:1]
        wrong += [f"step {p.step}" for p in event.progress.values() if not 0 <= p.step < _GENERATION_MAX][:1]
    if isinstance(event, m.ReplicaReport):
        wrong += [f"rank {r} of {world_size}" for r in event.replicas if not 0 <= r < world_size][:1]
    if isinstance(event, m.Unhealthy) and len(event.reason) > REASON_CHARS_MAX:
        wrong.append(f"a reason of {len(event.reason)} characters")
    for name in ("generation", "done", "step", "bytes_restored", "steps_rerun"):
        number = getattr(event, name, None)
        if number is not None and not -1 <= number < _GENERATION_MAX:
            wrong.append(f"{name} {number}")
    for name in ("d2h_s", "h2h_s", "out_s", "rebuild_s", "restore_s"):
        seconds = getattr(event, name, 0.0)
        if not math.isfinite(seconds):  # a difference of clock readings may be negative by a rounding
            wrong.append(f"{name} {seconds}")
    return ", ".join(wrong)


def _of_join(event: m.Join) -> str:
    wrong = [
        f"{name} {value[:_NAME_CHARS_MAX]!r}"
        for name, value in (("node", event.node), ("incarnation", event.incarnation))
        if len(value) > _NAME_CHARS_MAX or not _NAME.fullmatch(value)
    ]
    if not _ADDRESS.fullmatch(event.h2h):
        wrong.append(f"address {event.h2h[:_NAME_CHARS_MAX]!r}")
    if len(event.unhealthy) > REASON_CHARS_MAX:
        wrong.append(f"a reason of {len(event.unhealthy)} characters")
    if len(event.domain) > _NAME_CHARS_MAX or not event.domain.isprintable():
        wrong.append(f"failure domain {event.domain[:_NAME_CHARS_MAX]!r}")
    return ", ".join(wrong)


def _of_rejoin(event: m.Rejoin, world_size: int, workers: int) -> str:
    wrong = [wrong] if (wrong := _of_join(event.join)) else []
    if not 0 <= event.version < _GENERATION_MAX:
        wrong.append(f"version {event.version}")
    if not math.isfinite(event.away_s):
        wrong.append(f"away_s {event.away_s}")
    for worker, rank in event.ranks.items():
        if worker not in range(workers) or rank not in range(world_size):
            wrong.append(f"worker {worker} of {workers} as rank {rank} of {world_size}")
    return ", ".join(wrong)


def _of_step(record: m.StepRecord) -> str:
    wrong = []
    for name in ("step", "consumed_samples", "tokens"):
        if not 0 <= getattr(record, name) < _GENERATION_MAX:
            wrong.append(f"{name} {getattr(record, name)}")
    for name in ("seconds", "exposed_stall_s"):
        if not math.isfinite(getattr(record, name)):
            wrong.append(f"{name} {getattr(record, name)}")
    for name, text in (*record.loss.items(), ("gradient norm", record.grad_norm)):
        try:
            float.fromhex("0x0p0" if text is None else text)
        except (ValueError, OverflowError):
            wrong.append(f"{name[:_NAME_CHARS_MAX]} {text[:_NAME_CHARS_MAX] if text else text!r}, which is no float in hex")
    return ", ".join(wrong)
