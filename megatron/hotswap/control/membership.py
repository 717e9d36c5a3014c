"""Who is in the job: agents as the coordinator knows them, and how ranks are laid onto nodes. Pure."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

from ..errors import UsageError
from ..replication.placement import Holders, keeps_rules, place, survival
from .config import ControlConfig
from .decisions import Log
from .messages import PROTOCOL, Join, Member, Membership

#: In a line for people; the line's data names all.
_NODES_NAMED_MAX = 32


@dataclass
class Agent:
    """One life of one agent. `ranks[i]` is the rank of worker i, or None while it is a spare."""

    join: Join
    last_heard_s: float
    answered_s: float = float("-inf")  # when its heartbeat was last answered
    stores: dict[int, str] = field(default_factory=dict)  # worker -> unused rendezvous store
    ready: set[int] = field(default_factory=set)  # workers that are warm
    ranks: list[int | None] = field(default_factory=list)
    due_s: dict[int, float] = field(default_factory=dict)  # worker that is being started again -> by when it must be warm
    failed: set[int] = field(default_factory=set)  # workers that failed in recovery `failed_in`, counted from 0
    failed_in: int | None = None
    failed_s: float | None = None  # when a worker last failed
    unhealthy: dict[str, str] = field(default_factory=dict)  # source -> what it says is wrong with the node
    leaving: str = ""  # why a spare has taken its ranks although it lives: its memory is a source until the recovery is complete
    left: dict[int, tuple[int, ...]] = field(default_factory=dict)  # rank that it had -> generations in its own slots
    left_ranks: frozenset[int] = frozenset()
    left_dead: frozenset[int] = frozenset()  # of these, whose process is gone or stuck: its agent tells what it has left
    left_up_to: int | None = None  # what it has of later generations is not of the course that training has taken without it

    @property
    def incarnation(self) -> str:
        """The identity of this life."""
        return self.join.incarnation

    @property
    def node(self) -> str:
        """The host."""
        return self.join.node

    @property
    def domain(self) -> str:
        """What fails together with the node."""
        return self.join.domain or self.join.node

    @cached_property
    def order(self) -> tuple[list[tuple[int, int | str]], str]:
        """By node name, numbers in it compared as numbers, so that node2 comes before node10."""
        parts: list[tuple[int, int | str]] = [(0, int(p)) if p.isdigit() else (1, p) for p in re.split(r"(\d+)", self.node)]
        return parts, self.incarnation

    @property
    def warm(self) -> bool:
        """Whether all its workers wait for a rank."""
        return len(self.ready) == self.join.workers

    @property
    def spare(self) -> bool:
        """Whether it holds no rank."""
        return all(rank is None for rank in self.ranks)

    @property
    def free(self) -> bool:
        """Whether it can take ranks now."""
        return self.warm and self.spare and not self.unhealthy and not self.leaving

    @property
    def state(self) -> str:
        """What it does, in a word: holds ranks ("active"), is a warm "spare", is "starting", or "unhealthy" and so gets no ranks."""
        if not self.spare:
            return "active"
        return "unhealthy" if self.unhealthy or self.leaving else "spare" if self.warm else "starting"

    def leave(self, why: str, own: Mapping[int, tuple[int, ...]]) -> None:
        """It has no ranks any more, though it lives; `own` is what it is known to have of them."""
        self.leaving = why
        self.left_ranks = frozenset(rank for rank in self.ranks if rank is not None)
        self.left_dead = frozenset(rank for worker in self.due_s if (rank := self.ranks[worker]) is not None)
        self.ranks = [None] * self.join.workers
        self.due_s.clear()
        self.left |= own

    def start_again(self, worker: int, due_s: float) -> int | None:
        """The worker's process is gone, and another must be warm by then; returns the rank that it has, if any."""
        self.ready.discard(worker)
        self.stores.pop(worker, None)
        self.due_s[worker] = due_s
        return self.ranks[worker]

    def member(self, worker: int) -> Member:
        """The entry of one of its workers in a membership."""
        return Member(self.node, self.incarnation, worker, self.join.h2h)


def one_per_node(agents: Iterable[Agent]) -> list[Agent]:
    """In order, and of each node only one: a node that came back may be here twice until its former life is given up."""
    by_node: dict[str, Agent] = {}
    for agent in sorted(agents, key=lambda agent: agent.order):
        by_node.setdefault(agent.node, agent)
    return list(by_node.values())


def give_ranks(agents: Iterable[Agent]) -> list[Member]:
    """Ranks onto nodes in order, to the workers of each; returns the member of each rank."""
    members: list[Member] = []
    for agent in agents:
        for worker in range(agent.join.workers):
            agent.ranks[worker] = len(members)
            members.append(agent.member(worker))
    return members


def place_again(config: ControlConfig, membership: Membership, agents: Mapping[str, Agent]) -> tuple[Holders, str]:
    """Holders after spares have taken ranks, and what is worse than asked for, in words.

    They stay where they are as long as that keeps the rules: then no replica moves but those of the node that was lost.
    """
    nodes = [x.node for x in membership.members]
    domains = [agents[x.incarnation].domain for x in membership.members]
    if keeps_rules(membership.holders, nodes, domains):
        return membership.holders, ""
    try:
        return place(config.grid, nodes, config.replicas, domains), ""
    except UsageError as impossible:  # better a replica on another node of the same domain than none
        text = f"replicas are placed on other nodes only, until nodes of more failure domains are here: {impossible}"
        return place(config.grid, nodes, config.replicas), text


def start_log(nodes: Sequence[str], spares: Sequence[str], holders: Holders, domains: Sequence[str]) -> Log:
    """The start-up summary: where the ranks are, and which losses leave a copy of everything."""
    survived = survival(holders, nodes, domains)
    used = list(dict.fromkeys(nodes))
    where = used if len(used) <= _NODES_NAMED_MAX else f"{len(used)} nodes, {used[0]} to {used[-1]}"
    reason = f"{len(nodes)} ranks on {where}, spares {spares}; {survived.in_words()}"
    return Log("start", reason, {"nodes": used, "spares": spares, "holders": holders, "survival": asdict(survived)})


def refusal_of(event: Join, config: ControlConfig) -> str:
    """Why an agent may not join, in words; empty if it may."""
    if event.protocol != PROTOCOL:
        return f"protocol {PROTOCOL} is spoken here, node {event.node} speaks {event.protocol}; install the same version"
    if not hmac.compare_digest(event.token.encode(), config.token.encode()):
        return f"node {event.node} does not have this job's token"
    if event.run_id != config.run_id:
        return f"this is run {config.run_id!r}, node {event.node} belongs to run {event.run_id!r}"
    if event.workers != config.ranks_per_node:
        return (
            f"every node of this job has {config.ranks_per_node} workers, node {event.node} has {event.workers}; "
            "start it with the same --ranks-per-node"
        )
    return ""
