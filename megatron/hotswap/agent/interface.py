"""Which of this host's network interfaces snapshots travel over (--hot-swap-interface)."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from ..errors import UsageError


def address_of(wanted: str | None, towards: str) -> str:
    """The address of an interface of this host.

    Args:
        wanted: its name, a network that it is in, or its address; so that one flag may do for all nodes. None: whichever reaches `towards`.
        towards: host:port.

    Raises:
        UsageError: there is no such interface here; names those there are.
    """
    if wanted is None:
        return address_towards(towards)
    here = {
        name: [a.address for a in addresses if a.family == socket.AF_INET] for name, addresses in psutil.net_if_addrs().items()
    }
    if here.get(wanted):
        return str(here[wanted][0])
    flat = [address for addresses in here.values() for address in addresses]
    try:
        network = ipaddress.ip_network(wanted, strict=False)
        found = next((a for a in flat if ipaddress.ip_address(a) in network), None)
    except ValueError:  # a name, but not of an interface
        found = None
    if found is None:
        there = ", ".join(f"{name} {addresses[0]}" for name, addresses in here.items() if addresses)
        raise UsageError(
            f"--hot-swap-interface {wanted}: host {socket.gethostname()} has no interface of that name, network or address; it has "
            f"{there}; name one of them, or a network (10.1.0.0/16) that each node has an address in"
        )
    return found


def address_towards(place: str) -> str:
    """The address of the interface that reaches host:port (no packet is sent)."""
    host, port = place.rsplit(":", 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])
