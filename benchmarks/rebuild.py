"""Making all process groups of a Megatron grid again after the loss of a node, three ways, at growing numbers of processes.

    python benchmarks/rebuild.py [--worlds 4,8,16,32,64] [--repetitions 3]

- stock: torch's init_process_group and megatron-core's initialize_model_parallel, as a restart makes them;
- all: every group anew, by its members alone (`--hot-swap-rebuild all`);
- selective: only those that the lost node's ranks were in (`--hot-swap-rebuild selective`).

The processes have groups and no model (gloo, TP 2, PP 2 from 8 on, DP the rest; a node is two ranks). The lost node's ranks are taken
by processes that hold stand-in groups, as a spare does. Seconds are from the order until the last rank has its groups; operations are
those of a surviving rank on the rendezvous store, the most that any has made. Survivors have looked for the holders of their groups
before, as they do while a spare builds its model (`prepare_cpu_s`). torch's store asks the name service for every client's name; where
that does not answer, it waits for seconds. So the processes have a network of their own, without one, if that may be made (root). Many
processes share few cores here, so the seconds hold for this machine; what a rank does by itself is its processor time, from which
`model` says what other sizes would take.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's own would spin in every forked process, on the few cores that are measured

import numpy as np
import psutil
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.hotswap.patches.parallel_state import create_through
from megatron.hotswap.topology.groups import Groups
from megatron.hotswap.topology.process_group import connect_gloo
from megatron.hotswap.topology.rendezvous import Rendezvous, RendezvousStore

MODES = ("stock", "all", "selective")
ADDRESS = "127.0.0.1"
TIMEOUT = timedelta(seconds=600)
LOST = (2, 3)  # the ranks of the second node
MODEL_RANKS = (512, 4096, 16384)


class CountingStore(dist.Store):  # type: ignore[misc]
    """A store whose operations are counted."""

    def __init__(self, real: dist.Store) -> None:
        super().__init__()
        self._real = real
        self.operations = 0

    def has_extended_api(self) -> bool:
        return True


def _counted(name: str) -> Callable[..., Any]:
    def method(self: CountingStore, *arguments: Any) -> Any:
        self.operations += 1
        return getattr(self._real, name)(*arguments)

    return method


for _name in ("set", "get", "add", "wait", "check", "append", "multi_get", "multi_set", "compare_set", "delete_key"):
    setattr(CountingStore, _name, _counted(_name))


class Rank:
    """One process of the benchmark."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.groups: Groups | None = None
        self.version = 0
        self._stock = parallel_state.create_group, dist.init_process_group

    def initialize(self) -> None:
        pipeline = 2 if self.world >= 8 else 1
        parallel_state.initialize_model_parallel(2, pipeline, create_gloo_process_groups=True)

    def forget(self) -> None:
        """Be a process without groups, as a fresh one is; nobody is waited for."""
        parallel_state.destroy_model_parallel()
        parallel_state._global_process_group_list = None
        if dist.is_initialized():
            dist.destroy_process_group()
        self.groups = None

    def build(self, fake: bool, selective: bool, store: dist.Store | None) -> None:
        """Groups of the first membership, or a spare's stand-ins."""
        self.forget()
        self.groups = Groups(TIMEOUT, TIMEOUT, address=ADDRESS, selective=selective)
        self.groups.fake = fake
        self.groups.version = 0 if fake else self.version
        create_through(self.groups)
        self.groups.start_world("gloo", store, self.rank, range(self.world))
        self.initialize()

    def prepare(self, mode: str, stores: tuple[int, str]) -> float | None:
        """The state before the order; a survivor's processor time for what it does beforehand."""
        self.version += 1
        store = self.connect(mode, stores)
        if mode == "stock":
            self.forget()
            parallel_state.create_group, dist.init_process_group = self._stock
            return None
        self.build(False, mode == "selective", store)
        if self.rank in LOST:
            self.build(True, mode == "selective", None)  # the node is lost: a spare has built its ranks on stand-ins
            return None
        began = time.process_time()
        self.groups.find_holders()  # a survivor does this while the spare builds
        return time.process_time() - began

    def connect(self, mode: str, stores: tuple[int, str]) -> dist.Store:
        """A client of the store: torch's where torch makes the groups. Each membership has its keys to itself."""
        port, address = stores
        if mode == "stock":
            self.client: dist.Store = dist.TCPStore(ADDRESS, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
        else:
            self.client = RendezvousStore(address, TIMEOUT)
        return dist.PrefixStore(f"membership{self.version}", self.client)

    def order(self, mode: str, stores: tuple[int, str], counted: bool) -> dict[str, Any]:
        """Make the groups."""
        began_cpu = time.process_time()
        self.version += 1
        store = self.connect(mode, stores)
        if counted:
            store = CountingStore(store)
        kept, made = 0, 0
        if mode == "stock":
            os.environ.pop("TORCH_GLOO_LAZY_INIT", None)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world, timeout=TIMEOUT)
            self.initialize()
        else:
            assert self.groups is not None
            rebuilt = self.groups.rebuild(self.version, store, LOST)
            kept, made = rebuilt.kept, rebuilt.made
        done, done_cpu = time.monotonic(), time.process_time()
        operations = store.operations if isinstance(store, CountingStore) else None
        return {"done": done, "cpu_s": done_cpu - began_cpu, "operations": operations, "kept": kept, "made": made}

    def use(self) -> None:
        """See that the groups work."""
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == self.world
        for group in (parallel_state.get_tensor_model_parallel_group(), parallel_state.get_data_parallel_group()):
            value = torch.ones(1)
            dist.all_reduce(value, group=group)
            assert value.item() == dist.get_world_size(group), "a kept or rebuilt group does not work"


def serve(rank: int, world: int, link: Connection) -> None:
    """A process: obey the driver."""
    me = Rank(rank, world)
    while True:
        call, *arguments = link.recv()
        if call == "end":
            os._exit(0)  # nothing is waited for: peers end too
        try:
            link.send(getattr(me, call)(*arguments))
        except Exception as failure:
            link.send(RuntimeError(f"rank {rank}: {type(failure).__name__}: {failure}"))
            raise


class World:
    """All processes, forked from this one, which has imported everything."""

    def __init__(self, size: int) -> None:
        self.size = size
        context = multiprocessing.get_context("fork")
        self.links, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, size, theirs), daemon=True)
            process.start()
            self.links.append(ours)
            self.processes.append(process)

    def all(self, *call: Any) -> list[Any]:
        """Every process does it; their answers."""
        for link in self.links:
            link.send(call)
        answers = [link.recv() for link in self.links]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def round(self, mode: str, counted: bool) -> dict[str, Any]:
        """One loss, one rebuild."""
        store = StoreProcess()
        try:
            prepared = self.all("prepare", mode, store.addresses)
            began = time.monotonic()
            answers = self.all("order", mode, store.addresses, counted)
            self.all("use")  # after all have their groups: it would take the processors from those that have not
        finally:
            store.end()
        survivors = [a for rank, a in enumerate(answers) if rank not in LOST]
        return {
            "seconds": max(a["done"] for a in answers) - began,
            "cpu_s": statistics.median(a["cpu_s"] for a in survivors),
            "operations": max((a["operations"] for a in survivors if a["operations"] is not None), default=None),
            "operations_mean": statistics.mean(a["operations"] for a in answers) if counted else None,
            "prepare_cpu_s": statistics.median([p for p in prepared if p is not None] or [0.0]),
            "kept": max(a["kept"] for a in survivors),
            "made": max(a["made"] for a in survivors),
        }

    def end(self) -> None:
        for link in self.links:
            with contextlib.suppress(OSError):  # one that has failed is gone
                link.send(("end",))
        for process in self.processes:
            process.join(30)
            if process.is_alive():
                process.kill()


class StoreProcess:
    """The rendezvous stores of a round, torch's and ours, in a process of their own: their clients end with it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        self._process = context.Process(target=self._serve, args=(theirs,), daemon=True)
        self._process.start()
        self.addresses: tuple[int, str] = ours.recv()

    @staticmethod
    def _serve(link: Connection) -> None:
        torchs, ours = dist.TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False), Rendezvous(ADDRESS)
        link.send((torchs.port, ours.address))
        time.sleep(3600)

    def cpu_s(self) -> float:
        """Processor time that serving has taken."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def leave_name_service() -> str:
    """Have a network of one's own, with nothing in it but loopback. Why not, in words, if it cannot be made."""
    try:
        os.unshare(os.CLONE_NEWNET)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as failure:
        return f"; the name service was asked, since no network namespace could be made: {failure}"
    return ""


def measure(worlds: list[int], repetitions: int) -> dict[int, dict[str, dict[str, Any]]]:
    """world -> mode -> medians."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for size in worlds:
        world = World(size)
        try:
            counted = {mode: world.round(mode, True) for mode in MODES}
            timed: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
            for _ in range(repetitions):
                for mode in MODES:
                    timed[mode].append(world.round(mode, False))
        finally:
            world.end()
        found[size] = {
            mode: {
                "seconds": round(statistics.median(r["seconds"] for r in timed[mode]), 4),
                "cpu_s": round(statistics.median(r["cpu_s"] for r in timed[mode]), 5),
                "prepare_cpu_s": round(statistics.median(r["prepare_cpu_s"] for r in timed[mode]), 5),
                "operations": counted[mode]["operations"],
                "operations_mean": counted[mode]["operations_mean"],
                "kept": counted[mode]["kept"],
                "made": counted[mode]["made"],
            }
            for mode in MODES
        }
        said = ", ".join(f"{mode} {found[size][mode]['seconds']:.3f} s, {found[size][mode]['operations']} operations" for mode in MODES)
        print(f"{size} processes: {said}", file=sys.stderr)
    return found


def store_costs(kind: str, count: int = 200) -> dict[str, float]:
    """Processor seconds that one client costs the process that serves the store: to connect, and for an operation."""
    serving = StoreProcess()
    try:
        port, address = serving.addresses

        def connect() -> dist.Store:
            if kind == "torch":
                return dist.TCPStore(ADDRESS, port, is_master=False, wait_for_workers=False)
            return RendezvousStore(address, TIMEOUT)

        client = connect()
        client.set("first", "")
        before = serving.cpu_s()
        for i in range(20 * count):
            client.set(f"key{i % 64}", "value")
        operation_s = (serving.cpu_s() - before) / (20 * count)
        before = serving.cpu_s()
        for _ in range(count):
            connect().set("key", "value")
        connect_s = (serving.cpu_s() - before) / count - operation_s
        return {"connect_cpu_s": max(0.0, connect_s), "operation_cpu_s": operation_s}
    finally:
        serving.end()


def large_group_cpu_s(members: int, count: int = 10) -> float:
    """Processor seconds that a member takes to make a group of so many: nobody is met, pairs connect when they first speak."""
    names = [f"{members} members, {i}" for i in range(count)]
    began = time.process_time()
    made = connect_gloo(
        names, [range(members)] * count, 0, dist.HashStore(), timeout=TIMEOUT, address=ADDRESS, require_wanted=lambda: None
    )
    used = time.process_time() - began
    assert len(made) == count
    return used / count


def model(found: dict[int, dict[str, dict[str, Any]]], costs: dict[str, dict[str, float]], at: int) -> dict[str, Any]:
    """Seconds at larger sizes: what one rank does by itself, and one store that takes all ranks' connections and operations one after
    another. Ranks have a core each, which the processes here do not; the network costs what loopback does.

    A rank's own part: stock connects every pair of every group, so its processor time is fitted with a straight line over the number of
    ranks. Of the members' ways it is that at `at` processes, and what the groups it makes cost more if each had all ranks as members.
    Operations of the mean rank are fitted with a straight line.
    """
    sizes = np.array(sorted(found), dtype=float)
    larger = {n: large_group_cpu_s(n) for n in (at, *MODEL_RANKS)}
    predicted: dict[str, Any] = {"large_group_cpu_s": {str(n): round(s, 5) for n, s in larger.items()}}
    for mode in MODES:
        cost = costs["torch" if mode == "stock" else "ours"]
        cpu = np.polyfit(sizes, [found[int(n)][mode]["cpu_s"] for n in sizes], 1)
        counted = [found[int(n)][mode]["operations_mean"] for n in sizes]
        operations = np.polyfit(sizes, counted, 1)
        predicted[mode] = {"operations_per_rank_added": round(float(operations[0]), 3)}
        for n in MODEL_RANKS:
            here = found[at][mode]
            own = float(np.polyval(cpu, n)) if mode == "stock" else here["cpu_s"] + here["made"] * (larger[n] - larger[at])
            served = n * (cost["connect_cpu_s"] + max(min(counted), float(np.polyval(operations, n))) * cost["operation_cpu_s"])
            predicted[mode][str(n)] = {"seconds": round(own + served, 3), "own_s": round(own, 3), "store_s": round(served, 3)}
    return predicted


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="4,8,16,32,64", help="numbers of processes (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    asked = leave_name_service()
    worlds = [int(size) for size in options.worlds.split(",")]
    found = measure(worlds, options.repetitions)
    costs = {kind: store_costs(kind) for kind in ("torch", "ours")}
    at = 32 if 32 in found else worlds[-1]
    large = [size for size in worlds if size > 8] or worlds  # up to 8 every group is small
    took = {mode: found[at][mode]["seconds"] for mode in MODES}
    operations = {mode: [found[n][mode]["operations"] for n in large] for mode in MODES}
    figures = {
        "selective_vs_stock_speedup": {
            "value": round(took["stock"] / took["selective"], 2),
            "note": f"at {at} processes: {', '.join(f'{mode} {seconds:.3f} s' for mode, seconds in took.items())}{asked}",
        },
        "selective_operations_growth": {
            "value": operations["selective"][-1] - operations["selective"][0],
            "note": f"operations of a surviving rank at {large} processes: {operations}",
        },
    }
    print(json.dumps({**figures, "by_world": found, "store_costs": costs, "model": model(found, costs, at)}))


if __name__ == "__main__":
    main()
