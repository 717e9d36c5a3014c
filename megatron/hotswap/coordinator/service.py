"""The coordinator's service: gRPC in, the core's decisions out. One asyncio loop, so the core needs no locks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from ..control import messages as m
from ..control.decided import Decided
from ..control.restarting import control_of
from ..control.sanity import nonsense
from ..control.state import Control, ControlConfig, Decision, Log, Phase, Send
from ..errors import Malformed, UsageError
from ..security import files as credentials
from . import clock, wire
from .recorder import Recorder
from .records_first import RecordsFirst
from .status import status_of
from .store import Journal, Store

if TYPE_CHECKING:
    from .metrics import Metrics

_TICK_S = 0.05
#: Far beyond any time that a process waits for its turn; deadlines must go on if gRPC itself fails.
_HEARING_TIMEOUT_S = 30.0
#: From an agent's call until its Join: it says that first and at once.
_JOIN_TIMEOUT_S = 30.0
#: A scheduled fault is armed this many steps before it is due, on whoever holds the rank by then.
_ARM_AHEAD_STEPS = 3


class Scheduled:
    """A fault to arm later: on the node that will hold `rank` then."""

    def __init__(self, action: str, scope: str, rank: int, at_step: int, phase: str) -> None:
        self.action, self.scope, self.rank, self.at_step, self.phase = action, scope, rank, at_step, phase


class _Caller:
    """One agent's connection: what goes out to it, and how it ended if that was not by closing."""

    def __init__(self) -> None:
        self.outbox: asyncio.Queue[m.FromCoordinator | None] = asyncio.Queue()
        self.evidence = "its connection closed"
        self.misbehaved = False


class Coordinator:
    """Serves one job until it ends. The run directory has its credentials (security/authority.py) already."""

    def __init__(
        self, config: ControlConfig, run_dir: Path, store: Store, decided: Decided | None, faults: list[Scheduled] | None = None
    ) -> None:
        """`store` is led by this process; `decided` is what it had of a coordinator before this one, whose job is taken up."""
        self.control: Control = control_of(config, decided, clock.now())
        self.recorder = Recorder(run_dir, again=decided is not None)
        self._store = store
        self._first = RecordsFirst(self.control, store, self._carry_out, self.stand_by)
        self.deposed = ""  # why this coordinator must not decide any more, though the job goes on
        self.may_lead_again = False  # whether it may stand for election once more
        self.lost_nodes: asyncio.Queue[str] = (
            asyncio.Queue()
        )  # for a launcher that can end a node's ghosts, or bring it back
        self.cables: asyncio.Queue[tuple[str, str]] | None = None  # (unplug or plug, node), for a launcher that can do it
        self.ended = asyncio.Event()
        self.notices: list[Log] = []  # for whoever shows them
        self._faults = sorted(faults or [], key=lambda f: f.at_step)
        self._callers: dict[str, _Caller] = {}
        self._shown = credentials.read(run_dir, "coordinator", config.run_id)
        self._metrics: Metrics | None = None
        self._metrics_at = ""
        self._server: grpc.aio.Server | None = None
        self._ticker: asyncio.Task[None] | None = None

    @classmethod
    def with_journal(cls, config: ControlConfig, run_dir: Path, faults: list[Scheduled] | None = None) -> Coordinator:
        """One whose decisions go into the run directory's journal; it takes up what is there.

        Raises:
            UsageError: another coordinator has the journal, or it cannot be taken up.
        """
        store = Journal(run_dir, config.run_id)
        return cls(config, run_dir, store, store.lead(), faults)

    async def start(self, host: str, port: int) -> str:
        """Listen; returns the address.

        Raises:
            UsageError: the port is taken.
        """
        server = grpc.aio.server(options=wire.OPTIONS)
        handlers = {
            wire.AGENT_STREAM: grpc.stream_stream_rpc_method_handler(
                self._agent_stream, response_serializer=wire.encode_order
            ),
            wire.COMMAND: grpc.unary_unary_rpc_method_handler(
                self._command, response_serializer=wire.encode
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, handlers),))
        try:
            bound = wire.listen(server, f"{host}:{port}", self._shown)
        except RuntimeError as taken:
            raise UsageError(
                f"the coordinator cannot listen on {host}:{port}: {taken}; another job or program may use the port: give another one "
                "with --port, or 0 for any free one"
            ) from taken
        await server.start()
        self._server = server
        self._ticker = asyncio.get_running_loop().create_task(self._tick(f"{host}:{bound}"))
        return f"{host}:{bound}"

    async def serve_metrics(self, address: str, port: int, host: str) -> None:
        """For Prometheus, at address:port; `host` is this machine's name for others. Where they are, or why they are not served, goes
        into events.jsonl: a job does not end for want of numbers."""
        from .metrics import Metrics  # a job that serves none does not import the library

        self._metrics = Metrics(self.control, self.recorder)
        said = await asyncio.get_running_loop().run_in_executor(None, self._metrics.serve, address, port, host)
        self._metrics_at = said.data.get("target", "")
        self._apply([said])

    async def stop(self) -> None:
        """Give the agents a moment to hear that the job is over, then close, and write what is left to write."""
        if self._ticker is not None:
            self._ticker.cancel()
        if self.deposed:
            self._hang_up()
        deadline = time.monotonic() + 5.0
        while self._callers and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await self._first.settle()
        if self._server is not None:
            await self._server.stop(0.2)
        if self._metrics is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._metrics.close)
        self._store.close()
        if self.deposed:
            return self.recorder.let_go()
        code = self.control.exit_code
        self.recorder.close(130 if code is None else code, self.control.exit_reason or "interrupted")

    def _step_down(self, why: str) -> None:
        """Decide nothing more. The agents lose this connection and look for another coordinator; training goes on."""
        self.deposed = self.deposed or why
        self.ended.set()

    def stand_by(self, why: str) -> None:
        """The store is out of reach, or another one's: this process may stand for election again."""
        self.may_lead_again = self.may_lead_again or not self.deposed  # the store says it, and so does the next record
        self._step_down(why)

    def leave(self, why: str) -> None:
        """End this process and not the job: another coordinator takes it up."""
        self._step_down(why)

    def _hang_up(self) -> None:
        for caller in self._callers.values():
            caller.outbox.put_nowait(None)

    def end_job(self, code: int, reason: str) -> None:
        """The launcher, or its user, ends the job."""
        self._apply(self.control.stop(code, reason))

    # ---- agents

    async def _agent_stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[m.FromCoordinator]:
        first = await self._first_word(requests, context)
        if isinstance(first, str):
            yield self._refuse(first, f"a caller at {context.peer()}")
            return
        join = first.join if isinstance(first, m.Rejoin) else first
        incarnation = join.incarnation
        if isinstance(first, m.Rejoin) and first.version > self.control.version:
            self._step_down(
                f"node {join.node} knows membership {first.version}, and what is recorded here ends with {self.control.version}: "
                "another coordinator has decided since, or the record is an old one"
            )
            return
        if incarnation in self._callers:
            yield m.Refused(f"{incarnation} is connected already; every life of an agent has a name of its own")
            return
        caller = self._callers[incarnation] = _Caller()
        self._apply(self.control.handle(incarnation, first, clock.now()))
        reader = asyncio.get_running_loop().create_task(self._read(incarnation, join.node, requests, caller))
        try:
            while (message := await caller.outbox.get()) is not None:
                yield message
                if isinstance(message, m.Refused | m.Stop):
                    break
        finally:
            reader.cancel()
            self._callers.pop(incarnation, None)
            if not self.deposed:
                self._apply(self.control.handle(incarnation, m.AgentLost(caller.evidence, caller.misbehaved), clock.now()))

    async def _first_word(self, requests: AsyncIterator[bytes], context: Any) -> m.Join | m.Rejoin | str:
        """What a caller says first; in words, if that does not let it in."""
        if wire.role_of(context) != "agent":
            return f"agents show an agent's certificate, this is one of the role {wire.role_of(context)!r}"
        try:
            async with asyncio.timeout(_JOIN_TIMEOUT_S):
                raw = await anext(aiter(requests), None)
        except TimeoutError:
            return f"nothing was said within {_JOIN_TIMEOUT_S:g} s; the first message must be Join"
        if raw is None:
            return "nothing was said; the first message must be Join"
        try:
            first = wire.decode_from_agent(raw)
        except Malformed as wrong:
            return wire.why_no_join(raw, wrong)
        if not isinstance(first, m.Join | m.Rejoin):
            return f"the first message must be Join, got {type(first).__name__}"
        impossible = nonsense(first, self.control.config.grid.world_size, self.control.config.ranks_per_node)
        return f"no agent joins with this: {impossible}" if impossible else first

    async def _read(self, incarnation: str, node: str, requests: AsyncIterator[bytes], caller: _Caller) -> None:
        """Every message of an agent, until its connection ends. One that no agent would send changes nothing and ends it: whoever
        sends such a thing is of another version, or its memory is damaged."""
        grid, workers = self.control.config.grid, self.control.config.ranks_per_node
        refusal: m.Refused | None = None
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError):
            async for raw in requests:
                try:
                    message = wire.decode_from_agent(raw)
                    if impossible := nonsense(message, grid.world_size, workers):
                        raise Malformed(f"{type(message).__name__} with {impossible}")
                except Malformed as wrong:
                    caller.evidence, caller.misbehaved = f"it sent what no agent of this job says: {wrong}", True
                    refusal = self._refuse(caller.evidence, f"node {node}")
                    break
                if isinstance(message, m.StepDone) and self.control.on_course(message.record):
                    self.recorder.step(message.record)
                    if self._metrics is not None:
                        self._metrics.step(message.record)
                    self._arm_due(message.record.step)
                elif isinstance(message, m.Acknowledged):
                    self.recorder.copied(message)
                elif isinstance(message, m.Restored) and message.generation is not None and message.version == self.control.version:
                    # Here, and not once all have said it: the same agent says next that it has completed a step.
                    self.recorder.rolled_back(message.generation, message.version)
                self._apply(self.control.handle(incarnation, message, clock.now()))
        caller.outbox.put_nowait(refusal)

    def _refuse(self, why: str, who: str) -> m.Refused:
        """Say it to the sender, and write it down."""
        self._apply([Log("refused", f"{who}: {why}", {"from": who})])
        return m.Refused(f"{who}: {why}")

    async def _tick(self, address: str) -> None:
        """Before anybody is given up for silence, this process says something to itself the way agents do: what they have said waits
        perhaps in a thread of gRPC that does not get its turn. A late tick is a pause, which the lease forgives."""
        async with wire.channel(address, self._shown) as channel:
            ask = channel.unary_unary(f"/{wire.SERVICE}/{wire.COMMAND}", request_serializer=wire.encode)
            while True:
                await asyncio.sleep(_TICK_S)
                if self.control.lease.doubtful(self.control.agents.values(), clock.now()):
                    with contextlib.suppress(grpc.aio.AioRpcError):  # it hears nothing at all: then nothing is waited for
                        await ask(wire.Command(), timeout=_HEARING_TIMEOUT_S)
                if lost := self._store.lost:
                    return self.stand_by(lost)
                if not self._first.waiting:
                    self._apply(self.control.tick(clock.now()))

    def _apply(self, decisions: list[Decision]) -> None:
        """What is decided is recorded, then carried out; by nobody who stood still for so long that another one leads, and who finds
        here what was said to it meanwhile."""
        if lost := self._store.lost:
            self.stand_by(lost)
        if not self.deposed:
            self._first.take(decisions)

    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Send):
                caller = self._callers.get(decision.incarnation)
                if caller is not None:
                    caller.outbox.put_nowait(decision.message)
                if isinstance(decision.message, m.Commit):
                    self.recorder.committed(decision.message.generation)
                elif isinstance(decision.message, m.Resume):
                    self.recorder.rolled_back(decision.message.generation, decision.message.membership.version)
            else:
                self._write_down(decision)
        if self.control.exit_code is not None:
            self.ended.set()

    def _write_down(self, said: Log) -> None:
        self.recorder.event(said)
        if self._metrics is not None:
            self._metrics.event(said)
        self.notices.append(said)
        if said.kind == "durable" and self.control.exit_code is not None:  # what came after it is not there any more
            self.recorder.rolled_back(said.data["generation"], self.control.version + 1)
        elif said.kind == "end" and self.control.config.on_failure == "restart" and said.data["code"] not in (0, 130):
            self.recorder.rolled_back(max(self.control.committed, 0), self.control.version + 1)  # only checkpoints are left of the rest
        elif said.kind in ("node-lost", "released"):  # a launcher may bring either back
            self.lost_nodes.put_nowait(said.data["node"])
        elif said.kind in m.CABLE_FAULTS and self.cables is not None:
            self.cables.put_nowait((said.kind, said.data["node"]))

    def _arm_due(self, step: int) -> None:
        membership = self.control.membership
        while (
            self._faults
            and self._faults[0].at_step - _ARM_AHEAD_STEPS <= step
            and membership is not None
            and self.control.phase is Phase.TRAINING
        ):
            fault = self._faults.pop(0)
            member = membership.members[fault.rank]
            injection = m.Injection(fault.action, fault.scope, member.node, member.worker, fault.at_step, fault.phase)  # type: ignore[arg-type]
            self._apply(self.control.handle("", m.Inject(injection), clock.now()))

    # ---- users

    async def _command(self, raw: bytes, context: Any) -> wire.Status:
        role = wire.role_of(context)
        if role not in ("user", "coordinator"):
            return wire.Status(False, f"commands take a user's certificate, this is one of the role {role!r}; credentials/user.crt is one")
        try:
            command = wire.decode_command(raw)
        except Malformed as wrong:
            self._refuse(f"a command cannot be read: {wrong}", f"a caller at {context.peer()}")
            return wire.Status(False, f"{wrong}; use the `deadpool` that started the job")
        if command.injection is not None and command.injection.action in m.CABLE_FAULTS and self.cables is None:
            return wire.Status(False, "the nodes of this job share one network: start it with --separate-networks to have cables to pull")
        text = ""
        wanted: list[m.Event] = [m.Inject(command.injection)] if command.injection is not None else []
        wanted += [m.Release(command.release)] if command.release is not None else []
        for event in [*wanted, *([m.SaveWanted()] if command.save else [])]:
            decisions = self.control.handle("", event, clock.now())
            self._apply(decisions)
            said = [d for d in decisions if isinstance(d, Log)]
            text = "; ".join(d.reason for d in said)
            if any(d.kind in ("inject-refused", "save-refused", "release-refused") for d in said):
                return wire.Status(False, text)
        return status_of(self.control, self.recorder, clock.now(), text, command.detail, self._metrics_at)
