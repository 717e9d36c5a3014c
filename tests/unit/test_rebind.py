"""topology/rebind.py: whoever holds an old group holds the new one afterwards, or is named."""

from __future__ import annotations

import functools
import gc
from typing import Any, NamedTuple

import pytest

import deadpool_ext
from megatron.hotswap.errors import HotSwapError
from megatron.hotswap.topology.rebind import Holders, who_holds


class Group:
    """Stands for a process group: compared by identity, not tracked by the collector as long as it has no attributes."""

    __slots__ = ("__weakref__",)


class Owner:
    """Has attributes."""


class Slotted:
    """Has no attribute dictionary."""

    __slots__ = ("group",)


class Pair(NamedTuple):
    """Held by name."""

    group: Any
    size: int


def replaced(old: Group) -> tuple[Group, int]:
    new = Group()
    return new, Holders([old]).replace({id(old): new})


def test_every_kind_of_holder() -> None:
    old = Group()
    owner, empty = Owner(), Owner()
    owner.group, owner.size = old, 1
    empty.inner = {"deep": [old]}
    listed, keyed, members = [1, old], {old: "key", "value": old}, {old}
    nested = [((old, 1), {"a": (old,)})]
    named = {"pair": Pair(old, 2)}
    partial = functools.partial(print, old, group=old)

    def closure() -> Any:
        return old

    def default(group: Any = old) -> Any:
        return group

    new, count = replaced(old)
    assert closure() is new
    assert owner.group is new and empty.inner["deep"][0] is new
    assert listed[1] is new and keyed[new] == "key" and keyed["value"] is new and members == {new}
    assert nested[0][0][0] is new and nested[0][1]["a"][0] is new
    assert named["pair"] == Pair(new, 2) and isinstance(named["pair"], Pair)
    assert partial.args[0] is new and partial.keywords["group"] is new
    assert default() is new
    assert count >= 12


def test_attributes_that_the_collector_does_not_track_are_found() -> None:
    """CPython leaves out a dictionary whose values cannot be part of a cycle: megatron.core's ProcessGroupCollection has such ones."""
    old = Group()
    owner = Owner()
    vars(owner).update({"tp": old, "size": 2})
    gc.collect()
    new, count = replaced(old)
    assert owner.tp is new and count == 1


def test_a_holder_that_cannot_be_changed_is_named() -> None:
    old = Group()
    holder = Slotted()
    holder.group = old
    with pytest.raises(HotSwapError, match=r"of type .*Slotted holds an old process group"):
        replaced(old)
    assert holder.group is old


def test_holders_of_groups_that_are_kept_are_left_alone() -> None:
    kept, old = Group(), Group()
    holder = Slotted()
    holder.group = kept
    both = {"kept": kept, "old": old, "tuple": (kept, old)}
    new = Group()
    assert Holders([kept, old]).replace({id(old): new}) == 2
    assert both == {"kept": kept, "old": new, "tuple": (kept, new)}


def test_who_still_holds_one_is_said() -> None:
    old = Group()
    assert who_holds([old]) == []
    cache = {"tp_group": old}
    assert who_holds([old]) == ["a dictionary, under ['tp_group']"]
    cache["tp_group"] = [(1, old)]
    assert who_holds([old]) == ["a tuple in builtins.list"]
    del cache

    def called(*arguments: Any) -> list[str]:
        return who_holds([arguments[0]])

    assert called(old) == []


def test_one_pass_finds_what_the_collector_finds() -> None:
    objects = tuple(Group() for _ in range(30))
    holders = [[x] for x in objects] + [{"x": x} for x in objects]
    found = {id(h) for h in deadpool_ext.referrers(objects)}
    assert {id(h) for h in holders} <= found
    assert {id(h) for h in gc.get_referrers(*objects) if h is not objects} <= found
