"""One schedule: a job, its faults and their times, all from one seed.

`PYTHONPATH=. python tests/sim/sim_driver.py SEED [COUNT]` repeats it.

The driver delivers messages to the real Control, carries out its decisions, and lets faults strike at any moment, more often
while a recovery is under way.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from sim_agent import FakeAgent
from sim_checkers import Checkers
from sim_coordinator import Coordinators, Life, Records
from sim_disk import Disk
from sim_network import Network
from sim_record_checks import RecordChecks
from sim_worker import FakeWorker
from sim_world import RUN_ID, Clock, FakeSlots, Node, Rendezvous
from violation import Violation

from megatron.hotswap.control import messages as m
from megatron.hotswap.control.config import Durable
from megatron.hotswap.control.state import Control, ControlConfig, Log, Phase
from megatron.hotswap.replication import transfer
from megatron.hotswap.topology.grid import Grid

TIME_MAX_S = 600.0
FAULTS = (
    *("kill", "kill", "power", "freeze", "freeze-short", "cut", "link", "rot", "rot", "rot"),
    *("worker", "worker", "workers", "hang", "error", "bug"),
)


@dataclass
class Outcome:
    """How one schedule went."""

    seed: int
    exit_code: int | None
    reason: str
    versions: int
    swaps: int
    skipped: int
    damaged: int
    climbed: bool = False  # whether a process was started again and its node, or another, given up in the same recovery
    last_rung: bool = False  # whether a generation was durable when the job ended
    refused: bool = False  # whether no durable generation could be begun from
    replaced: int = 0  # planned swaps
    respawned: int = 0  # ranks that another process has read back from the slots
    taken_up: int = 0  # coordinators that went on with what another one had begun
    split: bool = False  # whether some hosts did not reach the others for a while
    faults: list[str] = field(default_factory=list)


class World:
    """The job under simulation."""

    #: A coordinator may stand still for longer than a lease (1.6 s) and come back before the agents have lost patience (three of them).
    PAUSE_MAX_S = 2.5
    #: How long it takes then until what waits is read: other threads of it did not get their turn either.
    READING_MAX_S = 1.5

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.clock = Clock(rng)
        nodes, per_node = rng.choice([(2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 1)])
        world = nodes * per_node
        tensor = rng.choice([t for t in (1, 2) if per_node % t == 0])
        pipeline = rng.choice([p for p in (1, 2) if world % (tensor * p) == 0])
        self.steps = rng.randint(4, 8)
        self.replicas = rng.choice([1, 1, 2]) if nodes > 2 else 1
        self.interval = rng.choice([1, 1, 2, 3])
        self.skip = rng.random() < 0.3  # rather than wait, when a replica is late
        self.replaced = 0  # planned swaps
        self.damaged = 0  # copies that were found to be of no use
        self.rotted = False  # whether the bytes of some copy have changed
        self.proven_by_step = rng.random() < 0.5
        self.sections = rng.random() < 0.5
        self.bug: tuple[int | None, int] | None = None  # (rank, step) that raises whenever it is reached
        self.poison: tuple[int, int] | None = None  # (rank, step) that kills its process whenever it is reached
        self.respawned = 0
        self.respawns_fail = rng.random() < 0.1  # a process that is started again does not come up
        self.holders_look = True  # whether a holder looks for the same snapshot before it overwrites a slot with it
        # Every schedule has its own weather, so that some are extreme in one thing.
        self.repeat_chance = rng.choice([0.0, 0.02, 0.3])
        self.repeat_s = 0.3
        self.h2h_s = rng.choice([0.01, 0.02, 0.2])
        self.everyone = frozenset(range(world))
        # A stream of its own: with files or without, the rest of a seed is the same.
        self.disk, self.disk_rng = Disk(), random.Random(f"disk {seed}")
        durable = self._durable(world)
        spares = rng.randint(0, 2)
        self.config = ControlConfig(
            RUN_ID,
            "token",
            Grid(world, tensor, pipeline),
            nodes,
            spares,
            lease_s=1.6,
            heartbeat_interval_s=0.5,
            halt_timeout_s=3.0,
            resume_timeout_s=6.0,
            wait_for_spare_s=5.0,
            settle_s=2.0,
            respawn_timeout_s=4.0,
            respawn_window_s=rng.choice([0.0, 1.0, 100.0]),
            quarantine_failures=random.Random(f"quarantine {seed}").choice([1, 2, 3, 100]),
            replicas=self.replicas,
            interval=self.interval,
            durable=durable,
        )
        self.checkers = Checkers(self)
        self.record_checks = RecordChecks()
        self.network = Network(self, seed)
        self.records = Records(self, seed)
        self.coordinators = Coordinators(self, seed)
        self.rendezvous = Rendezvous(self.clock, self.checkers.on_collective, self.network)
        self.agents: dict[str, FakeAgent] = {}
        self.faults: list[str] = []
        self.fault_kinds = FAULTS
        self.faults_left = rng.choice([1, 1, 2, 2, 3, 4])
        self.moments: list[list[Any]] = []  # [kind of message, how many of it until a fault strikes]
        self._lives = 0
        self._sickness = random.Random(f"sickness {seed}")  # a stream of its own, as that of pauses
        self.sick_chance, self.sick_nodes = 0.3, 1
        self._weather = random.Random(f"pauses {seed}")  # a stream of its own: with pauses or without, the rest of a seed is the same
        self.pauses = self._weather.random() < 0.3
        for index in range(nodes + spares):
            self.start_node(f"node{index}", self.clock.about(0.1))
        for _ in range(rng.randint(0, 1)):
            self.start_node(f"node{nodes + spares}", rng.uniform(0.0, 8.0))

    def _durable(self, ranks: int) -> Durable | None:
        """Nowhere to write, or somewhere that fails now and then, or always; and what an earlier job has left there."""
        rng = self.disk_rng
        if rng.random() < 0.2:
            return None
        self.disk.fails = rng.choice([0.0, 0.0, 0.0, 0.1, 0.5, 1.0])
        begin = []
        if rng.random() < 0.3:
            for generation in sorted(rng.sample([1, 2, 3], rng.randint(1, 2)), reverse=True):
                damaged = {rng.randrange(ranks)} if rng.random() < 0.3 else set()
                begin.append(self.disk.put(generation * self.interval, ranks, damaged))
            self.steps += begin[0].generation
        for _ in range(rng.choice([0, 0, 1, 2])):
            self.clock.after(rng.uniform(0.0, 3.0), self.save)
        return Durable("/save", {"world-size": ranks}, begin=tuple(begin))

    def save(self) -> None:
        """A user asks for a durable generation."""
        if self.control.exit_code is None:
            self.coordinators.leader.handle("", m.SaveWanted())

    def due(self, generation: int) -> bool:
        """Whether a snapshot is to be taken after this step."""
        return generation % self.interval == 0

    # ---- nodes

    def start_node(self, name: str, delay: float) -> None:
        """A node comes up (again), as a new life."""
        self._lives += 1
        incarnation = f"{name}-{self._lives}"
        self.clock.after(delay, self._start_node, name, incarnation)

    def _start_node(self, name: str, incarnation: str) -> None:
        node = Node(name, self.clock)
        agent = FakeAgent(self, node, incarnation, self.control.config.ranks_per_node)
        self.agents[incarnation] = agent
        agent.begin()

    def connection_closed(self, agent: FakeAgent) -> None:
        """A process has ended: its kernel closes its connections, after what it had sent."""
        agent.link.close()

    # ---- the coordinator

    @property
    def control(self) -> Control:
        """The core of the coordinator that leads, or of the last one that did."""
        return self.coordinators.leader.control

    @property
    def over(self) -> bool:
        """Whether it is recorded that the job has ended."""
        return self.records.over

    def stand_still(self) -> None:
        """The coordinator does not get its turn for a while; then its timer goes off before it reads what has come meanwhile."""
        if self.control.exit_code is None:
            pause = self._weather.choice([0.3, 0.5, self.PAUSE_MAX_S]) * self._weather.random()
            reading = self._weather.uniform(0.01, self.READING_MAX_S)
            self.coordinators.leader.stand_still(pause, reading)
            self.clock.after(pause + reading + self._weather.choice([0.0, 0.5, 2.0]), self.stand_still)

    def on_decided(self, life: Life, decisions: list[Any]) -> None:
        """A coordinator has decided this, and nobody knows."""
        # What was held back until now may tell of a node that was given ranks a moment before.
        fell = {d.data["node"] for d in decisions if isinstance(d, Log) and d.kind == "quarantined"}
        for decision in decisions:
            if isinstance(decision, Log):
                if decision.kind == "resumed" and life is self.coordinators.leader:  # another one's is never recorded
                    self.checkers.on_resumed()
                elif decision.kind == "assign" and decision.data["node"] not in fell:
                    self.checkers.on_assign(life.control, decision.data["node"], life.clock.now)
                elif decision.kind == "plan" and life is self.coordinators.leader:
                    self.checkers.on_plan(life.control)

    def on_log(self, said: Log) -> None:
        """A coordinator writes down what it did."""
        self.damaged += said.kind == "copy-damaged"
        self.replaced += "is replaced:" in said.reason and said.kind == "recovery"
        if said.kind == "recovery" and not self.moments:
            self._maybe_again()

    def on_told(self, life: Life, message: Any) -> None:
        """A coordinator tells an agent."""
        if isinstance(message, m.Start):
            self.checkers.on_membership(message.membership, message.generation or 0, True)
            self._plan_faults()
            self._plan_sickness()
        elif isinstance(message, m.Resume):
            self.checkers.on_membership(message.membership, message.generation, message.redo_sections)

    # ---- faults

    def said(self, kind: type) -> None:
        """An agent sends something: the moment that a fault may have waited for."""
        if self.moments and self.moments[0][0] is kind:
            self.moments[0][1] -= 1
            if self.moments[0][1] == 0:
                self.moments.pop(0)
                self.clock.after(self.clock.about(0.003), self.fault)

    def _plan_faults(self) -> None:
        rng, ranks = self.rng, len(self.everyone)
        self.network.plan()
        if rng.random() < 0.5:  # at moments that matter, else at any time
            self.moments = [[m.Acknowledged, rng.randint(ranks, ranks * self.steps)]]
            self.moments += [
                [rng.choice([m.HaltReport, m.Restored, m.FirstStep, m.Acknowledged]), rng.randint(1, 2 * ranks)] for _ in range(2)
            ]
            return
        for _ in range(self.rng.choice([1, 1, 1, 2])):
            self.clock.after(self.rng.uniform(0.05, 0.2 * self.steps), self.fault)

    def _maybe_again(self) -> None:
        if self.rng.random() < 0.5:
            self.clock.after(self.rng.choice([0.02, 0.1, 0.5, 2.0, 2.0]) * self.rng.random(), self.fault)

    def fault(self) -> None:
        """Something breaks."""
        rng, clock = self.rng, self.clock
        living = [a for a in self.agents.values() if a.node.alive and not a.ended]
        if self.faults_left == 0 or not living or self.control.exit_code is not None:
            return
        self.faults_left -= 1
        kind, agent = rng.choice(self.fault_kinds), rng.choice(living)
        self.faults.append(f"{clock.now:.3f} s {self.control.phase.value}: {kind} {agent.incarnation}")
        if kind == "kill":
            agent.end()
        elif kind == "power":
            agent.ended, agent.node.alive = True, False
        elif kind in ("freeze", "freeze-short"):
            agent.node.frozen = True
            clock.after(rng.uniform(0.1, 1.0) if kind == "freeze-short" else rng.uniform(2.0, 6.0), agent.node.thaw)
        elif kind == "cut":
            self._cut(agent)
        elif kind == "rot":
            self._rot(agent)
            return
        elif kind in ("worker", "workers"):
            for worker in agent.workers if kind == "workers" else [rng.choice(agent.workers)]:
                agent.node.run(self.kill_worker, agent, worker)
        elif kind == "link":
            self._link_fault(agent)
            return
        else:
            self._thread_fault(kind, agent)
            return
        self._collective_errors()
        if rng.random() < 0.4 and kind != "freeze-short":
            self.start_node(agent.node.name, rng.uniform(0.05, 4.0))

    def _cut(self, agent: FakeAgent) -> None:
        connection = agent.link.connection
        for stream in (connection.up, connection.down) if connection is not None else ():
            stream.sever()
            self.clock.after(self.rng.uniform(0.2, 6.0), stream.heal)

    def _rot(self, agent: FakeAgent) -> None:
        """A bit flips in some copy that the node has. Does no harm by itself, so it is not one of the schedule's faults."""
        self.faults_left += 1
        copies = [s for w in agent.workers for s in w.own.values()]
        copies += [s for rank in self.everyone for s in agent.replica_snapshots(rank).values()]
        if copies:
            self.rng.choice(copies).rotten = self.rotted = True

    def _plan_sickness(self) -> None:
        if self.sick_chance and self._sickness.random() < self.sick_chance:
            for _ in range(self.sick_nodes):
                self.clock.after(self._sickness.uniform(0.05, 0.3 * self.steps), self._sicken)

    def _sicken(self) -> None:
        """Some node's health command fails; now and then it is well again later."""
        rng, living = self._sickness, [a for a in self.agents.values() if a.node.alive and not a.ended]
        if not living or self.control.exit_code is not None:
            return
        agent = rng.choice(living)
        self.faults.append(f"{self.clock.now:.3f} s {self.control.phase.value}: sick {agent.incarnation}")
        agent.node.run(agent.say, m.Unhealthy("command", "sick"))
        if rng.random() < 0.4:
            agent.node.after(rng.uniform(0.1, 3.0), agent.say, m.HealthyAgain("command"))

    @staticmethod
    def kill_worker(agent: FakeAgent, worker: FakeWorker) -> None:
        """A worker process is gone, its agent lives."""
        if worker.state != "dead":
            worker.die()
            agent.say(m.WorkerLost(worker.index, "killed by SIGSEGV"))

    def _thread_fault(self, kind: str, agent: FakeAgent) -> None:
        """A training thread gets stuck, raises once, or raises each time it comes to this step."""
        worker = self.rng.choice(agent.workers)
        if worker.state != "training" or agent.node.frozen or worker.generation >= self.steps:
            return  # after the last step nobody waits for it
        if kind == "hang":
            others = [w for a in self.agents.values() for w in a.workers if w is not worker and w.state == "training" and a.node.alive]
            if not others:  # where all are stuck, nobody is left to notice
                return
            worker.hang()
            self.clock.after(self.rng.uniform(0.5, 2.0), self._collective_timeout)
        elif kind == "error":
            worker.raise_error(f"Error{len(self.faults)}")
        else:
            self.bug = (worker.rank, worker.generation + 1)
            worker.raise_error("Bug")

    def _collective_timeout(self) -> None:
        """Whoever waits for a rank that is stuck hears so from its collective, whatever a coordinator that is cut off has decided."""
        control = self.control
        stuck = [w for a in self.agents.values() for w in a.workers if w.state == "stuck"]
        if self.over or not stuck:
            return
        waiting = [w for i in control.agents for w in self.agents[i].workers if w.state == "training" and w.version == control.version]
        if waiting and control.phase is Phase.TRAINING and any(w.version == control.version for w in stuck):
            waiting[0].node.run(waiting[0].fail)
        self.clock.after(2.0, self._collective_timeout)

    def _link_fault(self, agent: FakeAgent) -> None:
        training = [w for w in agent.workers if w.state == "training" and w.version == self.control.version]
        if training and self.control.phase is Phase.TRAINING:
            agent.node.run(training[0].fail)

    def _collective_errors(self) -> None:
        """Peers of a dead process may get an error from their collective before they hear of the halt."""
        for agent in self.agents.values():
            for worker in agent.workers:
                if worker.state == "training" and self.rng.random() < 0.2:
                    epoch = worker._epoch
                    agent.node.after(
                        self.clock.about(0.05), lambda w=worker, e=epoch: w.fail() if w._epoch == e and w.state == "training" else None
                    )

    # ---- the run

    def run(self) -> None:
        """Until the job is over, and then a little."""
        self.coordinators.begin()
        if self.pauses:
            self.stand_still()
        self.clock.run(TIME_MAX_S, lambda: self.records.over)
        self.checkers.on_end()


def simulate(seed: int, change: Any = None) -> Outcome:
    """Run one schedule. `change(world)` may plant a bug in it.

    Raises:
        Violation: names the seed.
    """
    with mock.patch.object(transfer, "Slots", FakeSlots):
        world = World(seed)
        if change is not None:
            change(world)
        try:
            world.run()
        except Exception as failure:
            kind = Violation if isinstance(failure, Violation) else type(failure)
            raise Violation(f"seed {seed}: {kind.__name__}: {failure}; faults: {world.faults}") from failure
    control = world.control
    return Outcome(
        seed,
        control.exit_code,
        control.exit_reason,
        control.version,
        len(control.recoveries),
        control.commits.skipped_generations,
        world.damaged,
        any(r.respawned and r.lost_nodes for r in [*control.recoveries, *([control.recovery] if control.recovery else [])]),
        control.exit_code in (1, 75) and "is durable in" in control.exit_reason,
        "no durable generation can be gone on from" in control.exit_reason,
        world.replaced,
        world.respawned,
        world.coordinators.taken_up,
        any("are cut off" in fault for fault in world.faults),
        world.faults,
    )


def main() -> None:
    """Repeat a seed, or run COUNT seeds from it on."""
    first, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    for seed in range(first, first + count):
        outcome = simulate(seed)
        if count == 1:
            print(outcome)


if __name__ == "__main__":
    main()
