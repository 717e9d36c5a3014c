"""The agent: starts its workers, keeps the link to the coordinator, moves snapshots, obeys.

One asyncio loop; whatever would hold it (checksums of gigabytes) runs in an executor without Python's lock.
"""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from .. import environment
from ..config import HotSwapConfig
from ..control import messages as m
from ..coordinator.stores import finder
from ..errors import Fenced, HotSwapError, SnapshotMismatch, UsageError
from ..processes import adopt_orphans, die_with_parent
from ..replication.transfer import ReplicaStore
from ..replication.transports import make_transport, protection
from ..security import files as credentials
from ..snapshot.layout import HEADER_BYTES, Header
from ..snapshot.slots import OWN_SLOTS, Slots, Word, require_room, require_room_for_job
from . import local, own_snapshot
from .coordinator_link import Calls, CoordinatorLink
from .domain import failure_domain
from .durable import Durable
from .health import NodeHealth
from .inject import strike
from .interface import address_of
from .lives import Lives
from .pool import started_pool
from .replicator import Replicator, free_slot, own_slot_of
from .scratch import Scratch
from .watched import Watched
from .worker_process import WorkerProcess


class Agent:
    """One node's (or one task's) agent. `run` returns the exit code."""

    def __init__(
        self,
        config: HotSwapConfig,
        place: environment.AgentEnvironment,
        shown: credentials.Credentials,
        command: Sequence[str],
        worker_env: dict[str, str],
        tmp: str,
    ) -> None:
        self.config = config
        self.place = place
        self._shown = shown
        self.incarnation = f"{place.node}-{uuid.uuid4().hex[:8]}"
        self._command = list(command)
        self._worker_env = worker_env
        self._tmp = tmp
        self._interface = address_of(config.interface, place.coordinator)
        self._lives = Lives(self._from_worker, self._worker_lost, lambda: self._link.lease_s)
        self._link = CoordinatorLink(
            place.coordinator,
            shown,
            Calls(self._obey, self._rejoin, self._lives.progress, self._stop_ranks, finder(config.store, config.run_dir, place.run_id)),
            lease_s=config.lease_s,
            interval_s=config.heartbeat_interval_s,
            timeout_s=config.coordinator_timeout_s,
        )
        self._workers = self._lives.workers
        self._replicas = ReplicaStore(place.run_id, self._require_room)
        self._transport = make_transport(config, shown, self._interface)
        self._replicator = Replicator(place.run_id, self._replicas, self._transport, self._say, self._guard, self._before_push)
        self._replicas.own = lambda rank, generation: own_slot_of(self._workers, rank, generation)
        self._durable = Durable(
            place.run_id,
            self._workers,
            self._replicas,
            lambda: self._replicator.replicas(self._workers),
            self._require_room,
            self._say,
            self._do,
        )
        self._replicator.on_sealed = self._durable.sealed
        self._watched = Watched(config, place, self.incarnation, self._interface)
        self._health = NodeHealth(config, self._say)
        self._tasks: set[asyncio.Task[None]] = set()  # that nobody waits for
        self._membership: m.Membership | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._join: m.Join | None = None  # said first
        self._version = 0  # the newest membership that was heard of
        self._armed: list[m.Injection] = []
        self._exit: asyncio.Future[int] | None = None
        self._release_after: frozenset[int] | None = None  # replicas to keep once the new membership has committed

    async def run(self) -> int:
        """Until the job is over, or this agent is fenced."""
        loop = asyncio.get_running_loop()
        self._exit = loop.create_future()
        loop.set_default_executor(started_pool())
        loop.set_exception_handler(self._fail)
        moved_by = await self._transport.check()
        address = await self._transport.serve(self._replicas)
        moved = f"snapshots are moved by {moved_by}, {protection(self.config)}, arranged over {address}"
        print(f"agent {self.incarnation}: {moved}", file=sys.stderr, flush=True)
        unhealthy = await self._health.at_start()
        for index in range(0 if unhealthy else self.place.workers):
            self._start_worker(index)
        self._join = m.Join(
            m.PROTOCOL,
            self.place.run_id,
            self._shown.token,
            self.place.node,
            self.incarnation,
            self.place.workers,
            address,
            failure_domain(self.config.failure_domain, self.place.node, self.place.host),
            unhealthy,
        )
        self._say(self._join)
        if (told := await self._watched.serve(self._workers, self._replicas, self._replicator, lambda: self._link.heard_s)) is not None:
            print(f"agent {self.incarnation}: {told.text}", file=sys.stderr, flush=True)
            self._say(told)
        work = (self._link.talk(), self._link.beat(), self._lives.watch(), self._health.watch())
        tasks = [loop.create_task(self._guard(t)) for t in work]
        try:
            return await self._exit
        finally:
            for task in [*tasks, *self._tasks, *([self._recovery] if self._recovery else [])]:
                task.cancel()
            self._replicator.close()
            self._lives.close()
            self._health.close()
            self._watched.close()
            await self._transport.close()

    def _start_worker(self, index: int) -> None:
        log = self.config.run_dir / "logs" / f"{self.place.node}-{self.incarnation[-8:]}-{index}.log"
        place: dict[str, str | int] = {
            "run_id": self.place.run_id,
            "incarnation": self.incarnation,
            "node": self.place.node,
            "workers": self.place.workers,
            "address": self._interface,
            "agent_pid": os.getpid(),
            "tmp": self._tmp,
        }
        self._lives.add(WorkerProcess(index, self._command, log, place, self._worker_env))

    def _require_room(self, wanted_bytes: int) -> None:
        limit = self.config.host_memory_max_bytes
        taken = self._replicas.held_bytes + sum(w.slots.slot_bytes * w.slots.count for w in self._workers if w.slots is not None)
        require_room(wanted_bytes, None if limit is None else max(0, limit - taken), self.place.node)

    def _finish(self, code: int, why: str) -> None:
        if self._exit is not None and not self._exit.done():
            print(f"agent {self.incarnation} ends with code {code}: {why}", file=sys.stderr, flush=True)
            self._exit.set_result(code)

    def _fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What a callback raises would be printed and forgotten; a fault of ours must end the node loudly, never leave it half alive."""
        loop.default_exception_handler(context)
        if "handle" in context:
            self._finish(1, f"{context['message']}: {context.get('exception')!r}")

    def _do(self, work: Awaitable[None]) -> None:
        """Behind the loop's back; it may take a while."""
        task = asyncio.get_running_loop().create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, work: Awaitable[None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            raise
        except Fenced as fenced:
            self._finish(3, str(fenced))
        except Exception as failure:  # a fault of ours must end the node loudly, never leave it half alive
            self._finish(1, f"{type(failure).__name__}: {failure}")
            raise

    # ---- the coordinator

    def _say(self, message: m.FromAgent) -> None:
        self._watched.said(message)
        self._link.say(message)

    def _obey(self, message: Any) -> None:
        orders: dict[type, Callable[[Any], None]] = {
            m.Welcome: self._welcome,
            m.Refused: self._refused,
            m.Load: self._durable.load,
            m.TakeStock: self._durable.take_stock,
            m.WriteSnapshots: self._durable.write,
            m.WriteManifest: self._durable.write_manifest,
            m.Start: self._start,
            m.Halt: self._halt,
            m.Assign: self._assign,
            m.Respawn: self._respawn,
            m.Resume: self._resume,
            m.Commit: self._commit,
            m.Void: self._void,
            m.SendWhole: self._send_whole,
            m.Arm: self._arm,
            m.Alive: lambda _: None,
            m.Stop: self._stop,
        }
        orders[type(message)](message)

    def _rejoin(self, away_s: float) -> m.Rejoin:
        """Where this agent stands, for a coordinator that does not know it."""
        assert self._join is not None
        known = {w.index: w.rank for w in self._workers if w.rank is not None and w.given}
        return m.Rejoin(self._join, self._version, known, self._link.stopped, away_s)

    def _stop_ranks(self, why: str) -> None:
        """Nobody is heard, and nothing goes on: this node may have been replaced. Its snapshots stay."""
        print(f"agent {self.incarnation}: {why}: its ranks are stopped", file=sys.stderr, flush=True)
        if self._membership is not None:
            self._halt(m.Halt(self._membership.version, why))

    def _welcome(self, message: m.Welcome) -> None:
        self._link.lease_s = message.lease_s

    def _refused(self, message: m.Refused) -> None:
        raise Fenced(message.reason)

    def _stop(self, message: m.Stop) -> None:
        self._finish(message.code, message.reason)

    def _start(self, message: m.Start) -> None:
        self._membership = message.membership
        self._version = self._replicas.version = message.membership.version
        members, version, generation = message.membership.members, message.membership.version, message.generation
        for rank, member in enumerate(members):
            if member.incarnation != self.incarnation:
                continue
            worker = self._workers[member.worker]
            worker.begins_from = generation
            self._link.retold.given(worker.index)
            self._give_rank(worker, rank, len(members), version, message.store, fake=False)
            if generation is not None:
                self._tell(worker, local.Plan(version, generation, message.store, True, 0, worker.slot_of(generation)))

    def _assign(self, message: m.Assign) -> None:
        self._version = message.version
        # A node that joined after the halt has not said what it holds (nothing, but the plan waits for it).
        self._replicas.frozen = True
        self._say(m.ReplicaReport(message.version - 1, self._replicator.replicas(self._workers)))
        for index, rank in message.ranks.items():
            self._give_rank(self._workers[index], rank, message.world_size, message.version, "", fake=True)

    def _respawn(self, message: m.Respawn) -> None:
        worker = self._workers[message.worker]
        print(f"agent {self.incarnation}: worker {worker.index} is started again: {message.reason}", file=sys.stderr, flush=True)
        self._link.retold.started_again(worker.index)
        self._do(self._lives.start_again(worker, self._replicator.sealed, stuck=self.config.on_failure == "swap"))

    def _give_rank(self, worker: WorkerProcess, rank: int, world_size: int, version: int, store: str, fake: bool) -> None:
        worker.rank, worker.given = rank, True
        loaded = worker.begins_from is not None
        self._tell(worker, local.Given(rank, world_size, worker.index, self.place.workers, version, store, fake, loaded))

    def _halt(self, message: m.Halt) -> None:
        self._version = max(self._version, message.version)
        self._link.retold.halted()
        self._replicas.frozen = True
        self._durable.cancel()
        self._replicator.halt()
        if self._recovery is not None:
            self._recovery.cancel()
        for worker in self._workers:
            worker.begins_from = None
            worker.control.set(Word.OVER_VERSION, message.version)
            if worker.given:  # one that is started again hears of the membership to come only
                self._tell(worker, message)
        self._say(m.ReplicaReport(message.version, self._replicator.replicas(self._workers)))

    def _resume(self, message: m.Resume) -> None:
        before, self._membership = self._membership, message.membership
        self._version = self._replicas.version = message.membership.version
        self._link.retold.resumed(message.generation)
        for worker in self._workers:
            # A process without a state yet serves the store of its beginning still: where all are such, the next plan needs it.
            if worker.rank is not None and worker.rank not in message.replaced:
                self._link.retold.given(worker.index)
        self._durable.cancel()
        self._recovery = asyncio.get_running_loop().create_task(self._guard(self._go_on(message)))
        if before is None or before.holders != message.membership.holders or before.members != message.membership.members:
            self._release_after = message.membership.held_by(self.incarnation)

    async def _go_on(self, plan: m.Resume) -> None:
        """Fetch what is missing, tell the workers the plan, then restore redundancy behind their back."""
        await self._replicator.settled()
        mine = [w for w in self._workers if w.rank is not None]
        prepared = await asyncio.gather(*(self._prepare(w, plan) for w in mine))
        self._replicas.go_back(plan.generation)
        self._replicas.frozen = False
        for worker in (w for w, is_prepared in zip(mine, prepared, strict=True) if is_prepared):
            self._replicator.begin(worker, plan.membership, plan.generation, keep=plan.generation)

    async def _prepare(self, worker: WorkerProcess, plan: m.Resume) -> bool:
        """Have the plan's generation in the worker's slots, and tell it the plan. False: there was no undamaged copy, which is said; then
        this plan is given up by the coordinator, and there is nothing to send to others."""
        rank = worker.rank
        assert rank is not None
        fetched, slot = 0, None
        if rank in plan.sources:
            found = await self._replicator.fetch(worker, plan, lambda h, size: self._reserve_own(worker, h, size))
            if found is None:
                return False
            slot, header = found
            fetched = header.metadata_bytes + header.payload_bytes
            worker.adopt(slot, header)
        elif rank in plan.replaced:
            slot = await self._kept(worker, rank, plan)
            if slot is None:
                return False
        for later in [s for s, g in worker.generations.items() if g > plan.generation]:
            worker.empty(later)
        worker.control.set(Word.COPIED, plan.generation + 1)
        worker.control.set(Word.ACKNOWLEDGED, plan.generation)
        worker.control.set(Word.COMMITTED, min(worker.control.get(Word.COMMITTED), plan.generation))
        worker.control.set(Word.VOID, 0)  # what was skipped in the membership before may be taken in this one
        order = local.Plan(plan.membership.version, plan.generation, plan.store, plan.redo_sections, fetched, slot, plan.replaced)
        self._tell(worker, order)
        return True

    async def _kept(self, worker: WorkerProcess, rank: int, plan: m.Resume) -> int | None:
        """The slot in which the process before this one has left the plan's generation, undamaged (guarantee 6). None: it is damaged,
        which is said, so that another source is found."""
        assert worker.slots is not None
        try:
            slot = worker.slot_of(plan.generation)
            await asyncio.get_running_loop().run_in_executor(None, worker.slots.verify, slot)
        except SnapshotMismatch as damaged:
            self._say(m.CopyDamaged(rank, plan.generation, plan.membership.version, self.incarnation, str(damaged)))
            return None
        return slot

    def _reserve_own(self, worker: WorkerProcess, header: Header, slot_bytes: int) -> tuple[Slots, int]:
        if worker.slots is None:
            self._require_room(slot_bytes * OWN_SLOTS)
        slots = worker.make_slots(slot_bytes)
        slot = free_slot(worker, header.generation)
        worker.empty(slot)
        slots.invalidate(slot)
        return slots, slot

    def _commit(self, message: m.Commit) -> None:
        self._link.retold.committed(message.generation)
        for worker in self._workers:
            if worker.rank is not None:
                # A coordinator that has just come says again what the one before it had said, and perhaps something older first.
                worker.control.set(Word.COMMITTED, max(worker.control.get(Word.COMMITTED), message.generation + 1))
        if self._release_after is not None and not self._replicas.frozen:
            self._replicas.drop(self._release_after)
            self._release_after = None

    def _void(self, message: m.Void) -> None:
        self._do(self._free_void(message.generation))

    async def _free_void(self, generation: int) -> None:
        """A generation that some rank has skipped: once nothing sends it any more, its slots are free."""
        await self._replicator.void(generation)
        for worker in self._workers:
            if worker.rank is not None and not self._replicas.frozen:
                worker.control.set(Word.VOID, max(worker.control.get(Word.VOID), generation + 1))

    def _send_whole(self, message: m.SendWhole) -> None:
        self._replicator.whole = True

    def _arm(self, message: m.Arm) -> None:
        injection = message.injection
        if injection.worker >= len(self._workers):
            workers = f"{len(self._workers)} workers here"
            self._say(m.Note("inject-refused", f"{self.place.node} has no worker {injection.worker}: {workers}, counted from 0"))
        elif injection.at_step is None and injection.action not in m.WORKER_FAULTS:
            self._strike(injection)
        elif injection.phase == "h2h":
            self._armed.append(injection)
        else:
            self._tell(self._workers[injection.worker], message)

    def _strike(self, injection: m.Injection) -> None:
        if injection.action in m.CABLE_FAULTS:
            return self._say(m.Note(injection.action, f"{injection.action} {self.place.node}, now"))
        strike(injection, self.config.run_dir, os.getpid(), self._workers[injection.worker].process.pid)

    # ---- the workers

    def _tell(self, worker: WorkerProcess, message: local.FromAgent, fds: tuple[int, ...] = ()) -> None:
        self._lives.tell(worker, message, fds)

    def _from_worker(self, worker: WorkerProcess, message: Any) -> None:
        if isinstance(message, local.NeedSlots):
            self._give_slots(worker, message)
        elif isinstance(message, local.Copying):
            worker.generations = {s: g for s, g in worker.generations.items() if s != message.slot}
            worker.generations[message.slot] = message.generation
            if not self._replicas.frozen and self._membership is not None:
                self._replicator.begin(worker, self._membership, message.generation, message.keep)
        elif isinstance(message, local.Strike):
            self._strike(message.injection)
        else:
            if isinstance(message, m.Finished):
                worker.said_goodbye = True
            elif isinstance(message, m.HaltReport) and message.done is None:
                message = msgspec.structs.replace(message, own=own_snapshot.complete(worker, self.place.run_id))
            self._say(message)

    def _worker_lost(self, worker: WorkerProcess, evidence: str) -> None:
        self._say(m.WorkerLost(worker.index, evidence))

    def _give_slots(self, worker: WorkerProcess, wanted: local.NeedSlots) -> None:
        slot_bytes = HEADER_BYTES + wanted.metadata_room_bytes + wanted.payload_bytes
        worker.peers = wanted.peers
        if worker.slots is not None:  # fetched already
            if worker.layout_hash == wanted.layout_hash:
                self._tell(worker, local.SlotsGiven(worker.slots.slot_bytes, OWN_SLOTS), (worker.slots.fd,))
                self._replicate_first(worker)
            else:
                self._tell(worker, local.NoSlots(own_snapshot.another_layout(worker)))
            return
        try:
            # Every agent holds as many replicas as it has ranks, times R; a refusal must come before training starts.
            ranks, limit = len(self._workers), self.config.host_memory_max_bytes
            replicas = 0 if self._shares_payload(worker) else ranks * self.config.replicas
            require_room_for_job(slot_bytes, ranks, replicas, limit, self.place.node)
            self._require_room(slot_bytes * OWN_SLOTS)
            slots = worker.make_slots(slot_bytes)
        except UsageError as refusal:
            self._tell(worker, local.NoSlots(str(refusal)))
            return
        worker.layout_hash = wanted.layout_hash
        worker.metadata_room_bytes = wanted.metadata_room_bytes
        self._tell(worker, local.SlotsGiven(slot_bytes, OWN_SLOTS), (slots.fd,))

    def _replicate_first(self, worker: WorkerProcess) -> None:
        """What the job begins from needs replicas like every generation; by now it is known whether payloads have to be sent."""
        if worker.begins_from is not None and self._membership is not None:
            self._shares_payload(worker)
            self._replicator.begin(worker, self._membership, worker.begins_from, keep=worker.begins_from)
            worker.begins_from = None

    def _shares_payload(self, worker: WorkerProcess) -> bool:
        """Whether the worker's holders have its payload themselves. Said once, for the start-up summary."""
        if self._membership is None or worker.rank is None:
            return False
        peers = self._replicator.peers_in_place_of_payload(worker, self._membership)
        if peers and worker.rank == 0:
            text = f"the optimizer's state is not sharded: ranks {peers} have that of rank 0 too, so only metadata travel between nodes"
            self._say(m.Note("replication", text))
        return bool(peers)

    def _before_push(self, worker: WorkerProcess, generation: int) -> None:
        for injection in [i for i in self._armed if i.worker == worker.index and (i.at_step or 0) <= generation]:
            self._armed.remove(injection)
            if injection.action in m.WORKER_FAULTS:  # the worker does it itself, at once
                self._tell(worker, m.Arm(msgspec.structs.replace(injection, at_step=None, phase=None)))
            else:
                asyncio.get_running_loop().call_later(0.0005, self._strike, injection)


def run_agent(
    config: HotSwapConfig, command: Sequence[str], worker_env: dict[str, str], place: environment.AgentEnvironment | None = None
) -> int:
    """Be the agent of this node until the job is over; returns the exit code. Its place is what the launcher has said, unless given."""
    place = place or environment.agent()
    if place.launcher_pid is not None:
        die_with_parent(place.launcher_pid)
    adopt_orphans()
    Path(config.run_dir, "logs").mkdir(parents=True, exist_ok=True)
    try:
        shown = credentials.read(config.run_dir, "agent", place.run_id)
        with Scratch() as scratch:
            return asyncio.run(Agent(config, place, shown, command, worker_env, str(scratch.path)).run())
    except HotSwapError as failure:
        print(f"deadpool: {failure}", file=sys.stderr)
        return 2
