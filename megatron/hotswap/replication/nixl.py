"""H2H over NIXL: the holder reads each chunk straight out of the owner's slot, by RDMA where there is some (linked.py).

NIXL reports a dead peer by itself. It lives in side processes nonetheless: it brings a hundred megabytes of native libraries,
threads and signal handlers that must not be able to take the agent, which owns the only copies of the job's state, along; and to
kill the process is the one way to be sure that no transfer given up still writes into a slot.
"""

from __future__ import annotations

import os

from .linked import LinkedTransport
from .network import library_environment
from .side import SideProcess

INSTALL = "pip install --no-deps nixl-cu12"


class NixlTransport(LinkedTransport):
    """See the module docstring. `restrict_to` is the address of the only network interface that UCX may use; None leaves it the choice."""

    name = "nixl"

    def __init__(self, token: str, interface: str, restrict_to: str | None = None) -> None:
        super().__init__(token, interface)
        self._restrict_to = restrict_to

    def start_side(self) -> SideProcess:
        return SideProcess("megatron.hotswap.replication.side_nixl", {**os.environ, **library_environment(self._restrict_to)})

    def explain(self) -> str:
        return f"It needs NIXL, the same on every node ({INSTALL}; it needs no GPU); or use --hot-swap-transport tcp"
