"""The coordinator's decisions for jobs of up to 100,000 ranks, by the real core, without a network.

    python benchmarks/decisions.py [--ranks 1024,4096,16384,102400]

One loss and all that the core is asked because of it, message by message as agents send them: nodes gather, a generation is acknowledged,
a node is lost, every rank reports its halt and every agent its replicas, the plan is made, every rank restores and does its first step;
then another coordinator takes the job up, and all agents come back to it. Processor seconds of one core, four ranks a node; with them what
an order to every agent costs to write, and its bytes. What grows with the square of the job would show here as a curve that bends.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from megatron.hotswap.control import decided
from megatron.hotswap.control import messages as m
from megatron.hotswap.control.state import Control, ControlConfig, Decision, Phase, Send
from megatron.hotswap.coordinator import wire
from megatron.hotswap.topology.grid import Grid

RANKS_PER_NODE = 4
LOST = "node1-1"
_RUN, _TOKEN = "run", "token"
_LONG_S = 1000.0  # all deadlines: nothing is late here


class Job:
    """The core, and what all agents say to it."""

    def __init__(self, ranks: int) -> None:
        nodes = ranks // RANKS_PER_NODE
        grid = Grid(ranks, 8, 4) if ranks % 32 == 0 else Grid(ranks)
        self.config = ControlConfig(_RUN, _TOKEN, grid, nodes, 1, settle_s=0.0, halt_timeout_s=_LONG_S, resume_timeout_s=_LONG_S)
        self.control = Control(self.config)
        self.joins = {f"node{i}-1": self._join(i) for i in range(nodes + 1)}
        self.now = 0.0
        self.seconds: dict[str, float] = {}

    def _join(self, i: int) -> m.Join:
        h2h = f"10.{i >> 8}.{i & 255}.1:{40000 + i % 9973}"
        return m.Join(m.PROTOCOL, _RUN, _TOKEN, f"node{i}", f"node{i}-1", RANKS_PER_NODE, h2h)

    def say(self, what: str, events: Iterable[tuple[str, m.Event]], tick: bool = False) -> list[Decision]:
        """Everyone says something; what is decided upon it. `what` it is counted as."""
        said, out = list(events), list[Decision]()
        began = time.process_time()
        for incarnation, event in said:
            out += self.control.handle(incarnation, event, self.now)
        if tick:
            out += self.control.tick(self.now)
        self.seconds[what] = time.process_time() - began
        self.now += 0.1
        return out

    def ranks(self, event: Callable[[int], m.Event]) -> list[tuple[str, m.Event]]:
        """What every rank's agent says of it."""
        assert self.control.membership is not None
        return [(x.incarnation, event(rank)) for rank, x in enumerate(self.control.membership.members)]

    def begin(self) -> None:
        """Nodes gather, and training begins."""
        self.say("gather", (each for i, join in self.joins.items() for each in self._arrives(i, join)), tick=True)
        assert self.control.phase is Phase.TRAINING
        self.say("acknowledge", self.ranks(lambda rank: m.Acknowledged(rank, 1, self.control.version)))
        assert self.control.committed == 1
        beats = [(i, m.Heartbeat(1, {r: m.Progress(2, 1, 1) for r in a.ranks if r is not None})) for i, a in self.control.agents.items()]
        self.say("heartbeats", beats, tick=True)

    def _arrives(self, incarnation: str, join: m.Join) -> Iterable[tuple[str, m.Event]]:
        yield incarnation, join
        for worker in range(RANKS_PER_NODE):
            yield incarnation, m.WorkerReady(worker, f"{join.h2h}.{worker}")

    def lose_one(self) -> m.Resume:
        """A node is lost; returns the order by which all others go on."""
        control = self.control
        assert control.membership is not None
        held: dict[str, dict[int, tuple[int, ...]]] = {i: {} for i in self.joins if i != LOST}
        for rank, holders in enumerate(control.membership.holders):
            for holder in (control.membership.members[h].incarnation for h in holders):
                held.get(holder, {})[rank] = (1, 2)
        self.say("halt", [(LOST, m.AgentLost("its connection closed"))])
        over, had = control.version - 1, set(held) - {list(self.joins)[-1]}
        assert control.phase is Phase.HALTING
        members = control.membership.members
        survivor, spare = m.HaltReport(over, 0, 2, False, (1, 2), "store"), m.HaltReport(over, 0, None, False, (), "")
        self.say("halt reports", self.ranks(lambda r: replace(survivor if members[r].incarnation in had else spare, rank=r)))
        out = self.say("plan", [(i, m.ReplicaReport(over, replicas)) for i, replicas in held.items()])
        assert control.phase is Phase.RESUMING
        resume = next(d.message for d in out if isinstance(d, Send) and isinstance(d.message, m.Resume))
        self.say("restored", self.ranks(lambda rank: m.Restored(control.version, rank, 0.1, 0.1, 0, 0)))
        self.say("first steps", self.ranks(lambda rank: m.FirstStep(control.version, rank)))
        assert control.phase is Phase.TRAINING and control.recovery is None and len(control.recoveries) == 1
        return resume

    def take_up(self) -> None:
        """The coordinator is lost; the next one reads the record, and all agents come back to it."""
        before, began = self.control, time.process_time()
        assert before.membership is not None
        self.control = Control(self.config, decided.decode(decided.encode(before.decided)), self.now)
        self.seconds["record"] = time.process_time() - began
        ranks: dict[str, dict[int, int]] = {i: {} for i in before.agents}
        for rank, x in enumerate(before.membership.members):
            ranks[x.incarnation][x.worker] = rank
        self.say("come back", [(i, m.Rejoin(self.joins[i], before.version, mine, False, 1.0)) for i, mine in ranks.items()], tick=True)
        assert self.control.phase is Phase.TRAINING and not self.control.recovery


def measure(ranks: int) -> dict[str, Any]:
    """Seconds by what they are spent on, and what the largest order is."""
    job = Job(ranks)
    job.begin()
    resume = job.lose_one()
    job.take_up()
    began = time.process_time()
    packed = wire.encode_order(resume)
    job.seconds["order"] = time.process_time() - began
    recovery = sum(job.seconds[part] for part in ("halt", "halt reports", "plan", "restored", "first steps", "order"))
    return {
        "recovery_s": round(recovery, 4),
        "seconds": {what: round(seconds, 4) for what, seconds in job.seconds.items()},
        "order_bytes": len(packed),
        "order_bytes_unpacked": len(wire.encode(resume)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1024,4096,16384,102400", help=f"of jobs; multiples of {RANKS_PER_NODE} (default: %(default)s)")
    sizes = [int(size) for size in parser.parse_args().ranks.split(",")]
    found = {}
    for ranks in sizes:
        found[ranks] = measure(ranks)
        print(f"{ranks} ranks: {found[ranks]}", file=sys.stderr)
    small, large = sizes[0], sizes[-1]
    bend = (found[large]["recovery_s"] / large) / (found[small]["recovery_s"] / small)
    figures = {
        "decisions_s": {"value": found[large]["recovery_s"], "note": f"{large} ranks; " + _curve(found)},
        "decisions_bend": {"value": round(bend, 2), "note": f"processor time a rank, {large} against {small} ranks"},
        "order_mb": {"value": round(found[large]["order_bytes"] / 1e6, 3), "note": "to each agent, packed"},
    }
    print(json.dumps({**figures, "by_ranks": found}))


def _curve(found: dict[int, dict[str, Any]]) -> str:
    return "; ".join(f"{ranks}: {each['recovery_s']:.3f} s" for ranks, each in found.items())


if __name__ == "__main__":
    main()
