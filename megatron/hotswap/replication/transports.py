"""The transports that --hot-swap-transport names. Each is imported when it is chosen, and not before."""

from __future__ import annotations

from ..config import HotSwapConfig
from ..security.files import Credentials
from ..security.tls import PeerTls
from .transfer import Transport


def make_transport(config: HotSwapConfig, shown: Credentials, interface: str) -> Transport:
    """The transport that was asked for. Its peers prove the job's token to each other, and with --hot-swap-encrypt show certificates too.

    `interface` is the address that this node's agent listens on. A library that moves the bytes is held to that interface only
    where the user chose it (--hot-swap-interface); else it takes the fastest network that it finds.
    """
    if config.transport == "mpi":
        from .mpi import MpiTransport

        return MpiTransport(shown.token, interface, restrict_to=config.interface)
    if config.transport == "nixl":
        from .nixl import NixlTransport

        return NixlTransport(shown.token, interface, restrict_to=config.interface)
    from .tcp import TcpTransport

    return TcpTransport(shown.token, interface, tls=PeerTls(shown) if config.encrypt else None)


def protection(config: HotSwapConfig) -> str:
    """What keeps snapshots from being read or changed on their way, in words."""
    if config.encrypt:
        return "encrypted (TLS 1.3)"
    if config.transport == "tcp":
        return "not encrypted (--hot-swap-encrypt does it)"
    return f"not encrypted, and connected by {config.transport} itself: its network must be yours alone"
