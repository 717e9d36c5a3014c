"""An agent's link to the coordinator in the simulator: the order of events of agent/coordinator_link.py, without gRPC.

Real are Retold, which keeps what another coordinator must hear, and the Listener, which says when one has fallen silent.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from sim_network import Closed, Connection

from megatron.hotswap.agent.retold import Retold
from megatron.hotswap.control import messages as m
from megatron.hotswap.control.lease import COORDINATOR_LEASES, Listener

SEEK_S = 0.25
ANSWER_S = 5.0
FIRST_ANSWER_S = 20.0  # for gRPC to give up by itself
STEP_FACTOR = 2.0
TIMEOUT_S = 60.0


class Link:
    """One per agent."""

    def __init__(self, agent: Any) -> None:
        self.agent, self.world = agent, agent.world
        self.clock = self.world.network.host_clock()
        config = self.world.config
        self._lease_s, self.interval_s = config.lease_s, config.heartbeat_interval_s
        self.retold = Retold()
        self.heard_s = self.clock.now
        self._heard_any = False
        self._listener = Listener(COORDINATOR_LEASES * self._lease_s, self.interval_s, self.interval_s)
        self.connection: Connection | None = None
        self._life: Any = None  # the address that it has
        self.version = 0  # the newest membership that was heard of
        self._join: m.Join | None = None
        self._stopped = False
        self._step, self._stepped_s = -1, 0.0
        self._gaps_s: deque[float] = deque(maxlen=20)

    def after(self, delay_s: float, call: Any, *args: Any) -> None:
        """After so long by the agent's own clock."""
        self.agent.node.after(delay_s / self.clock.rate, call, *args)

    # ---- what the agent says

    def join(self, join: m.Join) -> None:
        """The first connection."""
        self._join = join
        self._life = self.world.coordinators.announced
        self._connect([join], first=True)

    def say(self, message: m.FromAgent) -> None:
        """Tell the coordinator; the one that comes next, if there is none and it still matters then."""
        self.retold.said(message)
        if self.connection is not None:
            self.connection.up.send(message)

    def close(self) -> None:
        """The agent's process ends: its kernel closes the connection, after what it had sent."""
        if self.connection is not None:
            self.connection.give_up()
            self.connection = None

    # ---- connections

    def _connect(self, begin: list[m.FromAgent], first: bool = False) -> None:
        if self._life is None or not self._life.listening:
            self.after(0.01, self._broken)
            return
        self.connection = connection = Connection(self.world, self, self._life)
        for message in begin:
            connection.up.send(message)
        self.after(FIRST_ANSWER_S if first else ANSWER_S, self._no_answer, connection)

    def _no_answer(self, connection: Connection) -> None:
        if self.connection is connection and not connection.answered:
            self._cancel()

    def _cancel(self) -> None:
        if self.connection is not None:
            self.connection.give_up()
            self._broken()

    def _broken(self) -> None:
        self.connection = None
        if self.agent.ended:
            return
        if self.clock.now - self.heard_s > TIMEOUT_S:
            self.agent.end()
        else:
            self.after(SEEK_S, self._seek)

    def _seek(self) -> None:
        if self.agent.ended or self.connection is not None:
            return
        self._life = self.world.coordinators.find(self.agent.node.name) or self._life
        assert self._join is not None
        self._connect([self._rejoin() if self._heard_any else self._join, *self.retold.messages()])

    def _rejoin(self) -> m.Rejoin:
        assert self._join is not None
        known = {w.index: w.rank for w in self.agent.workers if w.rank is not None and w.given}
        return m.Rejoin(self._join, self.version, known, self._stopped, self.clock.now - self.heard_s)

    # ---- what the coordinator says

    def hear(self, connection: Connection, message: Any) -> None:
        """One message."""
        if connection is not self.connection or self.agent.ended:
            return
        if message is Closed:
            connection.over = True
            self._broken()
            return
        connection.answered = self._heard_any = True
        self.heard_s = self.clock.now
        self._stopped = self._stopped and not isinstance(message, m.Halt | m.Resume)
        self.world.records.on_order(self.agent, message)
        self._note_order(message)
        self.agent.obey(message)

    def _note_order(self, message: Any) -> None:
        """As the agent's orders do (agent/main.py)."""
        if isinstance(message, m.Start):
            self.version = message.membership.version
            for member in message.membership.members:
                if member.incarnation == self.agent.incarnation:
                    self.retold.given(member.worker)
        elif isinstance(message, m.Halt):
            self.version = max(self.version, message.version)
            self.retold.halted()
        elif isinstance(message, m.Assign):
            self.version = message.version
        elif isinstance(message, m.Respawn):
            self.retold.started_again(message.worker)
        elif isinstance(message, m.Commit):
            self.retold.committed(message.generation)
        elif isinstance(message, m.Resume):
            self.version = message.membership.version
            self.retold.resumed(message.generation)
            for worker in self.agent.workers:
                if worker.rank is not None and worker.rank not in message.replaced:
                    self.retold.given(worker.index)

    # ---- time passes

    def look(self) -> None:
        """Once a heartbeat: whether the coordinator lives, or at least the membership stands."""
        now = self.clock.now
        ranks = [w for w in self.agent.workers if w.rank is not None]
        self._note_steps(max((w.generation for w in ranks), default=-1), now)
        self._listener.lease_s = max(COORDINATOR_LEASES * self._lease_s, STEP_FACTOR * max(self._gaps_s, default=0.0))
        if self._listener.look({"coordinator": max(self.heard_s, self._stepped_s)}, now) and ranks and not self._stopped:
            self._stopped = True
            if self.agent.membership is not None:
                self.retold.halted()
                self.agent.obey(m.Halt(self.agent.membership.version, "nobody is heard, and nothing goes on"))
            self._cancel()
        if now - self.heard_s > self._lease_s and self.connection is not None:
            found = self.world.coordinators.find(self.agent.node.name)
            if found is not None and found is not self._life:
                self._cancel()

    def _note_steps(self, step: int, now: float) -> None:
        if step > self._step:
            if self._step >= 0 and self._stepped_s:
                self._gaps_s.append(now - self._stepped_s)
            self._step, self._stepped_s = step, now
        elif step < self._step:
            self._step, self._stepped_s = step, 0.0
