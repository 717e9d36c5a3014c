"""Durable generations: which one, who writes what, when again, and how a job ends on its last rung. Pure.

Two occasions. *At the last rung* (no spare came, or the program fails) everyone has been halted: the agents say what snapshots they
have (Stock), the newest generation of which every rank has a copy is written, and the job ends. No worker is needed. *In training* a
user asks: a generation a little ahead is named, and every agent takes its ranks' own snapshots as they are completed.

Either way: files first (SnapshotWritten from all), then the manifest by one agent (GenerationWhole). A write that fails is said and
tried again as another attempt, in another folder; it never ends the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..recovery import plan
from ..snapshot.manifest import Name
from . import messages as m
from .attempt import Ending, Saving
from .decisions import Decision, Log, Send
from .job import Job
from .phases import Phase

#: A full disk or a server that is away may come back; a job that waits to end must end.
TRIES_MAX = 5
_RETRY_FIRST_S = 1.0  # and twice as long each time


class Saves(Job):
    """Control (state.py) calls it with the events, Recovering (recovering.py) at the last rung."""

    @property
    def _at_the_last_rung(self) -> bool:
        """Whether the job ends once a generation is written: then no worker is needed any more, and none is started again."""
        return self.saving is not None and self.saving.ending is not None

    # ---- beginning

    def _save_wanted(self, incarnation: str, event: m.SaveWanted, now: float) -> list[Decision]:
        if self.config.durable is None:
            return [Log("save-refused", "the job was started without --save, so there is nowhere to write", {"phase": self.phase.value})]
        if self.finished:
            text = "training is done; Megatron has saved, or saves now, by its own flags"
            return [Log("save-refused", text, {"phase": self.phase.value, "finished": sorted(self.finished)})]
        if self.saving is not None or self.save_wanted:
            generation = None if self.saving is None else self.saving.generation
            return [Log("save", "a generation is being written already", {"phase": self.phase.value, "generation": generation})]
        self.save_wanted, self.save_text = True, ""
        text = f"the job is {self.phase.value}: a generation is written as soon as it trains"
        return self._save_if_wanted(now) or [Log("save", text, {"phase": self.phase.value})]

    def _save_if_wanted(self, now: float) -> list[Decision]:
        if not self.save_wanted or self.saving is not None or self.phase is not Phase.TRAINING or self.finished:
            return []
        self.saving = Saving(None)
        return self._aim()

    def _aim(self) -> list[Decision]:
        """Name a generation that is yet to come, and have every rank's own agent take it."""
        assert self.saving is not None and self.membership is not None
        interval = self.config.interval
        least = max(self.newest_step, self.committed, 0) + self.saving.lead_steps
        members = self.membership.members
        return self._write(-(-least // interval) * interval, {rank: x.incarnation for rank, x in enumerate(members)}, "")

    def _last_rung(self, ending: Ending, now: float) -> list[Decision]:
        """Everyone is halted, and the job is to end."""
        if self.config.durable is None:
            text = f"{ending.reason}; nothing was written, since the job was started without --save"
            return self._end(ending.code, text if ending.code == 75 else ending.reason, ending.failed)
        if self._at_the_last_rung:
            return []
        self.saving = Saving(ending)
        self.deadline_s = None  # whose worker is stuck does not matter any more
        evidence = self.recovery.evidence if self.recovery is not None else []
        text = f"{ending.reason}; the newest generation is written to {self.config.durable.root}"
        log = Log("last-rung", text, {"code": ending.code, "evidence": evidence})
        return [log, *self._take_stock(now)]

    def _take_stock(self, now: float) -> list[Decision]:
        assert self.saving is not None
        saving = self.saving
        saving.generation, saving.by, saving.retry_s, saving.manifest_by = None, {}, None, None
        saving.stock.clear()
        saving.stock_due_s = now + self.config.halt_timeout_s
        return [Send(i, m.TakeStock(self.version)) for i in self.agents]

    def _stock(self, incarnation: str, event: m.Stock, now: float) -> list[Decision]:
        saving = self.saving
        if saving is None or not self._at_the_last_rung or saving.generation is not None or event.version != self.version:
            return []
        saving.stock[incarnation] = event.snapshots
        return self._choose_to_write() if saving.retry_s is None and self.agents.keys() <= saving.stock.keys() else []

    def _choose_to_write(self) -> list[Decision]:
        saving, durable = self.saving, self.config.durable
        assert saving is not None and durable is not None and saving.ending is not None and self.membership is not None
        unneeded = self._saving_unneeded()
        if unneeded:
            return unneeded
        stock = {
            i: {rank: self._usable(i, rank, generations) for rank, generations in held.items()}
            for i, held in saving.stock.items()
            if i in self.agents
        }
        own = {rank: x.incarnation for rank, x in enumerate(self.membership.members)}
        choice = plan.choose_to_write(len(own), stock, own, saving.failed_at)
        if isinstance(choice, str):
            if saving.ending.code == 75:
                return self._end_elsewhere(f"{saving.ending.reason}; ", choice)
            ending = replace(saving.ending, reason=f"{saving.ending.reason}; nothing was written: {choice}")
            return self._end_durable(ending) if self.durable_generation >= 0 else self._end(1, ending.reason, ending.failed)
        if choice.generation <= self.durable_generation:
            return self._end_durable(saving.ending)
        return self._write(choice.generation, choice.by, f"; {choice.reason}")

    def _write(self, generation: int, by: Mapping[int, str], why: str) -> list[Decision]:
        """Another attempt: each agent its files."""
        saving, durable = self.saving, self.config.durable
        assert saving is not None and durable is not None
        self.attempts += 1
        self.revision += 1  # an attempt's number, and so its folder, is used once, whoever decides
        saving.attempt, saving.generation, saving.by = self.attempts, generation, by
        saving.folder = str(Name(generation, self.config.run_id, self.version, self.attempts))
        saving.retry_s = saving.manifest_by = None
        saving.files.clear()
        out: list[Decision] = []
        for incarnation in dict.fromkeys(by.values()):
            ranks = tuple(rank for rank, who in by.items() if who == incarnation)
            training = saving.ending is None
            out.append(Send(incarnation, m.WriteSnapshots(self.attempts, generation, durable.root, saving.folder, ranks, training)))
        when = "when it is complete" if saving.ending is None else "now"
        text = f"generation {generation} is written to {durable.root}/{saving.folder} {when}{why}"
        return [*out, Log("save", text, {"generation": generation, "by": {str(rank): who for rank, who in by.items()}})]

    # ---- what agents say

    def _snapshot_written(self, incarnation: str, event: m.SnapshotWritten, now: float) -> list[Decision]:
        saving, durable = self.saving, self.config.durable
        if saving is None or durable is None or not saving.under_way(event.attempt):
            return []
        if saving.by.get(event.rank) != incarnation or saving.manifest_by is not None:
            return []
        assert saving.generation is not None
        saving.files[event.rank] = event.file
        if len(saving.files) < len(saving.by):
            return []
        saving.manifest_by = saving.by[0]
        files = tuple(file for _, file in sorted(saving.files.items()))
        order = m.WriteManifest(saving.attempt, saving.generation, durable.root, saving.folder, dict(durable.shape), files, durable.keep)
        return [Send(saving.manifest_by, order)]

    def _generation_whole(self, incarnation: str, event: m.GenerationWhole, now: float) -> list[Decision]:
        saving, durable = self.saving, self.config.durable
        if saving is None or durable is None or event.attempt != saving.attempt or incarnation != saving.manifest_by:
            return []
        assert saving.generation is not None
        self.durable_generation, self.durable_folder = saving.generation, saving.folder
        self.revision += 1
        self.save_text = f"generation {saving.generation} is durable: {durable.root}/{saving.folder}"
        removed = f"; removed {', '.join(event.removed)}" if event.removed else ""
        data = {"generation": saving.generation, "folder": saving.folder, "removed": event.removed}
        log = Log("durable", self.save_text + removed, data)
        self.save_wanted = False
        if saving.ending is None:
            self.saving = None
            return [log]
        return [log, *(self._saving_unneeded() or self._end_durable(saving.ending))]

    def _end_elsewhere(self, begin: str, why: str) -> list[Decision]:
        """The job ends since no memory has what it could go on from. Code 75 if a file has it: what is durable, or a checkpoint."""
        durable = self.config.durable
        reason = f"{begin}no memory has anything to go back to: {why}"
        if self.durable_generation >= 0:
            return self._end_durable(Ending(75, reason))
        if durable is not None and durable.checkpoints:
            return self._end(75, f"{reason}; the same command goes on from Megatron's newest checkpoint in {durable.checkpoints}")
        return self._end(1, f"{begin}nothing to go back to: {why}")

    def _end_durable(self, ending: Ending) -> list[Decision]:
        """The job ends, and goes on from its newest durable generation when it is started again."""
        assert self.config.durable is not None
        self.saving = None
        where = f"{self.config.durable.root}/{self.durable_folder}"
        text = f"{ending.reason}; generation {self.durable_generation} is durable in {where}, and the same command goes on from it"
        return self._end(ending.code, text, ending.failed)

    def _write_failed(self, incarnation: str, event: m.WriteFailed, now: float) -> list[Decision]:
        saving = self.saving
        if saving is None or not saving.under_way(event.attempt):
            return []
        what = f"generation {saving.generation}, " + ("its manifest" if event.rank is None else f"rank {event.rank}")
        where = self.agents[incarnation].node
        generation = saving.generation
        assert generation is not None
        log = Log("write-failed", f"{what}, was not written by {where}: {event.text}", {"generation": saving.generation, "why": event.why})
        if event.why == "damaged" and event.rank is not None:
            self.commits.damage(incarnation, event.rank, generation)
        if event.why == "gone":
            saving.lead_steps *= 2
        if event.why == "medium":
            saving.failed_at.add(incarnation)
        saving.failures += 1
        if saving.failures >= TRIES_MAX:
            return [log, *(self._saving_unneeded() or self._give_up_writing(event.text))]
        wait_s = _RETRY_FIRST_S * 2.0 ** (saving.failures - 1) if event.why == "medium" else 0.0
        saving.retry_s, saving.generation = now + wait_s, None
        return [log]

    def _give_up_writing(self, text: str) -> list[Decision]:
        """The job goes on, or ends in words that say what was not written."""
        saving, durable = self.saving, self.config.durable
        assert saving is not None and durable is not None
        self.saving, self.save_wanted = None, False
        failed = f"generation {saving.generation} was not written to {durable.root}, tried {saving.failures} times: {text}"
        if saving.ending is None:
            self.save_text = failed
            return [Log("save-failed", f"{failed}; training goes on, ask again when that is mended", {"generation": saving.generation})]
        there = f"durable generation {self.durable_generation}" if self.durable_generation >= 0 else "Megatron's checkpoint"
        return self._end(saving.ending.code, f"{saving.ending.reason}; {failed}; what is left is {there}", saving.ending.failed)

    # ---- time passes, and things break meanwhile

    def _go_on_saving(self, now: float) -> list[Decision]:
        """Call at every tick."""
        saving = self.saving
        if saving is None:
            return self._save_if_wanted(now)
        if saving.ending is None:
            return self._aim() if saving.retry_s is not None and now >= saving.retry_s else []
        if saving.retry_s is not None:
            return self._take_stock(now) if now >= saving.retry_s else []
        if saving.generation is None:
            stocked = self.agents.keys() <= saving.stock.keys() or now > saving.stock_due_s
            return self._choose_to_write() if stocked else []
        gone = {*saving.by.values(), *([saving.manifest_by] if saving.manifest_by else [])} - self.agents.keys()
        return self._take_stock(now) if gone else []

    def _saving_halted(self, now: float) -> list[Decision]:
        """Everyone is halted (again), which ends what was being written: agents hear of the halt first."""
        saving = self.saving
        if saving is None:
            return []
        if saving.ending is not None:
            return self._take_stock(now)
        self.saving = None  # still wanted
        text = f"generation {saving.generation} is not written now; another one is, once the job trains again"
        return [Log("save", text, {"phase": self.phase.value, "generation": saving.generation})]

    def _saving_void(self, generation: int) -> list[Decision]:
        """A generation that some rank has skipped will not come."""
        wanted = self.saving is not None and self.saving.ending is None and self.saving.retry_s is None
        return self._aim() if wanted and self.saving is not None and self.saving.generation == generation else []

    def _saving_unneeded(self) -> list[Decision]:
        """Spares came after all: the job does not end."""
        wanted = self.saving is not None and self.saving.ending is not None and self.saving.ending.for_want_of_spares
        if not wanted or self._vacant():
            return []
        self.saving = None
        text = "a spare has come: the job goes on, and what was being written is not needed"
        return [Log("save", text, {"phase": self.phase.value, "version": self.version})]
