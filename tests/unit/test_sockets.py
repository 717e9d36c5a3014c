"""Which sockets this process has."""

from __future__ import annotations

import os
import socket

from deadpool_ext import open_sockets
from megatron.hotswap.topology.sockets import shut_down


def test_sockets_are_found_by_descriptor_and_inode_and_nothing_else_is() -> None:
    before = open_sockets()
    ours, theirs = socket.socketpair()
    reader, writer = os.pipe()
    with socket.socket() as unconnected, ours, theirs:
        named = {(each.fileno(), os.fstat(each.fileno()).st_ino) for each in (ours, theirs, unconnected)}
        assert open_sockets() - before == named
    os.close(reader)
    os.close(writer)
    assert open_sockets() == before


def test_a_number_that_was_reused_is_another_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as first:
            (old,) = {pair for pair in open_sockets() if pair[0] == first.fileno()}
        with socket.create_connection(server.getsockname()) as second:
            assert second.fileno() == old[0], "the kernel gives the lowest number that is free"
            assert old not in open_sockets()
            shut_down(*old)
            second.sendall(b"still open")
