"""The transports that --hot-swap-transport names. Each is imported when it is chosen, and not before."""

from __future__ import annotations

from ..config import HotSwapConfig
from .transfer import Transport


def make_transport(config: HotSwapConfig, token: str, interface: str) -> Transport:
    """The transport that was asked for.

    `interface` is the address that this node's agent listens on. A library that moves the bytes is held to that interface only
    where the user chose it (--hot-swap-interface); else it takes the fastest network that it finds.
    """
    if config.transport == "mpi":
        from .mpi import MpiTransport

        return MpiTransport(token, interface, restrict_to=config.interface)
    if config.transport == "nixl":
        from .nixl import NixlTransport

        return NixlTransport(token, interface, restrict_to=config.interface)
    from .tcp import TcpTransport

    return TcpTransport(token, interface)
