"""Groups are rebuilt although torch has forgotten them: an abort of NCCL's communicators clears its registries, WORLD too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
from datetime import timedelta
import torch
import torch.distributed as dist
from megatron.hotswap.topology.groups import Groups, _forget_world

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

def start(membership):
    dist.init_process_group("gloo", store=dist.PrefixStore(str(membership), store), rank=0, world_size=1)

class Holder:
    pass

start(1)
groups, timeout = Groups(timedelta(seconds=20)), timedelta(seconds=20)
holder = Holder()
holder.group, holder.world, holder.nothing = groups.create([0], None, None, None, None), dist.group.WORLD, None

_forget_world()  # what _abort_process_group(None) leaves: no WORLD, empty registries
assert dist.group.WORLD is None
replaced = groups.rebuild(lambda: start(2), lambda: groups.create([0], None, None, None, None))
assert holder.world is dist.group.WORLD, vars(holder)
assert holder.nothing is None
tensor = torch.ones(3)
dist.all_reduce(tensor, group=holder.group)
dist.all_reduce(tensor, group=holder.world)
print("rebuilt", replaced)
"""


def test_the_world_is_replaced_where_it_is_held() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.startswith("rebuilt")
