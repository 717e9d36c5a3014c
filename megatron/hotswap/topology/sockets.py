"""This process's connected TCP sockets, named so that a descriptor that was reused meanwhile is not taken for another's."""

from __future__ import annotations

import os
import socket

#: (descriptor, inode), as deadpool_ext.open_sockets says them
Sockets = frozenset[tuple[int, int]]


def shut_down(fd: int, inode: int) -> None:
    """End all use of a TCP connection at once; the descriptor stays its owner's to close. Never a listening one: gloo, which owns
    most of them, ends the process when its listener fails."""
    try:
        duplicate = os.dup(fd)
    except OSError:
        return
    with socket.socket(fileno=duplicate) as sock:
        try:
            if os.fstat(duplicate).st_ino != inode:
                return  # the number was reused meanwhile
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
                return
            if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # already shut
