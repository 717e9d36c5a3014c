"""The side process that uses MPI (see mpi.py): python -m megatron.hotswap.replication.side_mpi LINK_FD PMI_FD."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import Any

from . import pmi
from .side_loop import Library, Request, run

_SHARED_FILE = re.compile(r"\s(/dev/shm/\S+)$", re.MULTILINE)


class Mpi(Library):
    """A world of two, and Isend and Irecv in it."""

    def __init__(self, pmi_descriptor: int) -> None:
        self._pmi_descriptor = pmi_descriptor
        self._mpi: Any = None
        self._world: Any = None
        self._peer = 0

    def load(self) -> str:
        import mpi4py

        mpi4py.rc.initialize = False  # which end this is comes later
        mpi4py.rc.finalize = False  # it may hang once the other end is dead
        from mpi4py import MPI

        self._mpi = MPI
        return str(MPI.Get_library_version()).strip("\0\n ").splitlines()[0]

    def begin(self, end: int) -> None:
        os.environ.update(pmi.environment(self._pmi_descriptor, end))
        self._mpi.Init_thread(self._mpi.THREAD_SINGLE)
        self._world = self._mpi.COMM_WORLD
        if self._world.size != 2 or self._world.rank != end:
            raise RuntimeError(
                f"MPI_Init made a world of {self._world.size} and rank {self._world.rank}, not one of 2 and rank {end}: this MPI does "
                "not listen to PMI_FD"
            )
        self._world.Set_errhandler(self._mpi.ERRORS_RETURN)
        self._peer = 1 - end
        _unlink_shared_files()

    def meet(self, blob: bytes) -> None:
        raise AssertionError("the ends of an MPI world have met when MPI_Init returns")

    def register(self, address: int, length_bytes: int) -> object:
        return None  # MPI registers what it sends, and remembers it

    def deregister(self, registration: object) -> None:
        pass

    def offer(self, address: int, length_bytes: int, tag: int) -> tuple[bytes, Request | None]:
        return b"", self._world.Isend(self._buffer(address, length_bytes), self._peer, tag).Test

    def take(self, address: int, length_bytes: int, tag: int, ticket: bytes) -> Request:
        return self._world.Irecv(self._buffer(address, length_bytes), self._peer, tag).Test  # type: ignore[no-any-return]

    def _buffer(self, address: int, length_bytes: int) -> list[Any]:
        return [self._mpi.buffer.fromaddress(address, length_bytes), self._mpi.BYTE]


def _unlink_shared_files() -> None:
    """Take the names off the shared memory that MPI made for processes of this node: there is no other, and names outlive a kill."""
    with open("/proc/self/maps") as maps:
        for name in set(_SHARED_FILE.findall(maps.read())):
            with contextlib.suppress(OSError):
                os.unlink(name)


if __name__ == "__main__":
    run(Mpi(int(sys.argv[2])))
