"""The rendezvous store against torch's TCPStore: one suite for both, since one stands in for the other; and what ours promises beyond."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron.hotswap.topology.process_group import connect_gloo
from megatron.hotswap.topology.rendezvous import GroupStore, Rendezvous, RendezvousStore

TIMEOUT = timedelta(seconds=20)


@pytest.fixture(params=["ours", "torch's"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[[], dist.Store]]:
    if request.param == "ours":
        served = Rendezvous("127.0.0.1")
        yield lambda: RendezvousStore(served.address, TIMEOUT)
    else:
        master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield lambda: dist.TCPStore("127.0.0.1", master.port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)


def test_operations(connect: Callable[[], dist.Store]) -> None:
    store, other = connect(), connect()
    store.set("text", "value")
    store.set("bytes", b"\x00\xff")
    store.set("empty", "")
    assert (other.get("text"), other.get("bytes"), other.get("empty")) == (b"value", b"\x00\xff", b"")
    assert [other.add("count", n) for n in (3, -5, 0)] == [3, -2, -2]
    assert store.get("count") == b"-2"
    assert store.check(["text", "count"]) and not store.check(["text", "nothing"])
    assert store.compare_set("new", "", "first") == b"first"
    assert store.compare_set("new", "wrong", "second") == b"first"
    assert store.compare_set("new", "first", "second") == b"second"
    store.append("log", "a")
    store.append("log", "b")
    store.multi_set(["x", "y"], ["1", "2"])
    assert list(map(bytes, store.multi_get(["y", "log", "x"]))) == [b"2", b"ab", b"1"]
    assert store.delete_key("x") and not store.delete_key("x") and not other.check(["x"])
    assert store.has_extended_api()
    large = os.urandom(3 << 20)
    other.set("large", large)
    assert store.get("large") == large


def test_who_asks_for_a_key_waits_for_it(connect: Callable[[], dist.Store]) -> None:
    store, setter = connect(), connect()

    def later() -> None:
        time.sleep(0.2)
        setter.set("first", "1")
        time.sleep(0.2)
        setter.set("second", "2")

    thread = threading.Thread(target=later)
    began = time.monotonic()
    thread.start()
    assert list(map(bytes, store.multi_get(["second", "first"]))) == [b"2", b"1"]
    assert time.monotonic() - began > 0.35
    thread.join()
    with pytest.raises(dist.DistStoreError):
        store.wait(["never"], timedelta(seconds=0.3))
    assert store.get("first") == b"1"  # a question that ran out leaves no answer for the next one


def test_a_group_meets_and_works_over_it(connect: Callable[[], dist.Store]) -> None:
    found: dict[int, torch.Tensor] = {}

    def member(rank: int) -> None:
        client = connect()
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
        options._timeout = TIMEOUT
        store = GroupStore(client, "group", 3, fetch_at_once=rank != 2)  # either way of asking gives the same
        assert not store.posted()  # it says at once what it says
        group = dist.ProcessGroupGloo(store, rank, 3, options)
        found[rank] = torch.full((4,), float(rank))
        group.allreduce([found[rank]], dist.AllreduceOptions()).wait()

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {rank: value.tolist() for rank, value in found.items()} == {rank: [3.0] * 4 for rank in range(3)}


class Counted(RendezvousStore):
    asked = 0

    def _ask(self, *args: object, **settings: object) -> list[bytes]:
        self.asked += 1
        return super()._ask(*args, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("members", [2, 8])
def test_a_member_makes_two_operations_whatever_the_size_of_its_group(members: int) -> None:
    served = Rendezvous("127.0.0.1")
    clients = [Counted(served.address, TIMEOUT) for _ in range(members)]
    stores = [GroupStore(client, "group", members, fetch_at_once=True) for client in clients]
    for rank, store in enumerate(stores):
        store.set(f"0/{rank}", f"at {rank}")
    for store in stores:
        assert [store.get(f"0/{rank}") for rank in range(members)] == [f"at {rank}".encode() for rank in range(members)]
    assert [client.asked for client in clients] == [2] * members


def test_what_large_groups_say_is_said_at_once() -> None:
    """Their members are not met when they are made, so all of them cost one operation."""
    served = Rendezvous("127.0.0.1")
    client = Counted(served.address, TIMEOUT)
    made = connect_gloo(
        ["a", "b", "c"], [range(20)] * 3, 4, client, timeout=TIMEOUT, address="127.0.0.1", require_wanted=lambda: None
    )
    assert (len(made), client.asked, client.num_keys()) == (3, 1, 3)
    made[0].store.set("more", "later")
    assert made[0].store.get("more") == b"later"


def test_another_secret_is_refused_and_the_end_is_told() -> None:
    served = Rendezvous("127.0.0.1")
    with pytest.raises(dist.DistNetworkError, match="closed the connection"):
        RendezvousStore(served.address[:-1] + "z", TIMEOUT).get("key")
    store = RendezvousStore(served.address, TIMEOUT)
    failures: list[Exception] = []

    def wait() -> None:
        try:
            store.get("never")
        except dist.DistNetworkError as failure:
            failures.append(failure)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    del served
    thread.join(10)
    assert "is gone" in str(failures[0])
    with pytest.raises(dist.DistNetworkError, match="cannot be reached"):
        store.get("never")


def test_nobody_asks_the_name_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients and server use numbers: see csrc/rendezvous.hpp for what names cost."""
    import socket

    served = Rendezvous("127.0.0.1")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the name service was asked")

    for name in ("gethostbyname", "gethostbyaddr", "getnameinfo", "getfqdn"):
        monkeypatch.setattr(socket, name, refuse)
    assert served.address.startswith("127.0.0.1:")
    assert RendezvousStore(served.address, TIMEOUT).add("key", 1) == 1
