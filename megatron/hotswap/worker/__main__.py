"""A worker process: `python -m megatron.hotswap.worker SCRIPT …`, started by an agent and by nobody else.

Warms up (imports, device), patches Megatron, then runs the user's script as `__main__`. The script waits for its rank where
Megatron parses the arguments (patches/arguments.py).
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import traceback
from typing import TYPE_CHECKING

from .. import config, environment
from ..control import messages as m
from ..device import cpu, wheel
from ..errors import UsageError
from ..long_work import announce_through
from ..processes import die_with_parent, write_stacks_when_asked

if TYPE_CHECKING:
    from .session import Session


def main() -> None:
    """Run the script; the process ends when the agent says so, or with it."""
    place = environment.worker()
    die_with_parent(place.agent_pid)
    write_stacks_when_asked()
    from .session import Session, end_process

    session = Session(place)
    announce_through(session.long_work)
    script, argv = sys.argv[1], sys.argv[2:]
    on_cpu = cpu.needed()
    if on_cpu:
        cpu.install()
        argv = [*argv, *cpu.default_flags(argv)]
    else:
        wheel.use_built_dataset_helpers()
    code, text, plain = 0, "", False
    failure: BaseException | None = None
    try:
        plain = _patch(session, argv, on_cpu)
        sys.argv = [script, *argv]
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code, text = _exit_code(end)
    except UsageError as mistake:
        code, text = 2, str(mistake)
    except BaseException as raised:  # whatever it was, the job must hear of it
        failure = raised
        traceback.print_exc()
        last = traceback.extract_tb(failure.__traceback__)[-1]  # a bare assert says nothing but its place
        code, text = 1, f"{type(failure).__name__}: {failure} (in {last.name}, line {last.lineno}: {last.line})"
    sys.stdout.flush()
    if plain and isinstance(failure, Exception) and _peer_lost(session, failure):
        session.report_error(failure, session.step, collective=True)  # whoever is to blame, all are ended and started anew
    elif code and session.building:
        end_process(
            code, f"this spare could not build its rank: {text}"
        )  # its agent tells; the next spare takes its place
    elif code and session.loading and _peer_lost(session, failure):
        # Its agent starts it again, and it reads what lies in its slots as after any other loss.
        end_process(1, f"a peer was lost before training had begun: {text}")
    elif isinstance(failure, Exception) and session.step > 0:
        _say_failed_in_training(session, failure)
    elif code and session.halted:
        # Lost a peer before the first snapshot: nothing here can be gone back to, and the coordinator says what that means.
        session.report_building(session.version)
    else:
        session.say(m.Finished(place.worker, session.rank, code, text))
    threading.Event().wait()  # the monitor ends this process


def _patch(session: Session, argv: list[str], on_cpu: bool) -> bool:
    """Put hot-swap into Megatron; or only what watches it, where the job restarts instead. Returns whether it is the second."""
    from ..patches.install import HotSwap, warm
    from ..patches.plain import PlainTraining

    settings = config.parse(argv)
    plain = settings.on_failure == "restart"
    if plain:
        PlainTraining(session, settings)
    else:
        from .abort import guard_groups

        guard_groups(session, on_device=not on_cpu)
        HotSwap(session, settings, _store_factory(session.place.address))
    warm()
    return plain


def _say_failed_in_training(session: Session, failure: Exception) -> None:
    """Outside of what the recovery loop wraps: this process cannot go on, another in its place can."""
    from .session import end_process

    if _peer_lost(session, failure):
        end_process(1, f"a peer was lost at a place that cannot be taken up again: {failure}")  # its agent tells
    session.report_error(failure, session.step, collective=False)


def _peer_lost(session: Session, failure: BaseException | None) -> bool:
    """Whether it was not this process's own doing."""
    from .loop import is_communication

    return session.halted or (isinstance(failure, Exception) and is_communication(failure))


def _exit_code(end: SystemExit) -> tuple[int, str]:
    if end.code is None:
        return 0, ""
    if isinstance(end.code, int):
        return end.code, "" if end.code == 0 else f"the script ended with exit code {end.code}; its log says why"
    return 1, str(end.code)


def _store_factory(address: str):  # type: ignore[no-untyped-def]
    """Makes rendezvous stores that this process serves; each is kept until the next but one is made."""
    from ..topology.rendezvous import Rendezvous

    kept: list[Rendezvous] = []

    def new_store() -> str:
        kept.append(Rendezvous(address))
        del kept[:-2]
        return kept[-1].address

    return new_store


if __name__ == "__main__":
    main()
