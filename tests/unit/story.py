"""Reads a scenario, feeds the control core, and writes down what it decides. See tests/unit/scenarios/*.txt.

A scenario is commands, each a line; the decisions that follow it are indented below it. Ranks and nodes are looked up in the
membership, so a command says who in the story does something, not which message it is.
"""

from __future__ import annotations

import shlex
from typing import Any, Literal

from megatron.hotswap.control import decided
from megatron.hotswap.control import messages as m
from megatron.hotswap.control.config import Durable
from megatron.hotswap.control.restarting import control_of
from megatron.hotswap.control.state import Control, ControlConfig, Log, Send
from megatron.hotswap.recovery.plan import DurableFolder
from megatron.hotswap.topology.grid import Grid

RUN_ID, TOKEN = "run-1", "secret"


class Story:
    """One job's control core, and the clock of the story."""

    def __init__(self) -> None:
        self.control: Control
        self.now = 0.0
        self.lives: dict[str, str] = {}  # node -> its present incarnation
        self.progress: dict[int, m.Progress] = {}
        self._recorded, self._recorded_at = b"", -1  # as the coordinator does, when its revision has changed
        self.count = 0  # of phases that were entered

    def play(self, text: str) -> str:
        """The scenario with the decisions written (anew) below each command."""
        out = []
        for line in text.splitlines():
            if line.startswith("    ") and line.strip():
                continue
            out.append(line)
            if line.strip() and not line.startswith("#"):
                out += [f"    {self._words(d)}" for d in self._command(line)]
        return "\n".join(out) + "\n"

    def _command(self, line: str) -> list[Any]:
        verb, *words = shlex.split(line)
        options = dict(w.split("=", 1) for w in words if "=" in w)
        plain = [w for w in words if "=" not in w]
        decisions = getattr(self, "do_" + verb.replace("-", "_"))(*plain, **{k.replace("-", "_"): v for k, v in options.items()}) or []
        if self.control.revision != self._recorded_at:
            self._recorded_at = self.control.revision
            self._recorded = decided.encode(self.control.decided)
        return decisions

    def _handle(self, incarnation: str, event: Any) -> list[Any]:
        return self.control.handle(incarnation, event, self.now)

    def _member(self, rank: str) -> m.Member:
        assert self.control.membership is not None
        return self.control.membership.members[int(rank)]

    # ---- commands

    def do_job(
        self,
        nodes: str = "2",
        per_node: str = "1",
        spares: str = "1",
        tensor: str = "1",
        replicas: str = "1",
        save: str = "",
        durable: str = "",
        interval: str = "1",
        window: str = "600",
        failures: str = "3",
        on_failure: Literal["swap", "restart"] = "swap",
        last: str = "",
        checkpoints: str = "",
    ) -> None:
        """The job's shape. Leases of 3 s, halts of 30 s, resumes of 120 s, spares are waited for 60 s. `save` is where durable generations
        go, `durable` those that it goes on from: GENERATION,GENERATION. `window` is that of respawns, `failures` of a node put it into
        quarantine. `on_failure`: what follows a loss. `last`: the spare that is taken last. `checkpoints`: where
        Megatron's own are."""
        grid = Grid(int(nodes) * int(per_node), int(tensor))
        shape = {"world-size": grid.world_size}
        begin = tuple(DurableFolder(f"folder{g}", int(g), "run-0", tuple(shape.items())) for g in durable.split(",") if g)
        self.control = control_of(
            ControlConfig(
                RUN_ID,
                TOKEN,
                grid,
                int(nodes),
                int(spares),
                replicas=int(replicas),
                interval=int(interval),
                respawn_window_s=float(window),
                quarantine_failures=int(failures),
                durable=Durable(save, shape, begin=begin, checkpoints=checkpoints) if save else None,
                on_failure=on_failure,
                taken_last=(last,) if last else (),
            )
        )

    def do_time(self, now: str) -> list[Any]:
        """Time passes, the living agents' heartbeats are heard; the coordinator's timer goes off every quarter of a second."""
        out: list[Any] = []
        while self.now < float(now):
            self.now = min(float(now), self.now + 0.25)
            for agent in list(self.control.agents.values()):
                if agent.incarnation not in self.silent:
                    self._handle(agent.incarnation, m.Heartbeat(0, {r: self.progress[r] for r in agent.ranks if r in self.progress}))
            out += self.control.tick(self.now)
        return out

    silent: frozenset[str] = frozenset()

    def do_at(self, step: str, phase: str, *ranks: str) -> None:
        """These ranks have entered a phase of a step; their agents' next heartbeats say so."""
        self.count += 1
        self.progress |= {int(r): m.Progress(int(step), m.Progress.number(phase), self.count) for r in ranks}

    def do_steps(self, first: str, last: str, seconds: str = "1.0") -> list[Any]:
        """Steps complete one after another, each in so many seconds; all ranks come along."""
        out: list[Any] = []
        ranks = range(self.control.config.grid.world_size)
        for step in range(int(first), int(last) + 1):
            self.do_at(str(step), "forward", *map(str, ranks))
            out += self.do_time(str(self.now + float(seconds)))
            record = m.StepRecord(step, self.control.version, 0, float(seconds), 0.0, {}, None)
            out += self._handle(self._member(str(ranks[-1])).incarnation, m.StepDone(record))
        return out

    def do_silence(self, *nodes: str) -> None:
        """These nodes say nothing any more; their connections stay open."""
        self.silent |= {self.lives[n] for n in nodes}

    def do_join(
        self,
        node: str,
        life: str = "1",
        token: str = TOKEN,
        run: str = RUN_ID,
        protocol: str = "",
        workers: str = "",
        domain: str = "",
        unhealthy: str = "",
    ) -> list[Any]:
        """An agent's first message."""
        incarnation = f"{node}.{life}"
        self.lives[node] = incarnation
        count = int(workers) if workers else self.control.config.ranks_per_node
        speaks = int(protocol) if protocol else m.PROTOCOL
        return self._handle(incarnation, m.Join(speaks, run, token, node, incarnation, count, f"{incarnation}:h2h", domain, unhealthy))

    def do_warm(self, *nodes: str) -> list[Any]:
        """Every worker of these nodes is warm."""
        return [
            d
            for n in nodes
            for w in range(self.control.config.ranks_per_node)
            for d in self._handle(self.lives[n], m.WorkerReady(w, f"{self.lives[n]}:store{w}"))
        ]

    def do_up(self, *nodes: str, domain: str = "") -> list[Any]:
        """Join and warm."""
        out: list[Any] = []
        for node in nodes:
            out += self.do_join(node, domain=domain)
        return out + self.do_warm(*nodes)

    def do_closed(self, *nodes: str) -> list[Any]:
        """The connections of these nodes close."""
        return [d for n in nodes for d in self._handle(self.lives[n], m.AgentLost("its connection closed"))]

    def do_worker_lost(self, node: str, evidence: str, worker: str = "0") -> list[Any]:
        """A worker of the node died."""
        return self._handle(self.lives[node], m.WorkerLost(int(worker), evidence))

    def do_up_again(self, node: str, worker: str = "0") -> list[Any]:
        """The process that was started in a worker's place is warm."""
        return self._handle(self.lives[node], m.WorkerReady(int(worker), f"{self.lives[node]}:store{worker}-again"))

    def do_stepped(self, step: str, rank: str = "0") -> list[Any]:
        """The rank that logs has done a step."""
        record = m.StepRecord(int(step), self.control.version, 0, 0.1, 0.0, {}, None)
        return self._handle(self._member(rank).incarnation, m.StepDone(record))

    def do_acknowledged(self, generation: str, *ranks: str, version: str = "") -> list[Any]:
        """Holders have a generation of these ranks."""
        v = int(version) if version else self.control.version
        return [d for r in ranks for d in self._handle(self._member(r).incarnation, m.Acknowledged(int(r), int(generation), v))]

    def do_skipped(self, generation: str, rank: str, version: str = "") -> list[Any]:
        """A rank does not take a generation, since the one before is late."""
        v = int(version) if version else self.control.version
        return self._handle(self._member(rank).incarnation, m.Skipped(int(rank), int(generation), v))

    def do_damaged(self, generation: str, rank: str, node: str, version: str = "") -> list[Any]:
        """A rank's agent could not use the copy that the node has."""
        v = int(version) if version else self.control.version
        return self._handle(
            self._member(rank).incarnation, m.CopyDamaged(int(rank), int(generation), v, self.lives[node], "the checksum does not match")
        )

    def do_halted(self, *ranks: str, done: str = "", own: str = "", between: str = "no", version: str = "") -> list[Any]:
        """These ranks are out of their step."""
        v = int(version) if version else self.control.version - 1
        has = tuple(int(g) for g in own.split(",") if g)
        return [
            d
            for r in ranks
            for d in self._handle(
                self._member(r).incarnation,
                m.HaltReport(v, int(r), int(done) if done else None, between == "yes", has, f"rank{r}:store"),
            )
        ]

    def do_replicas(self, node: str, *held: str, version: str = "") -> list[Any]:
        """What the node's agent holds for others: RANK:GENERATION,GENERATION."""
        v = int(version) if version else self.control.version - 1
        replicas = {int(x.split(":")[0]): tuple(int(g) for g in x.split(":")[1].split(",")) for x in held}
        return self._handle(self.lives[node], m.ReplicaReport(v, replicas))

    def do_restored(self, *ranks: str, version: str = "", checkpoint: str = "") -> list[Any]:
        """These ranks have their state: from memory, or from Megatron's checkpoint of a step."""
        v = int(version) if version else self.control.version
        read = int(checkpoint) if checkpoint else None
        said = [m.Restored(v, int(r), 0.25, 0.5, 1000, 1, generation=read) for r in ranks]
        return [d for restored in said for d in self._handle(self._member(str(restored.rank)).incarnation, restored)]

    def do_first_step(self, *ranks: str) -> list[Any]:
        """These ranks have done a step."""
        return [d for r in ranks for d in self._handle(self._member(r).incarnation, m.FirstStep(self.control.version, int(r)))]

    def do_error(self, rank: str, text: str, step: str = "8", collective: str = "yes", version: str = "") -> list[Any]:
        """A rank's training thread caught an exception."""
        v = int(version) if version else self.control.version
        return self._handle(self._member(rank).incarnation, m.WorkerError(int(rank), v, int(step), collective == "yes", text))

    def do_finished(self, *ranks: str, code: str = "0", text: str = "") -> list[Any]:
        """These ranks came to the end of their script."""
        return [d for r in ranks for d in self._handle(self._member(r).incarnation, m.Finished(0, int(r), int(code), text))]

    def do_could_not_begin(self, node: str, text: str) -> list[Any]:
        """A worker of a node that has no rank yet ended with words."""
        return self._handle(self.lives[node], m.Finished(0, None, 2, text))

    def do_inject(self, node: str, worker: str = "0", step: str = "", action: str = "kill") -> list[Any]:
        """A user asks for a fault."""
        scope: Any = "worker" if action in m.WORKER_FAULTS else "node"
        return self._handle("", m.Inject(m.Injection(action, scope, node, int(worker), int(step) if step else None)))  # type: ignore[arg-type]

    def do_unhealthy(self, node: str, reason: str, source: str = "command", fatal: str = "yes") -> list[Any]:
        """The node's health command, or its device, says that something is wrong."""
        return self._handle(self.lives[node], m.Unhealthy(source, reason, fatal == "yes"))  # type: ignore[arg-type]

    def do_left(self, node: str, rank: str, own: str = "") -> list[Any]:
        """The worker that had the rank on a node that leaves is out of its step."""
        report = m.HaltReport(self.control.version - 1, int(rank), None, False, tuple(int(g) for g in own.split(",") if g), "store")
        return self._handle(self.lives[node], report)

    def do_healthy(self, node: str, source: str = "command") -> list[Any]:
        """It says so no more."""
        return self._handle(self.lives[node], m.HealthyAgain(source))  # type: ignore[arg-type]

    def do_release(self, node: str) -> list[Any]:
        """A user lets a node out of quarantine."""
        return self._handle("", m.Release(node))

    # ---- the coordinator is lost

    def do_coordinator_lost(self, seconds: str = "1.0") -> None:
        """Another one takes up what was recorded, so much later."""
        self.now += float(seconds)
        self.control = Control(self.control.config, decided.decode(self._recorded), self.now)

    def do_back(self, *nodes: str, version: str = "", halted: str = "no", unknown: str = "") -> list[Any]:
        """The nodes' agents have found it. `unknown`: workers whose process does not know its rank."""
        c = self.control
        members = c.membership.members if c.membership is not None else ()
        out: list[Any] = []
        for n in nodes:
            life = self.lives[n]
            ranks = {x.worker: r for r, x in enumerate(members) if x.incarnation == life and str(x.worker) not in unknown.split(",")}
            join = m.Join(m.PROTOCOL, RUN_ID, TOKEN, n, life, c.config.ranks_per_node, f"{life}:h2h", "")
            out += self._handle(life, m.Rejoin(join, int(version) if version else c.version, ranks, halted == "yes", 1.0))
        return out

    # ---- durable generations

    def do_save(self) -> list[Any]:
        """A user asks for one."""
        return self._handle("", m.SaveWanted())

    def do_stock(self, node: str, *held: str, version: str = "") -> list[Any]:
        """What the node's agent could write: RANK:GENERATION,GENERATION."""
        v = int(version) if version else self.control.version
        stock = {int(x.split(":")[0]): tuple(int(g) for g in x.split(":")[1].split(",")) for x in held}
        return self._handle(self.lives[node], m.Stock(v, stock))

    def do_written(self, node: str, *ranks: str, attempt: str = "") -> list[Any]:
        """The node's agent has written the files of these ranks."""
        a = int(attempt) if attempt else self.control.attempts
        files = [(int(r), m.DurableFile(5000 + int(r), int(r), "00" * 32)) for r in ranks]
        return [d for rank, file in files for d in self._handle(self.lives[node], m.SnapshotWritten(a, rank, file))]

    def do_whole(self, node: str, attempt: str = "") -> list[Any]:
        """The node's agent has written the manifest."""
        return self._handle(self.lives[node], m.GenerationWhole(int(attempt) if attempt else self.control.attempts, ("older",)))

    def do_not_written(self, node: str, text: str, rank: str = "", why: str = "medium", attempt: str = "") -> list[Any]:
        """The node's agent could not write a file, or the manifest."""
        a = int(attempt) if attempt else self.control.attempts
        return self._handle(self.lives[node], m.WriteFailed(a, int(rank) if rank else None, why, text))  # type: ignore[arg-type]

    def do_loaded(self, *nodes: str, refusal: str = "", unseen: str = "no") -> list[Any]:
        """The nodes' agents have filled their slots, or could not."""
        c = self.control
        folder = c.loading.source.folder if c.loading is not None else "folder"
        return [d for n in nodes for d in self._handle(self.lives[n], m.Loaded(c.version, folder, refusal, unseen == "yes"))]

    def do_beat(self, incarnation: str) -> list[Any]:
        """A heartbeat of a certain life of a node."""
        return self._handle(incarnation, m.Heartbeat(1))

    def do_state(self) -> list[str]:
        """Show phase, version, who holds which rank, committed generation, exit code."""
        c = self.control
        ranks = {} if c.membership is None else {r: x.incarnation for r, x in enumerate(c.membership.members)}
        return [f"{c.phase.value}, version {c.version}, ranks {ranks}, committed {c.committed}, exit {c.exit_code}"]

    # ---- decisions in words

    @staticmethod
    def _words(decision: Any) -> str:
        if isinstance(decision, Log):
            return f"log {decision.kind}: {decision.reason}"
        if not isinstance(decision, Send):
            return str(decision)
        x, to = decision.message, f"-> {decision.incarnation}"
        if isinstance(x, m.Start):
            holders = [held[0] if len(held) == 1 else held for held in x.membership.holders]
            return f"{to} Start version {x.membership.version}, holders {holders}, store {x.store}"
        if isinstance(x, m.Resume):
            members = [y.incarnation for y in x.membership.members]
            sources = {r: [s.incarnation for s in each] for r, each in x.sources.items()}
            return (
                f"{to} Resume version {x.membership.version} from generation {x.generation}, members {members}, "
                f"sources {sources}, store {x.store}, redo sections {x.redo_sections}"
            )
        fields = ", ".join(str(getattr(x, name)) for name in x.__struct_fields__)
        return f"{to} {type(x).__name__}({fields})"
