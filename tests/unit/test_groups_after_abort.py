"""What an abort must not break, or leave waiting.

Groups are rebuilt although torch has forgotten them: an abort of NCCL's communicators clears its registries, WORLD too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from megatron.hotswap.topology.groups import Groups
from megatron.hotswap.topology.process_group import forget
from megatron.hotswap.topology.rendezvous import Rendezvous, RendezvousStore

server = Rendezvous("127.0.0.1")
client = RendezvousStore(server.address, timedelta(seconds=20))

def store(membership):
    return dist.PrefixStore(f"membership{membership}", client)

class Holder:
    pass

hook = sys.excepthook
timeout = timedelta(seconds=20)
groups = Groups(timeout, timeout)
groups.version = 1
groups.start_world("gloo", store(1), 0, [0])
holder = Holder()
holder.group, holder.world, holder.nothing = groups.create([0], None, None, None), dist.group.WORLD, None

for group in (holder.group, holder.world):  # what _abort_process_group(None) leaves: no WORLD, empty registries
    forget(group)
groups.doom(None)
assert dist.group.WORLD is None
rebuilt = groups.rebuild(2, store(2), ())
assert holder.world is dist.group.WORLD, vars(holder)
assert holder.nothing is None
tensor = torch.ones(3)
dist.all_reduce(tensor, group=holder.group)
dist.all_reduce(tensor, group=holder.world)
assert sys.excepthook is hook, "init_process_group wraps it once more each time"
print("rebuilt", rebuilt)
"""


def test_the_world_is_replaced_where_it_is_held() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.startswith("rebuilt Rebuilt(kept=0, made=2")


HALTED_WHILE_CONNECTING = """
import multiprocessing, os, sys, threading, time
from datetime import timedelta
import torch.distributed as dist
from megatron.hotswap.errors import Halted
from megatron.hotswap.topology import process_group
from megatron.hotswap.topology.groups import Groups
from megatron.hotswap.topology.rendezvous import Rendezvous, RendezvousStore
from megatron.hotswap.worker.abort import Aborter

RANK, TIMEOUT = int(sys.argv[1]), timedelta(seconds=100)
context = multiprocessing.get_context("fork")
died = context.Event()

class Store(process_group.GroupStore):
    def wait(self, keys, timeout=None):
        if not self._name.endswith("world"):  # every member has said where it is, and asks where the others are
            if rank != RANK:
                died.set()
                os._exit(0)
            died.wait()
            time.sleep(0.5)
        super().wait(keys, timeout)

class Session:
    version, halted = 1, False
    def check(self):
        if self.halted: raise Halted("membership 1 is over")

def make(address, session):
    groups = Groups(TIMEOUT, TIMEOUT, address="127.0.0.1", require_wanted=session.check)
    aborter = Aborter(session, groups)
    groups.version = 1
    aborter.building_groups()
    def halt():
        died.wait(); time.sleep(2.0)
        session.halted, session.halted_s = True, time.monotonic()
        aborter.begin(1, (1 - rank,))
    if rank == RANK: threading.Thread(target=halt, daemon=True).start()
    groups.start_world("gloo", RendezvousStore(address, TIMEOUT, session.check), rank, [0, 1])
    groups.create([0, 1], None, None, None)

def peer(address):
    global rank
    rank = 1 - RANK
    make(address, Session())

rank, process_group.GroupStore = RANK, Store
served = Rendezvous("127.0.0.1")
context.Process(target=peer, args=(served.address,), daemon=True).start()
session = Session()
try:
    make(served.address, session)
except Exception as failure:
    print("out", type(failure).__name__, "after", time.monotonic() - session.halted_s, flush=True)
os._exit(0)  # without a wait for the thread that still connects
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_halt_ends_the_wait_for_a_member_that_died_while_groups_were_made(rank: int) -> None:
    """One of two connects to the other; whichever is left alone must be out at once, not when the group's timeout is over."""
    program = [sys.executable, "-c", HALTED_WHILE_CONNECTING, str(rank)]
    run = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert run.stdout.startswith("out "), run.stdout + run.stderr[-3000:]
    assert float(run.stdout.split()[-1]) < 10.0, run.stdout


#: Rank 0's gloo thread is in a collective that its peer never joins, and so waits its timeout out; STORY is what rank 0 does about it.
BLOCKED = """
import multiprocessing, time
from datetime import timedelta
import torch
import torch.distributed as dist
from megatron.hotswap.errors import Halted
from megatron.hotswap.topology.groups import Groups
from megatron.hotswap.topology.rendezvous import Rendezvous, RendezvousStore
from megatron.hotswap.worker.loop import Loop, Schedule, StepCall

TIMEOUT = timedelta(seconds=4)
context = multiprocessing.get_context("fork")
met, blocked = context.Barrier(2), context.Event()

def build(rank, address):
    groups = Groups(TIMEOUT, TIMEOUT, address="127.0.0.1", check=True)
    groups.version = 1
    client = RendezvousStore(address, timedelta(seconds=60))
    groups.start_world("gloo", dist.PrefixStore("membership1", client), rank, [0, 1])
    groups.create([0, 1], None, None, None)
    met.wait()
    return groups, client

def block(group):
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    time.sleep(0.5)
    blocked.set()
    return work

def rebuild(groups, client):
    groups.doom(None)
    groups.rebuild(2, dist.PrefixStore("membership2", client), ())

def peer(address):
    groups, client = build(1, address)
    connected = groups._mine[0].group._get_backend(torch.device("cpu"))  # kept: its end would end the other's wait
    blocked.wait()
    rebuild(groups, client)
    dist.all_reduce(torch.ones(3))
    time.sleep(60)

STORY

served = Rendezvous("127.0.0.1")
context.Process(target=peer, args=(served.address,), daemon=True).start()
story(*build(0, served.address))
"""

DROPPED = """
def story(groups, client):
    block(groups._mine[0].group)
    began = time.monotonic()
    rebuild(groups, client)
    took = time.monotonic() - began
    dist.all_reduce(torch.ones(3))
    longest, last, deadline = 0.0, time.monotonic(), time.monotonic() + 1.0
    while last < deadline:
        time.sleep(0.01)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    print("took", took, "stood still", longest, flush=True)
"""

HELD_BY_A_FRAME = """
class Session:
    halted = True

class Plan:
    generation, redo_sections = 0, True

def story(groups, client):
    class Recovery:
        def recover(self, position):
            rebuild(groups, client)
            dist.all_reduce(torch.ones(3))
            time.sleep(0.5)  # for what lets the old groups go
            return Plan()
    def step(retry):
        if retry:
            return time.monotonic()
        mine = groups._mine[0].group
        work = block(mine)
        try:
            raise RuntimeError("Connection closed by peer")
        except RuntimeError:
            raise Halted("membership 1 is over") from None
    loop = Loop(Session(), Recovery(), None, None, 0, Schedule())
    loop._calls.append(StepCall(0, (), {}, {}, False))
    began = time.monotonic()
    print("took", loop._drive(lambda: None, step) - began, flush=True)
"""


def while_blocked(story: str) -> list[str]:
    """Run a story; returns the words that it has printed. It ends in its own way, and well."""
    run = subprocess.run([sys.executable, "-c", BLOCKED.replace("STORY", story)], cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert run.stdout.startswith("took "), run.stdout + run.stderr[-3000:]
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.split()


def test_nobody_waits_for_the_end_of_groups_that_are_dropped() -> None:
    """gloo joins a dropped group's threads, one of which still waits for a peer: neither the rebuild nor Python stand still meanwhile,
    and a process that ends in its own way just then ends well."""
    _, took, _, _, still = while_blocked(DROPPED)
    assert float(took) < 2.5 and float(still) < 2.5, (took, still)


def test_the_training_thread_does_not_wait_for_a_group_that_the_failed_step_still_held() -> None:
    """Its frames are the exception's, and live until the recovery is over: their end would be the end of the old group, and that of the
    group a wait for gloo's thread in it. Seen as a rank that answered no halt for two minutes."""
    _, took = while_blocked(HELD_BY_A_FRAME)
    assert float(took) < 2.5, took


HALTED_IN_REDUCE_SCATTER = """
import multiprocessing, os, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
from megatron.hotswap.errors import Halted
from megatron.hotswap.topology.groups import Groups
from megatron.hotswap.topology.rendezvous import Rendezvous, RendezvousStore
from megatron.hotswap.worker import abort

TIMEOUT = timedelta(seconds=6)
context = multiprocessing.get_context("fork")
over = context.Event()

class Session:
    version, halted = 1, False
    def check(self):
        if self.halted: raise Halted("membership 1 is over")

def build(rank, address):
    groups = Groups(TIMEOUT, TIMEOUT, address="127.0.0.1")
    groups.version = 1
    groups.start_world("gloo", RendezvousStore(address, timedelta(seconds=60)), rank, [0, 1])
    return groups.create([0, 1], None, None, None)

def peer(address):
    group = build(1, address)
    dist.reduce_scatter_tensor(torch.zeros(2), torch.ones(4), group=group)
    over.wait()
    os._exit(0)

served = Rendezvous("127.0.0.1")
process = context.Process(target=peer, args=(served.address,), daemon=True)
process.start()
session = Session()
abort.guard_groups(session, on_device=False)
group = build(0, served.address)
part = torch.zeros(2)
dist.reduce_scatter_tensor(part, torch.full((4,), 3.0), group=group)
assert part.tolist() == [4.0, 4.0], part
threads = threading.active_count()
threading.Timer(1.0, setattr, (session, "halted", True)).start()
began = time.monotonic()
try:
    dist.reduce_scatter_tensor(part, torch.ones(4), group=group)  # the peer never joins
except Halted:
    print("out after", time.monotonic() - began, flush=True)
deadline = time.monotonic() + 60.0
while len(abort._GUARD.graveyard) and time.monotonic() < deadline:
    time.sleep(0.1)
while threading.active_count() > threads and time.monotonic() < deadline:
    time.sleep(0.1)
print("buried", len(abort._GUARD.graveyard), "threads", threading.active_count() - threads, flush=True)
over.set()
process.join(10)
os._exit(0)
"""


def test_a_halt_ends_the_wait_for_a_reduce_scatter_and_nothing_of_it_stays() -> None:
    """Its work knows no timeout and never says that it has ended: without more, every such halt would keep a group and its threads."""
    run = subprocess.run([sys.executable, "-c", HALTED_IN_REDUCE_SCATTER], cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert run.stdout.startswith("out after "), run.stdout + run.stderr[-3000:]
    assert float(run.stdout.split()[2]) < 4.0, run.stdout
    assert run.stdout.endswith("buried 0 threads 0\n"), run.stdout
