"""Process groups of one membership: recorded as they are created, rebuilt in the same order, and replaced wherever they are held.

Megatron creates its groups in an order that follows from the grid alone, so the i-th group of the new membership stands for the
i-th of the old one. `rebind` then replaces every reference to an old group that the garbage collector can find, and says who
holds one that it cannot replace: a reference that stays would be a collective with the dead.
"""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..errors import HotSwapError


class Groups:
    """The groups of this rank."""

    def __init__(self, collective_timeout: timedelta) -> None:
        self.fake = False  # build groups that never communicate (a spare's first start)
        self._timeout = collective_timeout
        self._world: dist.ProcessGroup | None = None  # an abort of NCCL's groups makes torch forget it; references do not
        self._created: list[tuple[dist.ProcessGroup, tuple[int, ...]]] = []
        self._held: list[tuple[dist.ProcessGroup | None, tuple[int, ...]]] | None = (
            None  # what references point to, if not _created
        )

    def create(
        self,
        ranks: list[int] | None,
        backend: str | None,
        pg_options: Any,
        timeout: timedelta | None,
        description: str | None,
    ) -> Any:
        """Create one group as torch.distributed.new_group does, and remember it if this rank is in it.

        gloo groups get a timeout of seconds: it is the last means to end a gloo collective, and it counts from when the wait
        begins, so it must be short when the group is made.
        """
        if self.fake:
            backend, pg_options = "fake", None
        elif (backend or dist.get_backend()) == "gloo":
            timeout = self._timeout
        group = dist.new_group(ranks, timeout=timeout, backend=backend, pg_options=pg_options, group_desc=description)
        self._world = dist.group.WORLD
        members = tuple(ranks) if ranks is not None else tuple(range(dist.get_world_size()))
        if dist.get_rank() in members:
            self._created.append((group, members))
        return group

    def rebuild(self, start_world: Callable[[], None], create_all: Callable[[], None]) -> int:
        """Drop all groups, build those of the new membership and replace the old ones everywhere.

        Args:
            start_world: initializes torch.distributed on the new store.
            create_all: has Megatron create its groups again, through `create`.

        Returns:
            How many references were replaced.
        """
        if self._held is None:
            assert self._world is not None, "no group was created yet"
            self._held = [(self._world, ()), *self._created]
        _require_known([group for group, _ in (*self._held, *self._created)])
        self._created = []
        _forget_world()
        start_world()
        create_all()
        new = [(dist.group.WORLD, ()), *self._created]
        if [ranks for _, ranks in self._held] != [ranks for _, ranks in new]:
            raise HotSwapError(
                "the rebuilt groups are not those of the old membership: a group was created after initialization"
            )
        # From here on nothing can fail for a peer's sake. Were it not so, the next attempt would still begin at `_held`.
        old_groups = [group for group, _ in self._held]
        self._held = None
        return rebind({id(old): group for old, (group, _) in zip(old_groups, new, strict=True)}, old_groups)


def _require_known(known: list[Any]) -> None:
    ours = {id(group) for group in known}
    world = dist.group.WORLD  # of an attempt that was broken off, perhaps
    foreign = [
        c10d._world.pg_names[group] for group in c10d._world.pg_map if id(group) not in ours and group is not world
    ]
    if foreign:
        raise HotSwapError(
            f"process groups {foreign} were not created through Megatron's parallel_state, so they cannot be rebuilt; create "
            "groups with megatron.core.parallel_state.create_group during initialize_model_parallel"
        )


def _forget_world() -> None:
    """As destroy_process_group() clears torch's registries, without waiting for anybody: the old groups are dead already."""
    world = c10d._world
    c10d._update_default_pg(None)
    for registry in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
        world.pg_coalesce_state,
    ):
        registry.clear()
    c10d._unregister_all_process_groups()
    world.group_count = 0


def rebind(replacement: dict[int, Any], old: list[Any]) -> int:
    """Replace every reference to a group in `old` by replacement[id(group)]; returns how many there were.

    Raises:
        HotSwapError: a holder cannot be changed; names its type.
    """
    ours = {id(replacement), id(old)}
    count = 0
    for holder in [*gc.get_referrers(*old), *_unseen_dicts(replacement)]:
        if id(holder) in ours or isinstance(holder, types.FrameType):
            continue
        count += _replace(holder, replacement, ours)
    return count


def _unseen_dicts(new: dict[int, Any]) -> list[dict[Any, Any]]:
    """Attribute dictionaries that hold groups and that the garbage collector does not list as referrers.

    CPython does not track a dictionary whose values cannot be part of a cycle, and a process group is such a value: the
    attributes of megatron.core's ProcessGroupCollection are all groups. They are found through the objects they belong to.
    """
    has_dict: dict[type, bool] = {}
    found = []
    for owner in gc.get_objects():
        kind = type(owner)
        if kind not in has_dict:
            plain = issubclass(kind, type | types.FunctionType | types.ModuleType | functools.partial)
            has_dict[kind] = not plain and getattr(kind, "__dictoffset__", 0) != 0
        if has_dict[kind]:
            for attributes in gc.get_referents(owner):
                if (
                    type(attributes) is dict
                    and not gc.is_tracked(attributes)
                    and any(id(v) in new for v in attributes.values())
                ):
                    found.append(attributes)
    return found


def _replace(holder: Any, new: dict[int, Any], ours: set[int]) -> int:
    if isinstance(holder, dict):
        hits = [k for k, v in holder.items() if id(v) in new]
        for key in hits:
            holder[key] = new[id(holder[key])]
        keys = [k for k in holder if id(k) in new]
        for key in keys:
            holder[new[id(key)]] = holder.pop(key)
        return len(hits) + len(keys)
    if isinstance(holder, list):
        hits = [i for i, v in enumerate(holder) if id(v) in new]
        for i in hits:
            holder[i] = new[id(holder[i])]
        return len(hits)
    if isinstance(holder, set):
        hits = [v for v in holder if id(v) in new]
        for v in hits:
            holder.remove(v)
            holder.add(new[id(v)])
        return len(hits)
    if isinstance(holder, types.CellType):
        holder.cell_contents = new[id(holder.cell_contents)]
        return 1
    if isinstance(holder, tuple):
        return _replace_tuple(holder, new, ours)
    if isinstance(holder, functools.partial | types.MethodType | types.BuiltinMethodType):
        return 0  # its arguments are a tuple and a dict, which are holders themselves
    fields = getattr(holder, "__dict__", None)
    if fields is not None:  # an object whose attribute dictionary is not materialized is reported itself
        hits = [k for k, v in fields.items() if id(v) in new]
        for key in hits:
            fields[key] = new[id(fields[key])]
        return len(hits)
    if type(holder).__name__ in ("_Work", "list_iterator", "dict_valueiterator"):
        return 0
    raise HotSwapError(
        f"an object of type {type(holder).__module__}.{type(holder).__qualname__} holds an old process group"
    )


def _replace_tuple(holder: tuple[Any, ...], new: dict[int, Any], ours: set[int]) -> int:
    """A tuple cannot change: put a new one where the old one is held."""
    fresh = tuple(new.get(id(v), v) for v in holder)
    count = 0
    for owner in gc.get_referrers(holder):
        if isinstance(owner, types.FrameType) or id(owner) in ours:
            continue
        if isinstance(owner, functools.partial):
            state = list(owner.__reduce__()[2])  # func, args, keywords, dict
            state[1] = fresh
            owner.__setstate__(tuple(state))
            count += 1
        elif isinstance(owner, dict | list | types.CellType):
            count += _replace(owner, {id(holder): fresh}, ours)
    return count
