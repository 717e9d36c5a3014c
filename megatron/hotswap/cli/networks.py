"""Virtual nodes with networks of their own: a network namespace each, cables to one bridge, which can be pulled and put back.

Nodes that share the machine's loopback can be killed and frozen, but not cut off: a cable that is pulled closes no connection, and the
processes on both sides go on. Needs root, and `ip` (Debian: iproute2).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
from typing import Any

from ..errors import UsageError

#: Addresses set aside for tests of network devices (RFC 2544): no machine's real network has them.
_SUBNET = "198.18.{}.{}"
_PREFIX = 24
_NODES_MAX = 200


class NodeNetworks:
    """The bridge, and the namespaces of the nodes. A namespace lives as long as its holder, a process that does nothing and ends with
    this one; so nothing is left when this process is killed but the bridge, which the next one takes away."""

    def __init__(self) -> None:
        """
        Raises:
            UsageError: this machine or user cannot have namespaces.
        """
        if shutil.which("ip") is None or os.geteuid() != 0:
            raise UsageError(
                "--separate-networks gives each node a network namespace, which needs root and the program ip (Debian: iproute2); "
                f"this is user {os.geteuid()}, and ip is {shutil.which('ip') or 'not there'}: leave it out, and nodes share one network"
            )
        _sweep()
        used = {a["local"] for link in _show("-4", "addr") for a in link.get("addr_info", ())}
        free = [n for n in range(256) if _SUBNET.format(n, 1) not in used]
        self._net = secrets.choice(free)
        self._bridge = f"dp{os.getpid()}"
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self.address = _SUBNET.format(self._net, 1)  # of this side
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self.address}/{_PREFIX}", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
        except subprocess.CalledProcessError as refused:
            raise UsageError(
                f"--separate-networks: the kernel refused a bridge: {refused.stderr.decode().strip()}; in a container it needs the "
                "capability NET_ADMIN: leave it out, and nodes share one network"
            ) from refused

    def command(self, node: str) -> list[str]:
        """What to put before a command that is to run on the node, whose cable is in then."""
        if node not in self._holders:
            self._add(node)
        self.plug(node)
        return ["nsenter", "--net", "--target", str(self._holders[node].pid)]

    def unplug(self, node: str) -> None:
        """Pull the cable: packets vanish, connections stay."""
        _ip("link", "set", self._cable(node), "down")

    def plug(self, node: str) -> None:
        """Put the cable back."""
        _ip("link", "set", self._cable(node), "up")

    def close(self) -> None:
        """Nothing is left."""
        for holder in self._holders.values():
            holder.kill()
            holder.wait()
        subprocess.run(["ip", "link", "del", self._bridge], check=False, capture_output=True)

    def _cable(self, node: str) -> str:
        return f"{self._bridge}.{list(self._holders).index(node)}"

    def _add(self, node: str) -> None:
        number = len(self._holders)
        if number >= _NODES_MAX:
            raise UsageError(f"--separate-networks has addresses for {_NODES_MAX} nodes")
        # Its own parent-death signal, and a word when it is inside: before that its namespace is still ours.
        inside = ["setpriv", "--pdeathsig", "KILL", "sh", "-c", "echo; exec sleep infinity"]
        holder = subprocess.Popen(["unshare", "--net", *inside], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        self._holders[node] = holder
        assert holder.stdout is not None
        if holder.stdout.readline() != b"\n":
            raise UsageError(f"--separate-networks: no namespace for {node}: the program unshare ended with {holder.wait()}")
        target, cable = str(holder.pid), self._cable(node)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", target)
        _ip("link", "set", cable, "master", self._bridge)
        within = ["nsenter", "--net", "--target", target, "ip"]
        for words in (
            ["link", "set", "lo", "up"],
            ["addr", "add", f"{_SUBNET.format(self._net, number + 10)}/{_PREFIX}", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
        ):
            subprocess.run([*within, *words], check=True, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _show(*words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(subprocess.run(["ip", "-j", *words], check=True, capture_output=True).stdout or b"[]")
    return found


def _sweep() -> None:
    """Bridges of launchers that are gone."""
    for link in _show("link", "show", "type", "bridge"):
        match = re.fullmatch(r"dp(\d+)", link["ifname"])
        if match is not None and not os.path.exists(f"/proc/{match[1]}"):
            subprocess.run(["ip", "link", "del", link["ifname"]], check=False, capture_output=True)
