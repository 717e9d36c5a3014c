"""Replacing references to process groups wherever they are held, and saying who still holds an old one.

Groups sit in model chunks, DDP's buckets, optimizers, configuration objects, closures and partials, in every object of Megatron's
that is built with one. No list of such places would stay complete; the garbage collector knows them all. One pass of the compiled
engine over its objects (deadpool_ext.referrers) finds the holders.
"""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Mapping, Sequence
from typing import Any

import deadpool_ext

from ..errors import HotSwapError

#: Kinds that hold a group for a moment (worker/abort.py's too: until a collective that cannot be aborted has ended), or through a part
#: that is found by itself.
_PASSING = (types.FrameType, types.MethodType, types.BuiltinMethodType, types.GeneratorType, types.CoroutineType)
_PASSING_NAMES = (
    *("_Work", "_Scattered", "_Grave"),
    *("list_iterator", "tuple_iterator", "dict_valueiterator", "dict_itemiterator", "zip", "enumerate"),
)


class Holders:
    """Who held some objects when this was made: found while there is time, to be changed when there is none.

    The search takes some 0.1 s where half a million objects live, for each level of tuples. Nothing of the trainer may run between it
    and `replace`.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        found = _holders(objects)
        self._changeable = [holder for holder in found if not isinstance(holder, tuple)]
        # A tuple cannot change: a new one is put where the old one is held.
        self._tuples = [holder for holder in found if isinstance(holder, tuple)]
        del found  # it holds them too
        self._of_tuples = Holders(self._tuples) if self._tuples else None

    def replace(self, new: Mapping[int, Any]) -> int:
        """Replace every reference to an object by new[id(object)], where there is one; returns how many references that were.

        Raises:
            HotSwapError: a holder cannot be changed; names its type.
        """
        count = sum(_replace(holder, new) for holder in self._changeable)
        if self._of_tuples is not None:
            renewed = {id(held): _renewed(held, new) for held in self._tuples if any(id(value) in new for value in held)}
            count += self._of_tuples.replace(renewed)
        return count


def who_holds(objects: Sequence[Any]) -> list[str]:
    """Whatever else than the caller's own variables still refers to any of these, in words; for a check that nothing does."""
    found = []
    holders = _holders(objects)
    while holders:  # taken out one by one: the list holds them too
        holder = holders.pop()
        if isinstance(holder, tuple):  # the arguments of a call that is on its way out are nobody's but their frame's
            found += [f"a tuple in {owner}" for owner in who_holds([holder])]
        elif isinstance(holder, dict):
            keys = [str(key) for key, value in holder.items() if any(value is o or key is o for o in objects)]
            found.append(f"a dictionary, under {keys}")
        else:
            found.append(_kind(holder))
    return sorted(found)


def _holders(objects: Sequence[Any]) -> list[Any]:
    return [h for h in deadpool_ext.referrers(tuple(objects)) if h is not objects and not _passes(h)]


def _passes(holder: Any) -> bool:
    return isinstance(holder, _PASSING) or type(holder).__name__ in _PASSING_NAMES


def _renewed(held: tuple[Any, ...], new: Mapping[int, Any]) -> tuple[Any, ...]:
    values = [new.get(id(value), value) for value in held]
    return type(held)._make(values) if hasattr(held, "_make") else type(held)(values)  # a named tuple takes them one by one


def _replace(holder: Any, new: Mapping[int, Any]) -> int:
    if isinstance(holder, dict):
        return _replace_in_dict(holder, new)
    if isinstance(holder, list):
        hits = [i for i, value in enumerate(holder) if id(value) in new]
        for i in hits:
            holder[i] = new[id(holder[i])]
        return len(hits)
    if isinstance(holder, set):
        members = [value for value in holder if id(value) in new]
        for value in members:
            holder.remove(value)
            holder.add(new[id(value)])
        return len(members)
    if isinstance(holder, types.CellType):
        if id(held := holder.cell_contents) not in new:
            return 0
        holder.cell_contents = new[id(held)]
        return 1
    if isinstance(holder, functools.partial):
        return _replace_in_partial(holder, new)
    if isinstance(holder, types.FunctionType) and id(holder.__defaults__) in new:
        holder.__defaults__ = new[id(holder.__defaults__)]
        return 1
    fields = getattr(holder, "__dict__", None)
    if isinstance(fields, dict):  # an object whose attribute dictionary is not materialized is found itself
        return _replace_in_dict(fields, new)
    if not any(id(value) in new for value in gc.get_referents(holder)):
        return 0
    raise HotSwapError(f"an object of type {_kind(holder)} holds an old process group")


def _replace_in_dict(holder: dict[Any, Any], new: Mapping[int, Any]) -> int:
    hits = [key for key, value in holder.items() if id(value) in new]
    for key in hits:
        holder[key] = new[id(holder[key])]
    keys = [key for key in holder if id(key) in new]
    for key in keys:
        holder[new[id(key)]] = holder.pop(key)
    return len(hits) + len(keys)


def _replace_in_partial(holder: functools.partial[Any], new: Mapping[int, Any]) -> int:
    """Only its tuple of arguments is its own: what else it refers to is found by itself."""
    func, arguments, keywords, attributes = holder.__reduce__()[2]  # type: ignore[index,misc]
    if id(arguments) not in new:
        return 0
    holder.__setstate__((func, new[id(arguments)], keywords, attributes))  # type: ignore[attr-defined]
    return 1


def _kind(holder: Any) -> str:
    return f"{type(holder).__module__}.{type(holder).__qualname__}"
