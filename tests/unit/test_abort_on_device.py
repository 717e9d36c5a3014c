"""worker/abort.py on NCCL, as far as that goes without a GPU: which communicators are aborted, in which order, and which are kept.

The backends are objects that write down what is called, and nothing else; tests/gpu and tools/gpu_check.py use real ones.
"""

from __future__ import annotations

import threading

import pytest

from megatron.hotswap.topology.groups import Communicator, Groups
from megatron.hotswap.worker import abort


class Backend:
    """A communicator that writes down what is done to it."""

    def __init__(self, name: str, calls: list[str], kind: str = "nccl") -> None:
        self._name, self._calls, self._kind = name, calls, kind

    def name(self) -> str:
        return self._kind

    def _group_start(self) -> None:
        self._calls.append("group start")

    def _group_end(self) -> None:
        self._calls.append("group end")

    def abort(self) -> None:
        self._calls.append(f"abort {self._name}")


class ProcessGroup:
    """A process group with a backend for one device."""

    def __init__(self, backend: Backend | None) -> None:
        self._backend = backend

    def _get_backend(self, device):
        if self._backend is None:
            raise RuntimeError(f"no backend for {device}")
        return self._backend


@pytest.fixture
def calls() -> list[str]:
    return []


def groups_of(calls: list[str], **members: tuple[int, ...]) -> Groups:
    """Rank 0's groups, all on NCCL."""
    groups = Groups(abort.timedelta(seconds=1), abort.timedelta(seconds=1))
    for number, (name, ranks) in enumerate(members.items()):
        made = Communicator(number, ranks, "nccl", description=name, broken=False)
        made.group = made.held = ProcessGroup(Backend(name, calls))
        groups._mine.append(made)
    return groups


def test_all_of_them_inside_one_group_call(calls) -> None:
    groups = [ProcessGroup(Backend(name, calls)) for name in ("tp", "dp", "pp")]
    abort.abort_device_groups(groups)
    assert calls == ["group start", "abort tp", "abort dp", "abort pp", "group end"]


def test_groups_of_another_backend_are_not_touched(calls) -> None:
    abort.abort_device_groups([ProcessGroup(Backend("gloo twin", calls, "gloo")), ProcessGroup(None)])
    assert calls == []


def test_only_groups_of_a_lost_rank_are_aborted_at_first_then_all_each_once(calls) -> None:
    groups = groups_of(calls, tp=(0, 1), dp=(0, 2), pp=(0, 4))
    abort.abort_device_groups([made.group for made in groups.doom([2, 3])])
    assert calls == ["group start", "abort dp", "group end"]
    del calls[:]
    abort.abort_device_groups([made.group for made in groups.doom([2, 3])])
    assert calls == [], "it is aborted already"
    abort.abort_device_groups([made.group for made in groups.doom(None)])
    assert calls == ["group start", "abort tp", "abort pp", "group end"]


class Session:
    """What the aborter needs of one."""

    version = 1


@pytest.mark.parametrize(("after_s", "aborted"), [(0.0, {"dp"}), (3 * abort._KEEP_PATIENCE_S, {"tp", "dp", "pp"})])
def test_a_thread_that_does_not_come_out_costs_the_groups_that_could_be_kept(calls, after_s, aborted) -> None:
    groups = groups_of(calls, tp=(0, 1), dp=(0, 2), pp=(0, 4))
    aborter = abort.Aborter(Session(), groups)
    aborter.building_groups()
    aborter.groups_built()
    aborter.begin(1, (2, 3))
    deadline = threading.Event()
    while not calls:
        deadline.wait(0.005)
    deadline.wait(after_s)
    aborter.thread_is_out()
    assert {call.removeprefix("abort ") for call in calls if call.startswith("abort")} == aborted
    assert {made.description for made in groups._mine if not made.broken} == {"tp", "dp", "pp"} - aborted


def test_an_abort_while_groups_are_being_built_keeps_none(calls) -> None:
    groups = groups_of(calls, tp=(0, 1), dp=(0, 2))
    aborter = abort.Aborter(Session(), groups)
    aborter.building_groups()
    aborter.begin(1, (2, 3))
    aborter.thread_is_out()
    assert all(made.broken for made in groups._mine)


def test_an_order_of_an_older_membership_is_not_obeyed(calls) -> None:
    groups = groups_of(calls, dp=(0, 2))
    abort.Aborter(Session(), groups).begin(0, (2,))
    assert calls == [] and not groups._mine[0].broken


def test_an_order_that_comes_while_the_one_before_is_being_ended_holds_nobody_up(calls) -> None:
    """Two agents of one host are lost 10 ms apart: the training thread, out of its collective, waits for the end of the first abort, which
    is in the middle of its work, when the second order begins another."""
    groups = groups_of(calls, dp=(0, 2))
    at_work, go_on, doom = threading.Event(), threading.Event(), groups.doom

    def takes_long(lost):
        at_work.set()
        assert go_on.wait(10.0)
        return doom(lost)

    groups.doom = takes_long
    aborter = abort.Aborter(Session(), groups)
    aborter.building_groups()
    aborter.groups_built()
    aborter.begin(1, (2,))
    assert at_work.wait(10.0)
    training = threading.Thread(target=aborter.thread_is_out, daemon=True)
    training.start()
    training.join(0.2)
    assert training.is_alive(), "it must not go on while something may still be ended"
    aborter.begin(2, (3,))
    go_on.set()
    training.join(10.0)
    assert not training.is_alive()
    assert len(aborting()) == 1, "the second order has not been read yet"
    aborter.thread_is_out()
    assert not aborting()


def aborting() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "deadpool-abort"]
