"""An etcd of the test's own, on ports of its own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

_START_S = 60.0


class EtcdServer:
    """One member; `with` ends it."""

    def __init__(self, folder: Path, host: str = "127.0.0.1", within: Sequence[str] = ()) -> None:
        """
        Args:
            folder: for its data and its log.
            host: the address that it listens on.
            within: the beginning of a command line that runs the rest of it in another network.
        """
        program = shutil.which("etcd")
        if program is None:
            pytest.skip("no etcd here: Debian's package etcd-server has it")
        self._program, self._folder, self._host, self._within = program, folder, host, within
        self.port, self._peer_port = _free_ports(2)
        self.name = f"etcd://{host}:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Serve what the folder has; returns when it answers."""
        ours, peers = (f"http://{self._host}:{port}" for port in (self.port, self._peer_port))
        with open(self._folder / "etcd.log", "ab") as log:
            self._process = subprocess.Popen(
                [
                    *(*self._within, self._program, "--data-dir", str(self._folder / "data")),
                    *("--listen-client-urls", ours, "--advertise-client-urls", ours, "--listen-peer-urls", peers),
                    *("--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"),
                ],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + _START_S
        while not self._serves():
            assert self._process.poll() is None and time.monotonic() < deadline, (self._folder / "etcd.log").read_text()
            time.sleep(0.05)

    def _serves(self) -> bool:
        knock = f"import socket; socket.create_connection(({self._host!r}, {self.port}), 5).close()"
        return subprocess.run([*self._within, sys.executable, "-c", knock], stderr=subprocess.DEVNULL, check=False).returncode == 0

    def stop(self) -> None:
        """End it; what it has stays in the folder."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> EtcdServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
