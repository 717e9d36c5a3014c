"""One process's endpoint for Prometheus: read-only HTTP in the library's own threads, and the file that says where it is.

RUN_DIR/metrics/NAME.json is what Prometheus calls a target file (file_sd_configs): with `RUN_DIR/metrics/*.json` it finds the
coordinator and every agent, those that come later too, although agents that share a machine cannot have one port.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, start_http_server
from prometheus_client.registry import Collector

from ..errors import UsageError
from . import FOLDER

#: A client that says nothing for this long is hung up on: its thread is ours.
_READ_TIMEOUT_S = 5.0
_EVERY_INTERFACE = ("", "0.0.0.0", "::")


def new_registry() -> CollectorRegistry:
    """A registry of its own, with the process's processor time, memory and open files."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


class Endpoint:
    """Serves one registry until `close`."""

    def __init__(self, registry: CollectorRegistry, address: str, port: int) -> None:
        """Listen; 0 is any free port.

        Raises:
            UsageError: it is taken, or the address is none of this machine's.
        """
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except OSError as refused:
            raise UsageError(
                f"metrics are not served at {address}:{port}: {refused}; give another --hot-swap-metrics-port, or an address of this "
                "machine as --hot-swap-metrics-address"
            ) from refused
        self._server.RequestHandlerClass = _impatient(self._server.RequestHandlerClass)
        self.address, self.port = address, int(self._server.server_address[1])
        self._file: Path | None = None

    def announce(self, run_dir: Path, name: str, host: str, labels: Mapping[str, str]) -> str:
        """Write the target file; returns host:port. `host` is this machine's name for others, said where all interfaces are served.

        Raises:
            OSError: it cannot be written.
        """
        shown = host if self.address in _EVERY_INTERFACE else self.address
        target = f"[{shown}]:{self.port}" if ":" in shown else f"{shown}:{self.port}"
        folder = run_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f"{name}.tmp"  # not *.json: Prometheus reads whole files only
        temporary.write_text(json.dumps([{"targets": [target], "labels": dict(labels)}]) + "\n")
        self._file = temporary.replace(folder / f"{name}.json")
        return target

    def close(self) -> threading.Thread:
        """Take the target file away and stop serving, behind the caller's back; returns the thread that does it."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)
        ending = threading.Thread(target=self._stop, name="deadpool-metrics-end", daemon=True)
        ending.start()
        return ending

    def _stop(self) -> None:
        self._server.shutdown()  # waits for the serving thread to look, which takes up to half a second
        self._server.server_close()
        self._thread.join()


class Numbers(Collector):
    """What a process of ours counts, and serves if it is told to: the base of coordinator/metrics.py and agent/metrics.py."""

    def __init__(self) -> None:
        self.registry = new_registry()
        self._endpoint: Endpoint | None = None

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"deadpool_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"deadpool_{name}", text, labels, buckets=buckets, registry=self.registry)

    def _listen(self, address: str, port: int, run_dir: Path, name: str, host: str, labels: Mapping[str, str]) -> str:
        """Begin to serve, and say so in the target file; returns host:port.

        Raises:
            UsageError: the port is taken, or the address is none of this machine's.
            OSError: the target file cannot be written.
        """
        self._endpoint = Endpoint(self.registry, address, port)
        return self._endpoint.announce(run_dir, name, host, labels)

    def _end(self) -> threading.Thread | None:
        """Stop serving, behind the caller's back."""
        return self._endpoint.close() if self._endpoint is not None else None


def forget(run_dir: Path, name: str) -> None:
    """A process that cannot take its own target file away any more. The name may be a stranger's: no path is made of it."""
    with contextlib.suppress(OSError):
        for path in (run_dir / FOLDER).glob("*.json"):
            if path.stem == name:
                path.unlink(missing_ok=True)


def _impatient(handler: Any) -> Any:
    """The library's handler, which would wait for a silent client for ever, and show what a client that hangs up raises."""

    class Handler(handler):  # type: ignore[misc]
        timeout = _READ_TIMEOUT_S

        def handle(self) -> None:
            with contextlib.suppress(OSError):
                super().handle()

    return Handler
