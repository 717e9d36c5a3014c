"""Replacing references to process groups wherever they are held, and saying who still holds an old one."""

from __future__ import annotations

import functools
import gc
import types
from typing import Any

from ..errors import HotSwapError


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
