"""A worker's side of a recovery: report, wait for the plan, rebuild, restore.

Works on callables and plain tensors (`Trainer`), which patches/adapter.py makes out of Megatron.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
import torch

from ..agent import local
from ..control import messages as m
from ..errors import Halted, SnapshotMismatch
from ..snapshot.engine import NamedTensors, SnapshotEngine, layout_of
from ..snapshot.layout import HEADER_BYTES
from ..snapshot.slots import OWN_SLOTS, Slots
from ..topology.groups import Rebuilt
from ..worker.abort import Aborter
from ..worker.session import Session, end_process


class Trainer(Protocol):
    """What is asked of the trainer. All of it is Megatron's state of this rank."""

    def tensors(self) -> NamedTensors:
        """Optimizer shard and module tensors outside the optimizer, in the layout's order."""

    def payload_peers(self) -> tuple[int, ...]:
        """The ranks whose `tensors` are the same as this one's after every step, bit for bit; none where state is sharded."""

    def metadata(self, generation: int) -> dict[str, Any]:
        """Everything else that a generation consists of, as plain values."""

    def load_metadata(self, metadata: dict[str, Any]) -> None:
        """Put it back."""

    def forget_step(self) -> None:
        """Undo what an interrupted step, evaluation or save left behind in objects that live on."""

    def parameters_from_main(self) -> None:
        """Model parameters from main parameters: cast, and all-gather over DP. Collective."""

    def rewind_data(self, generation: int) -> None:
        """Read again what was read after this generation."""

    def prepare_rebuild(self) -> None:
        """The plan is waited for: do what needs no plan. Nothing of the trainer's runs until `rebuild_groups`."""

    def rebuild_groups(self, plan: local.Plan) -> Rebuilt:
        """Have the process groups of the new membership, on its store. Only members meet."""

    def all_joined(self) -> None:
        """Every rank has taken part in a step of this membership: nobody is on the way any more."""


@dataclass
class Position:
    """Where the training thread is: `generation` is that of the live state, `dirty` once main parameters may have changed since."""

    generation: int = -1
    dirty: bool = False
    between_steps: bool = False


_ENCODER = msgspec.msgpack.Encoder()


def encode_metadata(metadata: dict[str, Any]) -> bytes:
    """A generation's metadata as it lies in a slot."""
    return _ENCODER.encode(metadata)


class Snapshots:
    """Takes and restores this rank's snapshots."""

    def __init__(self, session: Session, trainer: Trainer) -> None:
        self._session = session
        self._trainer = trainer
        self.engine: SnapshotEngine | None = None

    def attach(self, generation: int) -> None:
        """The model is built: get slots of its size from the agent. Ends the process in words if there is no room."""
        tensors = self._trainer.tensors()
        layout = layout_of(tensors, len(encode_metadata(self._trainer.metadata(generation))))
        answer, fds = self._session.await_slots(
            local.NeedSlots(layout.hash, layout.metadata_room_bytes, layout.payload_bytes, self._trainer.payload_peers())
        )
        if isinstance(answer, local.NoSlots):
            fail_setup(self._session, answer.reason)
        assert isinstance(answer, local.SlotsGiven) and self._session.rank is not None
        slots = Slots(fds[0], answer.slot_bytes, OWN_SLOTS)
        layout = replace(layout, metadata_room_bytes=answer.slot_bytes - HEADER_BYTES - layout.payload_bytes)
        if self.engine is not None:
            self.engine.close()
        self.engine = SnapshotEngine(
            layout, slots, self._session.control, self._session.place.run_id, self._session.rank
        )

    @property
    def oldest(self) -> int:
        """The oldest generation that a recovery may still go back to; -1: none was taken yet."""
        return -1 if self.engine is None else self.engine.oldest

    @property
    def newest(self) -> int:
        """The newest generation taken; -1: none."""
        return -1 if self.engine is None else self.engine.newest

    def take(self, generation: int, keep: int) -> None:
        """Begin the copy of the live state. `keep`: the newest generation known to be committed."""
        assert self.engine is not None
        metadata = encode_metadata(self._trainer.metadata(generation))
        slot = self.engine.begin(generation, self._trainer.tensors(), metadata, keep)
        self._session.say(local.Copying(generation, slot, keep))

    def adopt(self, plan: local.Plan) -> None:
        """What the agent has fetched for this plan, or kept of the process before this one, lies in a slot."""
        assert self.engine is not None
        if plan.slot is not None:
            self.engine.adopt(plan.generation, plan.slot)

    def metadata(self, generation: int) -> dict[str, Any]:
        """The metadata of a generation."""
        assert self.engine is not None
        decoded: dict[str, Any] = msgspec.msgpack.decode(self.engine.metadata(generation))
        return decoded

    def restore(self, generation: int) -> int:
        """Copy the tensors of a generation back, once its slot is found undamaged."""
        assert self.engine is not None
        self.engine.verified_metadata(generation)
        return self.engine.restore(generation, self._trainer.tensors())

    def go_back(self, generation: int) -> None:
        """The live state is this generation again."""
        assert self.engine is not None
        self.engine.go_back(generation)


def fail_setup(session: Session, reason: str) -> None:
    """End the job from a worker, in words, before or instead of training."""
    session.say(m.Finished(session.place.worker, session.rank, 2, reason))
    time.sleep(10.0)  # the agent ends this process as soon as the coordinator has said so
    end_process(2, reason)


class Recovery:
    """The steps of a recovery, as the training thread takes them."""

    def __init__(
        self, session: Session, aborter: Aborter, trainer: Trainer, snapshots: Snapshots, new_store: Callable[[], str]
    ) -> None:
        self._session = session
        self._aborter = aborter
        self._trainer = trainer
        self._snapshots = snapshots
        self._new_store = new_store
        self._store = ""

    def serve_store(self) -> str:
        """A rendezvous store, unused, for whichever membership comes next; every one has a new one."""
        self._store = self._new_store()
        return self._store

    def first_plan(self) -> local.Plan:
        """What the job begins from, in a process whose groups are real: a halt ends it.

        Raises:
            Halted: a peer is lost already.
        """
        order = self._await_order()
        if isinstance(order, m.Halt):
            raise Halted(f"membership {order.version} is over")
        return order

    def await_plan(self) -> local.Plan:
        """A spare that has built its model waits for the plan it will join by; halts meanwhile are answered by the monitor."""
        while True:
            order = self._await_order()
            if isinstance(order, local.Plan):
                return order

    def begin_from(self, plan: local.Plan, position: Position) -> None:
        """A job's first train_step: the whole job becomes the generation that its agents have read from files. Collective."""
        self.restore(plan, position)
        self._trainer.parameters_from_main()

    def recover(self, position: Position, known: local.Plan | None = None) -> local.Plan:
        """From the exception to a state that is generation `plan.generation`. Begins again when it is halted itself.

        `known`: the plan that a spare already has.
        """
        order: m.Halt | local.Plan = known or self._await_order()
        while True:
            try:
                self._aborter.thread_is_out()
                if isinstance(order, m.Halt):
                    self._report(order, position)
                    self._trainer.prepare_rebuild()
                    order = self._await_order()
                    continue
                self._carry_out(order, position)
                return order
            except (RuntimeError, SnapshotMismatch) as failure:
                if not self._session.halted and not isinstance(failure, Halted):
                    self._report_failure(order, failure)
                position.dirty = True
                order = self._await_order()

    def _report_failure(self, order: m.Halt | local.Plan, failure: Exception) -> None:
        assert self._session.rank is not None
        if isinstance(failure, SnapshotMismatch) and isinstance(order, local.Plan):
            self._session.say(
                m.CopyDamaged(self._session.rank, order.generation, order.version, self._session.place.incarnation, str(failure)[:2000])
            )
        else:
            text = f"{type(failure).__name__}: {failure}"[:2000]
            self._session.say(m.WorkerError(self._session.rank, self._session.version, 0, True, text))

    def _await_order(self) -> m.Halt | local.Plan:
        """The newest order: a halt makes the plan before it void."""
        order = self._session.orders.get()
        while True:
            try:
                order = self._session.orders.get_nowait()
            except queue.Empty:
                return order

    def _report(self, halt: m.Halt, position: Position) -> None:
        assert self._snapshots.engine is not None and self._session.rank is not None
        own = self._snapshots.engine.complete()
        self._session.in_no_phase()
        self.serve_store()  # the one before may have been met on: an attempt that was broken off has left there what it had agreed on
        self._session.say(
            m.HaltReport(
                halt.version,
                self._session.rank,
                position.generation if position.generation >= 0 else None,
                position.between_steps,
                own,
                self._store,
                self._aborter.out_after_s,
            )
        )

    def _carry_out(self, plan: local.Plan, position: Position) -> None:
        # A spare has had the plan while it built its model; a survivor may have looked for its groups' holders when it came.
        began = time.perf_counter() if position.generation < 0 else self._session.plan_heard_s
        rerun = max(0, position.generation - plan.generation)
        self._session.version = plan.version
        self._session.check()
        self._aborter.building_groups()
        groups = self._trainer.rebuild_groups(plan)
        self._aborter.groups_built()
        rebuilt = time.perf_counter()
        restored_bytes = self.restore(plan, position)
        self._trainer.parameters_from_main()
        done = time.perf_counter()
        assert self._session.rank is not None
        self._session.say(
            m.Restored(
                plan.version,
                self._session.rank,
                rebuilt - began,
                done - rebuilt,
                plan.fetched_bytes or restored_bytes,
                rerun,
                groups.kept,
                groups.made,
            )
        )
        if groups.reasons:
            told = "; ".join(f"{name}: {why}" for name, why in groups.reasons.items())
            self._session.say(m.Note("groups-renewed", f"rank {self._session.rank}, without a lost member: {told}"))

    def settle(self) -> None:
        """The first step of a membership is done, so every rank has joined and large groups have connected."""
        self._trainer.all_joined()
        self._aborter.groups_built()

    def restore(self, plan: local.Plan, position: Position) -> int:
        """Make the live state generation `plan.generation`. A survivor that is there already copies nothing back."""
        self._snapshots.adopt(plan)
        metadata = self._snapshots.metadata(plan.generation)
        count = 0
        if position.dirty or position.generation != plan.generation:
            count = self._snapshots.restore(plan.generation)
        self._trainer.forget_step()
        self._trainer.load_metadata(metadata)
        self._trainer.rewind_data(plan.generation)
        self._snapshots.go_back(plan.generation)
        position.generation, position.dirty, position.between_steps = plan.generation, False, False
        return count


def random_state() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's random generators, as plain values."""
    import random

    import numpy

    version, numbers, gauss = random.getstate()
    kind, keys, pos, has_gauss, cached = numpy.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, numpy.asarray(keys).tobytes(), int(pos), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().numpy().tobytes(),
        "cuda": torch.cuda.get_rng_state().cpu().numpy().tobytes(),
    }


def load_random_state(state: dict[str, Any]) -> None:
    """Put them back."""
    import random

    import numpy

    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, pos, has_gauss, cached = state["numpy"]
    numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32).copy(), pos, has_gauss, cached))
    torch.set_rng_state(byte_tensor(state["torch"]))
    torch.cuda.set_rng_state(byte_tensor(state["cuda"]))


def byte_tensor(raw: bytes) -> torch.Tensor:
    """A ByteTensor, shape (len(raw),), of its own memory."""
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
