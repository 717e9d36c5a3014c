"""From the first node to the first step: who trains, who is a spare, and what training begins from. Pure.

Where there is a durable generation to go on from, the agents fill their ranks' slots from its files before anybody is told to start
(phase LOADING). What is damaged is found by then, and an older generation can be taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import UsageError
from ..recovery.plan import DurableFolder
from ..replication import placement
from . import messages as m
from .decisions import Decision, Log, Send
from .health import Health
from .membership import Agent, give_ranks, one_per_node, start_log
from .phases import Phase

#: How often it is said whom the job waits for.
_SAID_EVERY_S = 30.0
#: Looking at every agent whenever one more is warm would take minutes where thousands gather: it is done when enough have come for
#: another line, or for the start, and once in so many seconds.
_LINES_WAITING = 16
_LOOK_EVERY_S = 1.0


@dataclass
class Loading:
    """A durable generation on its way into the slots of a membership that has not begun."""

    membership: m.Membership
    source: DurableFolder
    loaded: set[str] = field(default_factory=set)
    said_s: float = 0.0


class Starting(Health):
    """Control (state.py) calls it with the events."""

    loading: Loading | None = None
    tried = 0  # durable generations that could not be loaded
    _look_after = 0  # as many agents more that are warm
    _looked_s = float("-inf")

    def _one_more_is_warm(self, now: float) -> list[Decision]:
        self._look_after -= 1
        return self._gather(now)

    def _gather(self, now: float) -> list[Decision]:
        """Call at every tick while nodes gather."""
        return self._try_start(now) if self._look_after <= 0 or now - self._looked_s >= _LOOK_EVERY_S else []

    def _try_start(self, now: float) -> list[Decision]:
        warm = one_per_node(a for a in self.agents.values() if a.warm and not a.unhealthy)
        missing = self.config.nodes - len(warm)
        self._look_after, self._looked_s = min(missing, max(1, self.config.nodes // _LINES_WAITING)), now
        if missing > 0:
            said = f"{len(warm)} of {self.config.nodes} nodes are ready"
            if said == self.said_waiting:
                return []
            self.said_waiting = said
            return [Log("waiting", said, {"ready": [agent.node for agent in warm]})]
        self.gathered_s = now if self.gathered_s is None else self.gathered_s
        if len(warm) < self.config.nodes + self.config.spares and now - self.gathered_s < self.config.settle_s:
            return []
        members = give_ranks(warm[: self.config.nodes])
        nodes = [member.node for member in members]
        domains = [self.agents[x.incarnation].domain for x in members]
        try:
            holders = placement.place(self.config.grid, nodes, self.config.replicas, domains)
        except UsageError as impossible:  # nothing is lost yet: the user can start it better
            return self._end(2, str(impossible))
        self.version += 1
        membership = m.Membership(self.version, tuple(members), holders)
        begin = self.config.durable.begin[self.tried :] if self.config.durable is not None else ()
        return self._load(membership, begin[0], now) if begin else self._start(membership, None)

    def _load(self, membership: m.Membership, source: DurableFolder, now: float) -> list[Decision]:
        assert self.config.durable is not None
        self._enter(Phase.LOADING)
        self.loading = Loading(membership, source, said_s=now)
        ranks: dict[str, dict[int, int]] = {}
        for rank, member in enumerate(membership.members):
            ranks.setdefault(member.incarnation, {})[member.worker] = rank
        root = self.config.durable.root
        text = f"generation {source.generation} of run {source.run_id} is read from {root}/{source.folder}"
        log = Log("loading", text, {"generation": source.generation, "run": source.run_id, "folder": source.folder})
        return [*(Send(i, m.Load(self.version, root, source.folder, held)) for i, held in ranks.items()), log]

    def _loaded(self, incarnation: str, event: m.Loaded, now: float) -> list[Decision]:
        loading, durable = self.loading, self.config.durable
        if loading is None or durable is None or (event.version, event.folder) != (self.version, loading.source.folder):
            return []
        node = self.agents[incarnation].node
        if event.unseen:
            text = (
                f"node {node} does not see the durable generation that this job is to go on from ({event.refusal}), though the coordinator "
                "does: --save must be on a file system that all nodes share; mount it there, or start without that node"
            )
            return self._end(2, text)
        if event.refusal:
            return self._load_refused(node, event.refusal)
        loading.loaded.add(incarnation)
        if {x.incarnation for x in loading.membership.members} - loading.loaded:
            return []
        return self._start(loading.membership, loading.source.generation)

    def _load_refused(self, node: str, refusal: str) -> list[Decision]:
        assert self.loading is not None and self.config.durable is not None
        log = Log("durable-refused", f"node {node}: {refusal}", {"node": node, "generation": self.loading.source.generation})
        self.tried += 1
        if self.tried < len(self.config.durable.begin):
            return [log, *self._gather_again("an older durable generation is taken instead")]
        text = (
            f"no durable generation can be gone on from: {refusal}; to begin from Megatron's own, older checkpoint (or anew), move the "
            f"generations in {self.config.durable.root} away"
        )
        return [log, *self._end(2, text)]

    def _gather_again(self, why: str) -> list[Decision]:
        """The membership that was to be loaded is not to be: nobody has a rank."""
        assert self.loading is not None and self.config.durable is not None
        self._enter(Phase.GATHERING)
        root, folder = self.config.durable.root, self.loading.source.folder
        out: list[Decision] = []
        for incarnation in dict.fromkeys(x.incarnation for x in self.loading.membership.members):
            if incarnation in self.agents:
                agent = self.agents[incarnation]
                agent.ranks = [None] * agent.join.workers
                out.append(Send(incarnation, m.Load(self.version, root, folder, {})))
        self.loading = None
        return [*out, Log("waiting", why, {"folder": folder, "here": [agent.node for agent in self.agents.values()]})]

    def _go_on_loading(self, now: float) -> list[Decision]:
        """Call at every tick."""
        if self.loading is None or self.phase is not Phase.LOADING:
            return []
        members = dict.fromkeys(x.incarnation for x in self.loading.membership.members)
        if not members.keys() <= self.agents.keys():
            return self._gather_again("a node was lost before training began")
        if now - self.loading.said_s < _SAID_EVERY_S:
            return []
        self.loading.said_s = now
        slow = [self.agents[i].node for i in members if i not in self.loading.loaded]
        return [Log("waiting", f"{slow} still read generation {self.loading.source.generation}", {"waited_for": slow})]

    def _start(self, membership: m.Membership, generation: int | None) -> list[Decision]:
        self.membership, self.loading = membership, None
        self._enter(Phase.TRAINING)
        self.base = generation or 0
        if generation is not None:
            self.commits.begin_again(generation)
            self.newest_step, self.durable_generation = generation, generation
            self.durable_folder = self.config.durable.begin[self.tried].folder if self.config.durable is not None else ""
        active: list[Agent] = [self.agents[i] for i in dict.fromkeys(x.incarnation for x in membership.members)]
        start = self.start = m.Start(membership, active[0].stores.pop(0), generation)
        spares = [a.node for a in one_per_node(a for a in self.agents.values() if a.warm and a.spare)]
        domains = [self.agents[x.incarnation].domain for x in membership.members]
        log = start_log([x.node for x in membership.members], spares, membership.holders, domains)
        if generation is not None:
            log = Log(log.kind, f"{log.reason}; from durable generation {generation}", {**log.data, "generation": generation})
        return [*(Send(a.incarnation, start) for a in active), log]
