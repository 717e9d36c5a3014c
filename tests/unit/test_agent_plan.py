"""agent/main.py: what an agent does with a plan."""

import asyncio
from types import SimpleNamespace
from unittest import mock

from megatron.hotswap.agent import local
from megatron.hotswap.agent.main import Agent
from megatron.hotswap.control import messages as m

MEMBERS = tuple(m.Member(f"node{rank // 2}", f"node{rank // 2}-a", rank % 2, "address") for rank in range(4))
PLAN = m.Resume(m.Membership(3, MEMBERS, ((2,), (3,), (0,), (1,))), 7, "store", {0: (m.Source("node1-a", "address"),)}, True, (0,))


class Replicator:
    """Finds no undamaged copy, and writes down what is sent to others."""

    def __init__(self):
        self.sent = []

    async def settled(self):
        pass

    async def fetch(self, worker, plan, reserve):
        return None

    def begin(self, worker, membership, generation, keep):
        self.sent.append((worker.rank, generation))


def test_where_every_source_is_damaged_the_agent_lives_on_and_its_other_ranks_too():
    """The coordinator makes another plan of what it was told. Nothing of this one is sent for the rank that has nothing."""
    agent = Agent.__new__(Agent)
    agent._replicator, agent._replicas = Replicator(), mock.Mock()
    has_it = SimpleNamespace(rank=1, generations={0: 7, 1: 8}, control=mock.Mock(get=lambda word: 8), empty=mock.Mock())
    agent._workers = [SimpleNamespace(rank=0, generations={}), has_it]
    told = []
    agent._tell = lambda worker, order: told.append((worker.rank, order))
    asyncio.run(agent._go_on(PLAN))
    assert [(rank, type(order)) for rank, order in told] == [(1, local.Plan)]
    has_it.empty.assert_called_once_with(1)
    assert agent._replicator.sent == [(1, 7)]
    assert agent._replicas.frozen is False
