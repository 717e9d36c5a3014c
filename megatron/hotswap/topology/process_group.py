"""Making and forgetting single process groups: what torch.distributed's new_group and destroy_process_group do, for one group and
by its members alone.

`torch.distributed.init_process_group` and `new_group` expect that nothing was there before, count calls to find a name, and wrap
sys.excepthook once more each time; a job that rebuilds its groups fifty times needs the parts below them (distributed_c10d's
`_new_process_group_helper` and `_register_pg_in_world`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import distributed_c10d as c10d

from deadpool_ext import open_sockets

from .rendezvous import GroupStore
from .sockets import Sockets

#: gloo groups of up to so many members connect to each other when they are made: their sockets are known then, so that one group can
#: be ended and another kept. In larger ones each pair connects when it first has something to say: what a member does to join must
#: not grow with the group.
EAGER_MEMBERS_MAX = 8
#: How often a thread that waits for others looks whether there is still something to wait for.
_LOOK_S = 0.02


@dataclass(frozen=True)
class Gloo:
    """What communicates in a gloo group, the store that it needs as long as it lives, and its connections where it has them already."""

    backend: Any
    store: GroupStore
    sockets: Sockets


def connect_gloo(
    names: Sequence[str],
    members: Sequence[Sequence[int]],
    rank: int,
    store: dist.Store,
    *,
    timeout: timedelta,
    address: str | None,
    require_wanted: Callable[[], None],
) -> list[Gloo]:
    """Connect several groups, one after another. Blocks until the members of the small ones are there.

    gloo connects a whole group in one call. Where a member has died it may wait in there for good: the end of its sockets does not wake it,
    nor does its own timeout (seen with torch 2.13: 90 s with a timeout of 10 s). So the calls are left to a thread, and the thread to
    itself once nobody wants the groups any more.

    Args:
        names: of all memberships' groups, only these.
        members: of each group: global ranks, ascending.
        rank: this process's global rank, in each of them.
        address: this host's address; None: as torch finds it.
        require_wanted: raises once nobody wants the groups any more; asked all the time.
    """
    if not names:
        return []
    found: list[Gloo] = []
    failed: list[BaseException] = []

    def run() -> None:
        seen: Sockets = frozenset()
        looked = False  # whether `seen` is what there is
        try:
            for name, ranks in zip(names, members, strict=True):
                small = len(ranks) <= EAGER_MEMBERS_MAX
                connects = small and len(ranks) > 1
                if connects and not looked:
                    seen = open_sockets()
                own = GroupStore(store, name, len(ranks), fetch_at_once=small)
                backend = _gloo_backend(ranks.index(rank), len(ranks), own, timeout, address)
                now = open_sockets() if connects else seen
                found.append(Gloo(backend, own, now - seen))
                seen, looked = now, connects  # a large group has a socket that listens, which is nobody's connection
            said = {key: value for gloo in found for key, value in gloo.store.posted().items()}
            if said:
                store.multi_set(list(said), list(said.values()))
        except BaseException as failure:
            failed.append(failure)

    thread = threading.Thread(target=run, name="deadpool-connect", daemon=True)
    thread.start()
    while thread.is_alive():
        require_wanted()
        thread.join(_LOOK_S)
    if failed:
        raise failed[0]
    return found


def make(
    name: str,
    members: Sequence[int],
    rank: int,
    backend: str,
    store: dist.Store,
    *,
    gloo: Gloo | None,
    timeout: timedelta,
    options: Any = None,
    description: str | None = None,
    world: bool = False,
) -> dist.ProcessGroup:
    """Create a group and enter it in torch's registries; waits for nobody.

    Args:
        name: of all memberships' groups, only this one's.
        members: global ranks, ascending.
        rank: this process's global rank, one of `members`.
        gloo: of a gloo group, from `connect_gloo`.
        world: it becomes the default group.
    """
    mapping = {member: i for i, member in enumerate(members)}
    if gloo is not None:
        group = _assemble(name, mapping, rank, backend, gloo.store, gloo.backend, dist.ProcessGroup.BackendType.GLOO, description)
    else:
        group, _ = c10d._new_process_group_helper(
            len(members),
            mapping[rank],
            [] if world else list(members),
            c10d.Backend(backend),
            store,
            name,
            backend_options=options,
            timeout=timeout,
            group_desc=description,
        )
        c10d._world.pg_group_ranks[group] = mapping
    if world:
        c10d._update_default_pg(group)
    return group


def make_stand_in(
    name: str, members: Sequence[int], rank: int, backend: str, *, description: str | None = None, world: bool = False
) -> dist.ProcessGroup:
    """A group that never communicates (torch's fake backend), for the devices that `backend` serves. `graft` makes it a real one."""
    mapping = {member: i for i, member in enumerate(members)}
    fake = FakeProcessGroup._create_internal(mapping[rank], len(members))
    group = _assemble(name, mapping, rank, backend, dist.HashStore(), fake, dist.ProcessGroup.BackendType.CUSTOM, description)
    if world:
        c10d._update_default_pg(group)
    return group


def graft(stand_in: dist.ProcessGroup, real: dist.ProcessGroup) -> None:
    """Give a stand-in what communicates in `real`, and its place in torch's registries: who holds the stand-in holds a real group now.

    A process group keeps the first backend of each type that it is given, so this can be done to a stand-in, once.
    """
    world = c10d._world
    backend, store = world.pg_map[real]
    name, mapping, is_default = world.pg_names[real], world.pg_group_ranks[real], world.default_pg is real
    for device in real._device_types:
        made = real._get_backend(device)
        kind = getattr(dist.ProcessGroup.BackendType, made.name().upper(), dist.ProcessGroup.BackendType.CUSTOM)
        stand_in._register_backend(device, kind, made)
        stand_in._set_default_backend(kind)
    stand_in._set_group_name(name)
    forget(real)
    forget(stand_in)
    _register(stand_in, name, backend, store, mapping)
    if is_default:
        c10d._update_default_pg(stand_in)


def _assemble(
    name: str, mapping: dict[int, int], rank: int, backend: str, store: dist.Store, served_by: Any, kind: Any, description: str | None
) -> dist.ProcessGroup:
    """A process group for all devices of `backend`, each served by `served_by`, in torch's registries."""
    group = dist.ProcessGroup(store, mapping[rank], len(mapping))
    group._set_default_backend(kind)
    for device in c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map():
        group._register_backend(torch.device(device), kind, served_by)
    group._set_group_name(name)
    group._set_group_desc(description or "undefined")
    _register(group, name, backend, store, mapping)
    return group


def _register(group: dist.ProcessGroup, name: str, backend: str, store: dist.Store, mapping: dict[int, int]) -> None:
    config = str(c10d.BackendConfig(c10d.Backend(backend)))
    c10d._register_pg_in_world(group, backend, store, name, config, rank_mapping=mapping, add_to_default_tag=True)


def _gloo_backend(rank: int, size: int, store: dist.Store, timeout: timedelta, address: str | None) -> Any:
    options = dist.ProcessGroupGloo._Options()
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    # Small groups share a device, which is a thread and a listening socket. Lazy ones cannot: with two groups on one lazy device
    # gloo takes the connections of one for the other's, and their first collectives hang (seen with torch 2.13).
    lazy = size > EAGER_MEMBERS_MAX
    options._devices = [_gloo_device(interfaces, address, lazy=True) if lazy else _shared_gloo_device(interfaces, address)]
    options._timeout = timeout
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    backend._set_sequence_number_for_group()
    return backend


@functools.cache
def _shared_gloo_device(interfaces: str | None, address: str | None) -> Any:
    return _gloo_device(interfaces, address, lazy=False)


def _gloo_device(interfaces: str | None, address: str | None, lazy: bool) -> Any:
    if interfaces:
        return dist.ProcessGroupGloo.create_device(interface=interfaces.split(",")[0], lazy_init=lazy)
    if address:
        return dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=lazy)
    return dist.ProcessGroupGloo.create_default_device(lazy_init=lazy)


def forget(group: dist.ProcessGroup) -> None:
    """Take a group out of torch's registries, as destroy_process_group does, without waiting for anybody.

    One that an abort has taken out already is fine. The default group is gone afterwards if it was this one.
    """
    world = c10d._world
    name = world.pg_names.get(group)
    if world.default_pg is group:
        c10d._update_default_pg(None)
    tag = world.pg_to_tag.get(group)
    for tagged in (tag, ""):
        if tagged is not None and group in world.tags_to_pg.get(tagged, []):
            world.tags_to_pg[tagged].remove(group)
    if tag is not None and not world.tags_to_pg.get(tag, [group]):
        del world.tags_to_pg[tag]
    for registry in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.pg_coalesce_state,
    ):
        registry.pop(group, None)
    if name is not None:
        with contextlib.suppress(RuntimeError):  # torch counts it an error that it is not there
            c10d._unregister_process_group(name)


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """How long a gloo group's collectives that begin from now on may take."""
    group._get_backend(torch.device("cpu")).set_timeout(timeout)  # not that of a stand-in which it was once
