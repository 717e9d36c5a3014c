"""Which network a library may use, in the variables that it reads. What the user has set stands."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 16


def device_of(address: str) -> str | None:
    """The network device that has this IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("16s240x", name.encode()[: _NAME_BYTES - 1])
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def library_environment(restrict_to: str | None) -> dict[str, str]:
    """Variables for UCX and libfabric, which MPI and NIXL stand on.

    `restrict_to`: the address of the only network interface to use, its RDMA device included; None leaves the choice to them.
    """
    wanted = {
        # Their shared memory has names, in /dev/shm or System V's tables, which stay when a process is killed; and a holder is on
        # another node anyway. Memory of another process may still be read directly (cma), which needs no name.
        "UCX_TLS": "^sysv,posix",
        "UCX_ERROR_SIGNALS": "",  # a crash is to end the process at once, not to be explained first
        "UCX_WARN_UNUSED_ENV_VARS": "n",
    }
    device = None if restrict_to is None else device_of(restrict_to)
    if device is not None:
        wanted["UCX_NET_DEVICES"] = ",".join([*_rdma_ports(device), device])
        wanted["FI_TCP_IFACE"] = device
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _rdma_ports(device: str) -> list[str]:
    """The RDMA device behind a network device, as UCX names it."""
    folder = Path("/sys/class/net", device, "device", "infiniband")
    return [f"{entry.name}:1" for entry in sorted(folder.iterdir())] if folder.is_dir() else []
