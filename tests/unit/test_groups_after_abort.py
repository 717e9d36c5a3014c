"""Groups are rebuilt although torch has forgotten them: an abort of NCCL's communicators clears its registries, WORLD too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
