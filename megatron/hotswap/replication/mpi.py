"""H2H over MPI: Isend and Irecv from slot to slot, in side processes (linked.py), each link a world of two of its own.

No MPI here keeps a world of the whole job alive through the loss of a node, reports the death of a peer, or can be finalized
after one. So no world has more than the two side processes of one link. It is made by PMI-1 (pmi.py) over the connection that
the agents have: without mpirun or srun, so nothing else can end it, and on any MPI that listens to PMI_FD (MPICH and its kin).
docs/transports.md has what was measured.
"""

from __future__ import annotations

import asyncio
import os
import socket

from ..errors import PeerFault
from . import pmi
from .linked import LinkedTransport
from .network import library_environment
from .side import Begin, Exchange, Linked, SideProcess

INSTALL = "pip install mpi4py==4.1.2 mpich==4.3.2"
#: What another launcher says to the MPI of the process that it started; ours must not believe it.
_FOREIGN = ("PMI_", "PMIX_", "SLURM_", "OMPI_", "ORTE_", "PRTE_", "HYDI_", "HYDRA_", "PALS_", "MPI_LOCAL")


class MpiSide(SideProcess):
    """A side process, and the descriptor over which its MPI asks for the other end's addresses."""

    def __init__(self, restrict_to: str | None) -> None:
        self._pmi, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        try:
            super().__init__(
                "megatron.hotswap.replication.side_mpi", {**environment, **library_environment(restrict_to)}, (theirs.fileno(),)
            )
        finally:
            theirs.close()

    async def ready(self) -> str:
        """The MPI's name and version.

        Raises:
            PeerFault: it is one that cannot be linked.
        """
        version = await super().ready()
        if version.startswith("Open MPI"):
            raise PeerFault(f"{version} starts only under its own launcher or alone, and cannot link two processes that are there already")
        return version

    async def join(self, end: int, exchange: Exchange) -> None:
        """Link with the other end's process: both are in MPI_Init until each knows the other's addresses."""
        manager = asyncio.get_running_loop().create_task(pmi.serve(self._pmi, exchange))
        manager.add_done_callback(self._managed)
        try:
            self._send(Begin(end))
            await self._answer(Linked)
        finally:
            manager.cancel()

    def fail(self, failure: PeerFault) -> None:
        super().fail(failure)
        self._pmi.close()

    def _managed(self, manager: asyncio.Task[None]) -> None:
        if not manager.cancelled() and (broken := manager.exception()) is not None:
            self.fail(broken if isinstance(broken, PeerFault) else PeerFault(f"{type(broken).__name__}: {broken}"))


class MpiTransport(LinkedTransport):
    """See the module docstring. `restrict_to` is the address of the only network interface that MPI may use; None leaves it the choice."""

    name = "mpi"

    def __init__(self, token: str, interface: str, restrict_to: str | None = None) -> None:
        super().__init__(token, interface)
        self._restrict_to = restrict_to

    def start_side(self) -> SideProcess:
        return MpiSide(self._restrict_to)

    def explain(self) -> str:
        return (
            "It needs mpi4py and an MPI of MPICH's family (MPICH, MVAPICH, Intel MPI), the same on every node: "
            f"load the site's, or {INSTALL}; where there is only Open MPI, use --hot-swap-transport tcp or nixl"
        )
