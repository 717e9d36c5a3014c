"""topology/groups.py with real gloo groups: which are kept, which are made anew, and that all of them work afterwards.

Four ranks, TP 2 x DP 2, as forked processes that are told what to do; one story each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: What every rank runs; `story(me)` differs. `me.tp`, `me.dp` and `me.world` are references like a model's.
FRAME = """
import multiprocessing, os, sys, threading, time, traceback
from datetime import timedelta
import torch
import torch.distributed as dist
from megatron.hotswap.topology import groups as g
from megatron.hotswap.topology.ledger import LEDGERS
from megatron.hotswap.topology.rendezvous import Rendezvous, RendezvousStore
from megatron.hotswap.worker import abort

WORLD, TIMEOUT = 4, timedelta(seconds=60)

class Session:
    version, halted = 1, False
    def check(self): pass

abort.guard_groups(Session(), on_device=False)

class Me:
    def __init__(self, rank, port, stand_in=False):
        self.rank, self.address, self.version = rank, address, 1
        self.start(stand_in)

    def start(self, stand_in):
        self.groups = g.Groups(TIMEOUT, TIMEOUT, address="127.0.0.1", check=True)
        self.groups.fake, self.groups.version = stand_in, 0 if stand_in else 1
        self.groups.start_world("gloo", self.store(1), self.rank, range(WORLD))
        self.world = dist.group.WORLD
        for ranks in ([0, 1], [2, 3]):
            group = self.groups.create(ranks, None, None, "tp")
            if self.rank in ranks: self.tp = group
        for ranks in ([0, 2], [1, 3]):
            group = self.groups.create(ranks, None, None, "dp")
            if self.rank in ranks: self.dp = group
        self.groups.create(None, "gloo", None, "model")
        self.alone = self.groups.create([self.rank], None, None, "alone")

    def be_replaced(self):
        for made in self.groups._all: g.process_group.forget(made.group)
        self.start(stand_in=True)

    def store(self, version):
        self.client = RendezvousStore(self.address, TIMEOUT)
        return dist.PrefixStore(f"membership{version}", self.client)

    def meet(self, name):
        store = self.store(name)
        if store.add("n", 1) == WORLD: store.set("go", b"1")
        store.wait(["go"])

    def rebuild(self, replaced=()):
        self.version += 1
        self.groups.find_holders()
        rebuilt = self.groups.rebuild(self.version, self.store(self.version), replaced)
        self.groups.settle()
        return rebuilt

    def use(self):
        for group in (self.world, self.tp, self.dp, self.alone):
            value = torch.ones(3)
            dist.all_reduce(value, group=group)
            assert value[0] == dist.get_world_size(group), (self.rank, value)
        assert self.world is dist.group.WORLD

    def kept(self, name):
        made = next(c for c in self.groups._mine if c.description == name)
        assert made.group is made.held
        return made.version < self.version

STORY

def run(rank, address, answers, ended):
    try:
        story(Me(rank, address))
        answers.put((rank, "ok"))
    except BaseException:
        answers.put((rank, traceback.format_exc()))
    answers.close(); answers.join_thread()
    try:
        dist.destroy_process_group()  # as a trainer does at its end
        ended.put("ok")
    except BaseException:
        ended.put(traceback.format_exc())
    ended.close(); ended.join_thread()
    time.sleep(1)
    os._exit(0)

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    addresses, answers, ended = context.Queue(), context.Queue(), context.Queue()
    def serve():
        store = Rendezvous("127.0.0.1")
        addresses.put(store.address); time.sleep(600)
    server = context.Process(target=serve, daemon=True); server.start()
    address = addresses.get()
    ranks = [context.Process(target=run, args=(rank, address, answers, ended), daemon=True) for rank in range(WORLD)]
    for process in ranks: process.start()
    said = [answers.get(timeout=120) for _ in ranks]
    said += [(0, ended.get(timeout=60)) for _ in ranks]
    server.kill()
    bad = [text for rank, text in sorted(said) if text != "ok"]
    print("\\n".join(bad) if bad else "all ok")
"""

STORIES = {
    "a lost rank costs the groups that it was in": """
def story(me):
    me.use(); me.meet("before")
    if me.rank == 3: me.be_replaced()
    rebuilt = me.rebuild(replaced=(3,))
    assert me.kept("tp") == (me.rank in (0, 1)), me.rank
    assert me.kept("dp") == (me.rank in (0, 2)), me.rank
    assert me.kept("alone") == (me.rank != 3) and not me.kept("model")
    assert rebuilt.made == {0: 2, 1: 3, 2: 3, 3: 5}[me.rank], rebuilt
    me.use()
    me.meet("again")
    if me.rank == 0: me.be_replaced()
    me.rebuild(replaced=(0,))
    me.use()
""",
    "nobody lost and nothing under way: all but the world are kept": """
def story(me):
    me.use(); me.meet("before")
    before = me.tp, me.dp
    rebuilt = me.rebuild()
    assert (me.tp, me.dp) == before and rebuilt.made == 1 and rebuilt.kept == 4, rebuilt
    me.use()
""",
    "a collective that one member has entered": """
def story(me):
    me.use(); me.meet("before")
    if me.rank == 0:
        work = dist.all_reduce(torch.ones(3), group=me.tp, async_op=True)
        me.groups.doom(())
    me.meet("entered")
    rebuilt = me.rebuild()
    assert me.kept("tp") == (me.rank in (2, 3)) and me.kept("dp")
    if me.rank in (0, 1): assert "unfinished work" in rebuilt.reasons["tp"], rebuilt
    me.use()
""",
    "a message that was sent and not received": """
def story(me):
    me.use(); me.meet("before")
    if me.rank == 2: work = dist.isend(torch.ones(3), 0, group=me.dp)  # a send of gloo's ends when it is received
    me.meet("sent")
    rebuilt = me.rebuild()
    assert me.kept("dp") == (me.rank in (1, 3)) and me.kept("tp")
    if me.rank in (0, 2): assert "members [1] have unfinished work" in rebuilt.reasons["dp"], rebuilt
    me.use()
    if me.rank == 2: dist.send(torch.full((3,), 7.0), 0, group=me.dp)
    if me.rank == 0:
        value = torch.zeros(3); dist.recv(value, 2, group=me.dp); assert value[0] == 7, value
""",
    "a rebuild that was broken off on one rank": """
def story(me):
    me.use(); me.meet("before")
    original = me.groups._replace
    def broken_off(renewed): raise RuntimeError("halted again")
    if me.rank == 0: me.groups._replace = broken_off
    try:
        me.rebuild(replaced=(1,))
    except RuntimeError:
        assert me.rank == 0
    me.groups._replace = original
    me.meet("again")
    me.rebuild(replaced=())
    assert me.kept("tp") == (me.rank in (2, 3)), me.rank
    me.use()
""",
    "what an attempt that was broken off has agreed on is not believed by the next one on the same store": """
def story(me):
    me.use(); me.meet("before")
    shared = me.store("shared"); client = me.client  # torch holds only its C++ half
    original = me.groups._replace
    def broken_off(renewed): raise RuntimeError("halted again")
    if me.rank == 0: me.groups._replace = broken_off
    for version in (2, 3):
        me.version = version
        me.groups.find_holders()
        if me.rank == 0: time.sleep(version / 3)  # it speaks last, and leads "dp": what is there already would be taken for its word
        try:
            me.groups.rebuild(version, shared, (1,))
        except RuntimeError:
            assert (me.rank, version) == (0, 2)
            me.groups.doom(None)
        me.groups._replace = original
        me.meet(f"after {version}")
    me.groups.settle()
    assert me.kept("tp") == (me.rank in (2, 3)), me.rank
    assert not me.kept("dp")
    me.use()
""",
    "an old group that somebody still holds is named": """
class Slotted:
    __slots__ = ("group",)

def story(me):
    me.use(); me.meet("before")
    if me.rank == 0:
        holder = Slotted(); holder.group = me.tp
    try:
        me.rebuild(replaced=(1,))
        assert me.rank != 0
    except Exception as failure:
        assert me.rank == 0 and "Slotted holds an old process group" in str(failure), failure
""",
    "one who came to hold an old group after the search is named": """
def story(me):
    me.use(); me.meet("before")
    original = me.groups.find_holders
    def search():
        original()
        if me.rank == 0: me.late = {"since": me.tp}
    me.groups.find_holders = search
    try:
        me.rebuild(replaced=(1,))
        assert me.rank != 0
    except Exception as failure:
        assert me.rank == 0 and str(failure).endswith("are left: a dictionary, under ['since']"), failure
""",
}


@pytest.mark.parametrize("name", STORIES)
def test_story(name: str, tmp_path: Path) -> None:
    program = tmp_path / "story.py"
    program.write_text(FRAME.replace("STORY", STORIES[name]))
    run = subprocess.run(
        [sys.executable, str(program)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=240,
    )
    assert run.stdout.strip() == "all ok", run.stdout[-4000:] + run.stderr[-2000:]
