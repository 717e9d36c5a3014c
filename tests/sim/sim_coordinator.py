"""Coordinators in the simulator: each life of one, what it records, how it is lost at any point, and who takes the job up.

Real are the core, and the order in which decisions are recorded and carried out (coordinator/records_first.py). The store has the rules
of the two real ones: a *journal* is written by one living process; in *etcd* a leader has a lease, and records only while it leads. A
leader that is cut off from etcd, or stands still for longer than that lease, goes on deciding until its own clock says that it is over.
"""

from __future__ import annotations

import random
from typing import Any

from sim_network import STORE, Closed, Connection

from megatron.hotswap.control import messages as m
from megatron.hotswap.control.decided import Decided
from megatron.hotswap.control.state import Control, Phase, Send
from megatron.hotswap.coordinator.records_first import InOrder, Record

TICK_S = 0.1
LEADER_LEASE_S = 2.0
RENEW_S = LEADER_LEASE_S / 5
RETRY_S = 0.5
#: Where a loss strikes: before a decision is recorded, when it is recorded and nobody knows, when some have been told; or at any time.
POINTS = ("decided", "recorded", "telling", None)
KINDS = ("crash", "crash", "power", "isolated", "long-pause")


class Life:
    """One coordinator process: the service's order of events (coordinator/service.py) around the real core."""

    def __init__(self, world: Any, number: int, decided: Decided | None) -> None:
        self.world, self.number, self.host = world, number, f"coordinator-{number}"
        self.clock = world.network.host_clock()
        self.control = Control(world.config, decided, self.clock.now)
        self._order = InOrder(self.control, self._carry_out)
        self._recording, self._asked_s = False, 0.0
        self.alive = self.listening = True
        self.deposed = False
        self.leads_until_s = float("inf")  # by its own clock
        self.callers: dict[str, Connection] = {}
        self._stands_until = self._reads_at = 0.0
        self._unread: list[tuple[Connection, Any]] = []

    # ---- agents

    def hear(self, connection: Connection, message: Any) -> None:
        """Something has come from an agent."""
        if not self.alive:
            return
        if self._unread or self.world.clock.now < self._reads_at:
            self._unread.append((connection, message))
        else:
            self._read(connection, message)

    def _read(self, connection: Connection, message: Any) -> None:
        incarnation = connection.link.agent.incarnation
        if not self.alive or connection.gone:
            return
        if self.callers.get(incarnation) is not connection:
            if message is Closed:
                connection.gone = True
                return
            if isinstance(message, m.Rejoin) and message.version > self.control.version:
                connection.gone = True
                self.step_down()
                return
            if incarnation in self.callers:
                connection.gone = True
                connection.down.send(m.Refused("connected already"))
                return
            self.callers[incarnation] = connection
        if message is Closed:
            self._forget(connection)
            return
        self.handle(incarnation, message)

    def _forget(self, connection: Connection) -> None:
        incarnation = connection.link.agent.incarnation
        connection.gone = True
        del self.callers[incarnation]
        self.handle(incarnation, m.AgentLost("its connection closed"))

    # ---- deciding

    def handle(self, incarnation: str, event: Any) -> None:
        """One event of the core."""
        if not self.alive or self.deposed:
            return
        checkers, leads = self.world.checkers, self.world.coordinators.leader is self
        before = checkers.before_event(incarnation) if leads else None
        control, held = self.control, self.control.phase is Phase.RETURNING
        halting = control.phase is Phase.HALTING and control.recovery is not None
        counts = range(control.recovery.first_over, control.version) if halting else (control.version,)
        decisions = self.control.handle(incarnation, event, self.clock.now)
        if leads:
            checkers.after_event(incarnation, before)
            leaves = incarnation in self.control.agents and self.control.agents[incarnation].leaving  # what fails on it is put down to it
            if isinstance(event, m.WorkerError) and not event.collective and before is None and event.version in counts and not leaves:
                checkers.on_program_error(event, held)
        self._take(decisions)

    def tick(self) -> None:
        """The coordinator's timer."""
        world = self.world
        now = world.clock.now
        if not self.alive:
            return
        if now < self._stands_until:
            world.clock.after(self._stands_until - now, self.tick)
            return
        if now < self._reads_at and self.control.lease.doubtful(self.control.agents.values(), self.clock.now):
            world.clock.after(self._reads_at - now, self.tick)  # as the service does: it makes sure first that it hears
            return
        if self.clock.now >= self.leads_until_s:
            self.step_down()
            return
        if not self._order.waiting:
            self._take(self.control.tick(self.clock.now))
        if not world.over:
            world.clock.after(TICK_S / self.clock.rate, self.tick)

    def _take(self, decisions: list[Any]) -> None:
        self.world.on_decided(self, decisions)
        if self._order.take(decisions):
            self.world.coordinators.point("decided", self)
            if not self._recording:
                self._recording = True
                self._record()

    def _record(self) -> None:
        record, self._asked_s = self._order.due(), self.clock.now
        if record is None or not self.alive:
            self._recording = False
        else:
            self.world.records.save(self, record)

    def due(self) -> Record | None:
        """What waits to be recorded."""
        return self._order.due() if self.alive else None

    def recorded(self, record: Record) -> None:
        """The store has answered."""
        if self.alive:
            self._order.recorded(record, self.clock.now - self._asked_s)
            self._record()

    def _carry_out(self, decisions: list[Any]) -> None:
        for decision in decisions:
            if not self.alive:
                return
            if not isinstance(decision, Send):
                self.world.on_log(decision)
                continue
            connection = self.callers.get(decision.incarnation)
            if connection is None:
                continue
            self.world.on_told(self, decision.message)
            connection.down.send(decision.message)
            if isinstance(decision.message, m.Refused | m.Stop):
                connection.down.send(Closed)
                self.world.clock.after(0.0, self._hung_up, connection)
            self.world.coordinators.point("telling", self)

    def _hung_up(self, connection: Connection) -> None:
        if self.alive and self.callers.get(connection.link.agent.incarnation) is connection:
            self._forget(connection)

    # ---- standing still, and the end

    def stand_still(self, pause: float, reading: float) -> None:
        """It does not get its turn for a while; then its timer goes off before it reads what has come meanwhile, or the other way round."""
        clock = self.world.clock
        self._stands_until = max(self._stands_until, clock.now + pause)
        self._reads_at = self._stands_until + reading
        clock.after(self._reads_at - clock.now, self._read_on, self._reads_at)

    def _read_on(self, due: float) -> None:
        if due < self._reads_at:  # it stood still once more
            return
        unread, self._unread = self._unread, []
        for connection, message in unread:
            self._read(connection, message)

    def step_down(self) -> None:
        """It decides nothing more, and hangs up."""
        if self.alive:
            self.deposed = True
            self._order.drop()
            self.end(says_so=True, all_of_it=True)

    def end(self, says_so: bool, all_of_it: bool = False) -> None:
        """The process is gone: what was on its way may be lost, and its connections close unless its host is gone too."""
        self.alive = self.listening = False
        for connection in self.callers.values():
            if not all_of_it:
                connection.down.lose(self.world.coordinators.rng)
            if says_so:
                connection.down.send(Closed)
        self.callers = {}
        self.world.coordinators.gone(self)


class Records:
    """The store, and what nobody may have heard of unless it is there."""

    def __init__(self, world: Any, seed: int) -> None:
        self.world, self._rng = world, random.Random(f"store {seed}")
        self.etcd = self._rng.random() < 0.5
        self.slow = self._rng.choice([0.0, 0.0, 0.05, 0.3])  # chance of a record that takes seconds, or is refused for now
        self.decided: Decided | None = None
        self._writes = 0
        self.over = False  # whether it is recorded that the job has ended
        self.leader: Life | None = None

    def save(self, life: Life, record: Record) -> None:
        """Record it, and say so."""
        rng, clock = self._rng, self.world.clock
        delay = rng.uniform(0.001, 0.02)
        if rng.random() < self.slow:
            if rng.random() < 0.5:
                # It did not answer in time, so it is asked again. What it was sent is lost, or still on its way.
                clock.after(RETRY_S + delay, self._again, life)
                if self.etcd and rng.random() < 0.5:
                    clock.after(rng.uniform(0.0, 3.0), self._late, life, record, self._writes)
                return
            delay = rng.uniform(0.1, 6.0)
        clock.after(delay, self.world.network.across, life.host, STORE, self._arrived, life, record)

    def _late(self, life: Life, record: Record, writes: int) -> None:
        if self.leader is life and not self.is_late(life, writes):
            self._write(record)

    def is_late(self, life: Life, writes: int) -> bool:
        """Whether something was recorded since this was sent: it was sent for the record as it stood then."""
        return self._writes != writes

    def _write(self, record: Record) -> None:
        self.decided = record.decided
        self._writes += 1
        self.over = record.decided.exit_code is not None
        self.world.record_checks.on_recorded(record.decided)

    def _again(self, life: Life) -> None:
        record = life.due()
        if record is not None:
            self.save(life, record)

    def _arrived(self, life: Life, record: Record) -> None:
        if not self.etcd and not life.alive:
            return
        if self.leader is not life:
            life.step_down()
            return
        self._write(record)
        self.world.coordinators.point("recorded", life)
        clock = self.world.clock
        clock.after(self._rng.uniform(0.001, 0.01), self.world.network.across, life.host, STORE, life.recorded, record)

    def on_order(self, agent: Any, message: Any) -> None:
        """An agent hears an order, and acts upon it."""
        self.world.record_checks.on_order(agent, message, self.decided)


class Coordinators:
    """Who leads, who has led, and when that ends."""

    def __init__(self, world: Any, seed: int) -> None:
        self.world = world
        self.rng = rng = random.Random(f"coordinator {seed}")
        self.losses_left = rng.choice([0, 0, 0, 1, 1, 2])
        self.kinds = KINDS
        self._point: tuple[str, int] | None = None
        self._again: tuple[float, float] | None = None
        self.lost = 0
        self.taken_up = 0
        self.announced: Life | None = None
        self.leader = self._lead(None)

    def begin(self) -> None:
        """The first one's clock ticks; and something will happen to it, perhaps."""
        self.leader.tick()
        self._aim()

    def _lead(self, decided: Decided | None) -> Life:
        life = Life(self.world, self.lost, decided)
        self.world.records.leader = self.announced = life
        return life

    def find(self, host: str) -> Life | None:
        """Where the store says that the coordinator is; a journal's run directory is everywhere."""
        return None if self.world.records.etcd and self.world.network.apart(host, STORE) else self.announced

    # ---- losses

    def _aim(self) -> None:
        if self.losses_left == 0:
            return
        self.losses_left -= 1
        point = self.rng.choice(POINTS)
        if point is None:
            self.world.clock.after(self.rng.choice([0.5, 2.0, 4.0]) * self.rng.random(), self.lose, self.leader)
        else:
            self._point = point, self.rng.choice([1, 2, 3, 4, 6] if point != "telling" else [1, 2, 3, 5, 8, 20, 50])

    def point(self, name: str, life: Life) -> None:
        """A moment at which a loss may strike."""
        if self._point is not None and self._point[0] == name and life is self.leader:
            left = self._point[1] - 1
            self._point = None if left == 0 else (name, left)
            if left == 0:
                self.lose(life)

    def lose(self, life: Life) -> None:
        """The leader is lost, in one way or another."""
        world, rng = self.world, self.rng
        if life is not self.leader or not life.alive or world.over:
            return
        kind = rng.choice([k for k in self.kinds if world.records.etcd or k in ("crash", "power")])
        world.faults.append(f"{world.clock.now:.3f} s {life.control.phase.value}: {kind} {life.host}")
        if kind in ("crash", "power"):
            life.end(says_so=kind == "crash")
            return
        if kind == "long-pause":
            life.stand_still(rng.uniform(1.0, 3.0) * LEADER_LEASE_S, rng.choice([0.0, 0.01, 1.0]))
        self.out_of_reach(life, for_good=True)

    def out_of_reach(self, life: Life, for_good: bool = False) -> None:
        """It does not renew its lease any more: another one leads when that is over."""
        world = self.world
        if not world.records.etcd or life is not self.leader or not life.alive:
            return
        since_s = self.rng.uniform(0.0, RENEW_S)
        life.leads_until_s = life.clock.now + LEADER_LEASE_S - since_s
        world.clock.after(LEADER_LEASE_S - since_s, self._lease_over, life, for_good)

    def _lease_over(self, life: Life, for_good: bool) -> None:
        if life is not self.leader or not life.alive:
            return
        if not for_good and not self.world.network.apart(life.host, STORE):  # it has renewed it in time
            life.leads_until_s = float("inf")
            return
        self.world.records.leader = None
        self._next_in(self.rng.uniform(0.0, 0.5))

    def gone(self, life: Life) -> None:
        """A process has ended."""
        if life is not self.leader:
            return
        rng = self.rng
        wait = rng.choice([0.05, 0.5, 2.0, 8.0]) * rng.random()
        if self.world.records.etcd:  # a standby waits for the lease to run out
            wait = max(0.0, LEADER_LEASE_S - rng.uniform(0.0, RENEW_S)) + 0.5 * rng.random()
        self._next_in(wait)

    def _next_in(self, wait: float) -> None:
        self.lost += 1
        self.world.clock.after(wait, self._take_up, self.lost)

    def _take_up(self, number: int) -> None:
        """Another coordinator reads what is recorded, and goes on from it."""
        world = self.world
        if number != self.lost or self.leader.number == number or world.over:
            return
        self.taken_up += 1
        self.leader = self._lead(world.records.decided)
        world.checkers.on_taken_up()
        self.leader.tick()
        self._aim()
