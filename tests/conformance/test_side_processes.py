"""Transports whose library lives in side processes: what a death on either side costs, and what it leaves behind (nothing).

MPI reports no peer's death, aborts and hangs; so these kill for real, in the middle of transfers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transport_pair import (
    CHUNK_BYTES,
    MISSING,
    PAYLOAD_BYTES,
    SIDE,
    TOKEN,
    Copy,
    Pair,
    content,
    in_side_processes,
    on_a_loop,
    snapshot,
    soon,
)

from megatron.hotswap.errors import PeerFault, UsageError
from megatron.hotswap.replication.transfer import ReplicaStore

HERE = Path(__file__).parent
#: From the death of either side to the error at the other. It takes milliseconds; the rest is for a machine that is overloaded.
NOTICED_WITHIN_S = 3.0
#: Side processes die with their agent, by a signal; one that is still starting, when it has started and finds its pair closed.
ORPHANS_END_WITHIN_S = 15.0


def children(pid):
    """Processes that this one started and that live."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return [p for p in found if alive(p)]


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    return False


def leftovers():
    """What killed processes could leave: shared memory with a name, and files."""
    system_v = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    mine = [f"/dev/shm/{p.name}" for p in Path("/dev/shm").iterdir() if p.owner() == Path("/proc/self").owner()]
    ours = ("mpich", "ucx", "nixl", "deadpool-side")
    return {*mine, *(line.split()[1] for line in system_v), *(p.name for p in Path("/tmp").iterdir() if p.name.startswith(ours))}


class Holder:
    """holder_process.py."""

    def __init__(self, kind):
        name = next(name for name, value in SIDE.items() if value is kind)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "holder_process.py"), name], stdout=subprocess.PIPE, text=True, env=environment
        )

    async def line(self):
        return (await asyncio.to_thread(self.process.stdout.readline)).strip()

    def sides(self):
        return children(self.process.pid)

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@contextlib.asynccontextmanager
async def owner_and_holders(kind, holders=1):
    """An owner's transport here and holders in processes of their own, with their addresses."""
    before = leftovers()
    owner = kind(TOKEN, "127.0.0.1")
    await owner.serve(ReplicaStore("run-1", lambda wanted: None))
    running = [Holder(kind) for _ in range(holders)]
    try:
        yield owner, [(holder, await holder.line()) for holder in running]
    finally:
        sides = [pid for holder in running if holder.process.poll() is None for pid in holder.sides()]
        for holder in running:
            holder.kill()
        await owner.close()
        await soon(lambda: not any(alive(pid) for pid in sides), ORPHANS_END_WITHIN_S)
        assert not (leftovers() - before)


async def half_way(owner, address):
    """A push that has half of its chunks, for real, at the holder and waits for the rest."""
    copy = Copy(snapshot())
    copy.place(PAYLOAD_BYTES // 2)
    push = asyncio.ensure_future(owner.push(address, copy.outgoing))
    before = owner.bytes_sent
    await soon(lambda: push.done() or owner.bytes_sent - before >= PAYLOAD_BYTES // 2, 60.0)
    assert not push.done()
    return push, copy


async def goes_through(owner, address, out):
    """As agents push: again and again. A link may have begun with a side process whose death was not known yet."""
    deadline = time.monotonic() + 60.0
    while True:
        try:
            return await owner.push(address, out)
        except PeerFault:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


async def fails_soon(push):
    began = time.monotonic()
    with pytest.raises(PeerFault):
        await push
    assert time.monotonic() - began < NOTICED_WITHIN_S


@in_side_processes
@on_a_loop
async def test_it_works_on_this_node_and_says_what_moves_the_bytes(kind):
    version = await kind(TOKEN, "127.0.0.1").check()
    assert any(word in version for word in ("MPI", "NIXL"))
    assert not children(os.getpid())


@in_side_processes
@on_a_loop
async def test_the_holders_side_process_is_killed_in_the_middle_of_a_transfer(kind):
    async with owner_and_holders(kind) as (owner, [(holder, address)]):
        push, _ = await half_way(owner, address)
        for pid in holder.sides():
            os.kill(pid, signal.SIGKILL)
        await fails_soon(push)
        await goes_through(owner, address, Copy(snapshot()).complete())
        assert await holder.line() == "{3: (7,)}"


@in_side_processes
@on_a_loop
async def test_the_own_side_process_is_killed_in_the_middle_of_a_transfer(kind):
    async with owner_and_holders(kind) as (owner, [(holder, address)]):
        push, _ = await half_way(owner, address)
        for pid in set(children(os.getpid())) - {holder.process.pid}:
            os.kill(pid, signal.SIGKILL)
        await fails_soon(push)
        await goes_through(owner, address, Copy(snapshot()).complete())
        assert await holder.line() == "{3: (7,)}"


@in_side_processes
@on_a_loop
async def test_the_holder_is_killed_in_the_middle_of_a_transfer_and_another_takes_it(kind):
    async with owner_and_holders(kind, 2) as (owner, [(holder, address), (other, other_address)]):
        push, copy = await half_way(owner, address)
        sides = holder.sides()
        assert sides
        holder.kill()
        await fails_soon(push)
        await soon(lambda: not any(alive(pid) for pid in sides), ORPHANS_END_WITHIN_S)
        copy.place(PAYLOAD_BYTES)
        await goes_through(owner, other_address, copy.outgoing)
        assert await other.line() == "{3: (7,)}"


@in_side_processes
@on_a_loop
async def test_a_side_process_that_is_stopped_is_given_up_by_a_cancelled_push_and_the_next_one_works(kind):
    """The library never says that its peer does not answer; the halt that follows the lease ends the transfer."""
    async with owner_and_holders(kind) as (owner, [(holder, address)]):
        push, _ = await half_way(owner, address)
        os.kill(min(holder.sides()), signal.SIGSTOP)  # the one of this link, not the warm one that was started after it
        began = time.monotonic()
        push.cancel()
        with pytest.raises(asyncio.CancelledError):
            await push
        assert time.monotonic() - began < NOTICED_WITHIN_S
        await goes_through(owner, address, Copy(snapshot()).complete())
        assert await holder.line() == "{3: (7,)}"


@in_side_processes
@on_a_loop
async def test_a_stalled_sender_cannot_write_into_what_came_after_it(kind):
    """Guarantee 6: its link is ended, and this end's side process dead, before the slot is given to another."""
    async with Pair(kind) as pair, Pair(kind) as successor:
        copy = Copy(snapshot(generation=5))
        copy.place(3 * CHUNK_BYTES)
        stalled = asyncio.ensure_future(pair.owner.push(pair.address, copy.outgoing))
        await soon(lambda: pair.holder.bytes_received > 2 * CHUNK_BYTES, 60.0)
        new = snapshot(generation=7)
        await successor.push(new, pair.address)
        copy.place(PAYLOAD_BYTES)
        with pytest.raises(PeerFault):
            await stalled
        assert content(*await successor.fetch(address=pair.address)) == content(*new)


@in_side_processes
@on_a_loop
async def test_many_transfers_leave_no_process_no_descriptor_and_no_task(kind):
    """Guarantee 8."""
    before = len([fd for fd in os.listdir("/proc/self/fd") if not _is_memory(fd)])
    async with Pair(kind) as pair:
        for generation in range(6, 12):
            await pair.push(snapshot(generation=generation))
        await pair.fetch(generation=11)
    assert not children(os.getpid())
    assert len(asyncio.all_tasks()) == 1
    assert len([fd for fd in os.listdir("/proc/self/fd") if not _is_memory(fd)]) <= before


def _is_memory(fd):
    """Of the snapshots themselves."""
    with contextlib.suppress(OSError):
        return "deadpool-slots" in os.readlink(f"/proc/self/fd/{fd}")
    return True


@on_a_loop
async def test_a_library_that_is_not_installed_is_refused_in_words(monkeypatch, tmp_path):
    """An empty interpreter path is what a node without the packages looks like."""
    for name, kind in SIDE.items():
        for module in ("mpi4py", "nixl", "nixl_cu12", "nixl_cu13"):
            (tmp_path / f"{module}.py").write_text("raise ModuleNotFoundError(f'No module named {__name__!r}')\n")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(HERE.parents[1])]))
        with pytest.raises(UsageError, match=rf"--hot-swap-transport {name} does not work on this node: .*pip install"):
            await kind(TOKEN, "127.0.0.1").check()


@pytest.mark.skipif(bool(MISSING["mpi"]), reason=str(MISSING["mpi"]))
def test_the_agents_process_never_loads_mpi():
    """The tests above have used it."""
    assert "mpi4py" not in sys.modules
