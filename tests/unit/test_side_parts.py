"""The parts of the transports with side processes that need no library: the process manager for two, and the choice of a network."""

from __future__ import annotations

import asyncio
import socket

import pytest

from megatron.hotswap.errors import PeerFault
from megatron.hotswap.replication import pmi
from megatron.hotswap.replication.network import device_of, library_environment


class Client:
    """What MPI_Init does with PMI_FD."""

    def __init__(self, exchange):
        ours, self._theirs = socket.socketpair()
        self.served = asyncio.ensure_future(pmi.serve(self._theirs, exchange))
        self._sock = ours

    async def ask(self, line):
        reader, writer = self._streams
        writer.write(line.encode() + b"\n")
        return (await reader.readline()).decode().strip()

    async def __aenter__(self):
        self._streams = await asyncio.open_connection(sock=self._sock)
        return self

    async def __aexit__(self, *error):
        self._streams[1].close()
        await asyncio.wait([self.served])
        self._theirs.close()


def exchanges():
    """Two ends that swap what they say, as two agents do."""
    said = (asyncio.Queue(), asyncio.Queue())

    def end(index):
        async def swap(blob):
            said[index].put_nowait(blob)
            return await said[1 - index].get()

        return swap

    return end(0), end(1)


def test_two_processes_see_after_the_barrier_what_both_have_put():
    async def scene():
        one, other = exchanges()
        async with Client(one) as a, Client(other) as b:
            assert await a.ask("cmd=init pmi_version=1 pmi_subversion=1") == "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1"
            await a.ask("cmd=put kvsname=x key=addr-0 value=tcp://a:1=2")
            await b.ask("cmd=put kvsname=x key=addr-1 value=tcp://b")
            assert "key_not_found" in await a.ask("cmd=get kvsname=x key=addr-1")
            both = await asyncio.gather(a.ask("cmd=barrier_in"), b.ask("cmd=barrier_in"))
            assert both == ["cmd=barrier_out rc=0"] * 2
            assert await a.ask("cmd=get kvsname=x key=addr-1") == "cmd=get_result rc=0 msg=success value=tcp://b"
            assert await b.ask("cmd=get kvsname=x key=addr-0") == "cmd=get_result rc=0 msg=success value=tcp://a:1=2"

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_the_two_are_told_that_they_are_on_different_nodes_and_links_do_not_share_a_name():
    """Else MPI makes shared memory, with a name that several links of a node have in common."""

    async def scene():
        one, other = exchanges()
        async with Client(one) as a, Client(other) as b:
            assert "(vector,(0,2,1))" in await a.ask("cmd=get kvsname=x key=PMI_process_mapping")
            assert await a.ask("cmd=get_my_kvsname") != await b.ask("cmd=get_my_kvsname")

    asyncio.run(asyncio.wait_for(scene(), 30))


@pytest.mark.parametrize("line", ["cmd=spawn nprocs=2", "noise", "cmd=put kvsname=x", "x" * 70000], ids=["spawn", "noise", "put", "long"])
def test_what_a_world_of_two_does_not_have_is_refused(line):
    async def scene():
        one, _ = exchanges()
        async with Client(one) as a:
            a._streams[1].write(line.encode() + b"\n")
            with pytest.raises(PeerFault):
                await a.served

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_the_device_of_an_address():
    assert device_of("127.0.0.1") == "lo"
    assert device_of("203.0.113.9") is None


def test_a_library_is_held_to_an_interface_only_where_one_was_chosen_and_the_users_word_stands(monkeypatch):
    for name in ("UCX_NET_DEVICES", "UCX_TLS", "FI_TCP_IFACE"):
        monkeypatch.delenv(name, raising=False)
    assert "UCX_NET_DEVICES" not in library_environment(None)
    assert library_environment("127.0.0.1")["UCX_NET_DEVICES"] == "lo"
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_7:1")
    assert "UCX_NET_DEVICES" not in library_environment("127.0.0.1")
