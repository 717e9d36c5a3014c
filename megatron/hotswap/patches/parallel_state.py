"""megatron.core.parallel_state, and the default group that megatron.training makes before it.

Replaced:
- `create_group`: so that a group is created by its members alone, is known by the number of its call, and is a stand-in that never
  communicates in a spare that builds its rank (topology/groups.py). What is created once is renewed there at a recovery, without
  Megatron: the variables of this module are references like any other.
- torch.distributed.init_process_group, which megatron.training.initialize calls by its module's name: so that the default group is
  made in the same way.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ..topology.groups import Groups


def create_through(groups: Groups) -> None:
    """Have the default group and Megatron's groups created, and remembered, by `groups`."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    def init_process_group(
        backend: str | None = None, *, store: Any = None, rank: int = -1, world_size: int = -1, **settings: Any
    ) -> None:
        if store is None and not groups.fake:
            store, rank, world_size = next(dist.rendezvous("env://", rank, world_size))
        groups.start_world(backend or "nccl", store, rank, range(world_size))

    def create_group(
        ranks: list[int] | None = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
    ) -> Any:
        group = groups.create(ranks, backend, pg_options, group_desc)
        if parallel_state._global_process_group_list is None:
            parallel_state._global_process_group_list = [None]  # the default group
        if ranks is not None and dist.get_rank() in ranks:
            parallel_state._global_process_group_list.append(group)
        return group

    dist.init_process_group = init_process_group
    parallel_state.create_group = create_group
