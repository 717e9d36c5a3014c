"""What lies between hosts: connections of agents with a coordinator, partitions, and clocks that neither agree nor run alike.

Hosts are the nodes, the coordinator's own host (one for each coordinator), and the store's. A partition puts some of them on the other
side: what is sent across waits until it heals, as TCP would send it again; a connection that is begun meanwhile does not come about.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from sim_world import Clock, Stream

#: By how much a clock may run faster or slower than another one; quartz is a thousand times better, a machine that is moved is not.
RATE_OFF = 0.03
STORE = "the store"


class Closed:
    """The end of a connection, after all that was sent over it."""


class HostClock:
    """Time as one host has it: with an offset and a rate of its own."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._clock = clock
        self.rate = rng.choice([1.0, rng.uniform(1 - RATE_OFF, 1 + RATE_OFF)])
        self._offset = rng.choice([0.0, rng.uniform(0.0, 1e6)])

    @property
    def now(self) -> float:
        """What the host's clock says."""
        return self._offset + self.rate * self._clock.now


class Network:
    """Who reaches whom."""

    def __init__(self, world: Any, seed: int) -> None:
        self._world = world
        self._rng = random.Random(f"network {seed}")
        self.splits_left = self._rng.choice([0, 0, 0, 0, 0, 1, 2])
        self._far: set[str] | None = None  # hosts on the other side
        self._waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.connections: list[Connection] = []

    def host_clock(self) -> HostClock:
        """Of another host."""
        return HostClock(self._world.clock, self._rng)

    def apart(self, one: str, other: str) -> bool:
        """Whether nothing gets from one to the other now."""
        return self._far is not None and (one in self._far) != (other in self._far)

    def across(self, one: str, other: str, call: Callable[..., None], *args: Any) -> None:
        """What a message between them causes: now, or once it gets through."""
        if self._far is not None and self.apart(one, other):
            self._waiting.append((call, args))
        else:
            call(*args)

    def plan(self) -> None:
        """Somewhen in this job."""
        for _ in range(self.splits_left):
            self._world.clock.after(self._rng.uniform(0.05, 0.3 * self._world.steps), self.split)
        self.splits_left = 0

    def split(self) -> None:
        """Some hosts do not reach the others for a while."""
        world, rng = self._world, self._rng
        if self._far is not None or world.control.exit_code is not None:
            return
        hosts = [*sorted({a.node.name for a in world.agents.values()}), world.coordinators.leader.host, STORE]
        far = {host for host in hosts if rng.random() < 0.5}
        if rng.random() < 0.5:  # a single one is what happens most
            far = {rng.choice(hosts)}
        self._far = far
        world.faults.append(f"{world.clock.now:.3f} s {world.control.phase.value}: {sorted(far)} are cut off")
        self.connections = [c for c in self.connections if c.up is not None and not c.over]
        severed = [c for c in self.connections if self.apart(c.link.agent.node.name, c.life.host)]
        for connection in severed:
            connection.sever()
        if self.apart(world.coordinators.leader.host, STORE):
            world.coordinators.out_of_reach(world.coordinators.leader)
        world.clock.after(rng.choice([0.3, 1.0, 3.0, 8.0]) * rng.uniform(0.2, 1.0), self.heal, severed)
        world.clock.after(rng.uniform(0.5, 3.0), self._collectives_fail)

    def heal(self, severed: list[Connection]) -> None:
        """All reach each other again."""
        self._far = None
        for connection in severed:
            connection.heal()
        waiting, self._waiting = self._waiting, []
        for call, args in waiting:
            call(*args)
        self._world.rendezvous.reachable_again()

    def whole(self, hosts: list[str]) -> bool:
        """Whether these reach each other."""
        return self._far is None or not (far := [h in self._far for h in hosts]) or all(far) or not any(far)

    def _collectives_fail(self) -> None:
        """Whoever waits for a rank on the other side hears so from its collective."""
        world = self._world
        if self._far is None or world.control.exit_code is not None:
            return
        waiting = [w for a in world.agents.values() for w in a.workers if w.state == "training" and a.node.alive and not a.ended]
        if waiting and not self.whole([w.node.name for w in waiting]):
            worker = self._rng.choice(waiting)
            worker.node.run(worker.fail)
        world.clock.after(self._rng.uniform(1.0, 3.0), self._collectives_fail)


class Connection:
    """One stream of an agent with one life of a coordinator."""

    def __init__(self, world: Any, link: Any, life: Any) -> None:
        self.link, self.life = link, life
        self.over = False  # the agent has given it up
        self.answered = False
        self.gone = False  # the coordinator knows that it has ended
        self.up = Stream(world.clock, self._to_coordinator, world.repeat_chance, world.repeat_s)
        self.down = Stream(world.clock, self._to_agent, repeat_chance=0.0)
        #: Begun while the two did not reach each other: it does not come about.
        self.void = world.network.apart(link.agent.node.name, life.host)
        world.network.connections.append(self)

    def _to_coordinator(self, message: Any) -> None:
        if not self.void:
            self.life.hear(self, message)

    def _to_agent(self, message: Any) -> None:
        if not self.over:
            self.link.agent.node.run(self.link.hear, self, message)

    def sever(self) -> None:
        """Nothing gets through."""
        self.up.sever()
        self.down.sever()

    def heal(self) -> None:
        """What has waited gets through."""
        self.up.heal()
        self.down.heal()

    def give_up(self) -> None:
        """By the agent: the coordinator hears of it after all that was sent."""
        self.over = True
        self.up.send(Closed)
