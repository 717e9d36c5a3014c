"""A TCP relay between two agents that damages, cuts, slows or stops what passes through it.

It knows this much of the connections: after the client's half of the proof comes a verb, and JOIN makes it a stream of chunks, any
other a control connection. A place is ("control" | "stream", offset): the byte at that offset behind the client's proof, on the
first connection of the kind that gets so far.
"""

from __future__ import annotations

import asyncio
import contextlib

PROOF_BYTES = 64
Place = tuple[str, int]


class Proxy:
    """Relays to `target`."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.flip_at: Place | None = None  # flip a bit of this byte
        self.flip_back_at: int | None = None  # flip a bit of this byte of what a stream brings back to the client
        self.cut_at: Place | None = None  # close the connection before this byte
        self.stall_at: Place | None = None  # stop relaying before this byte, with the connection open
        self.gate: asyncio.Event | None = None  # chunks wait for it
        self.pause_s = 0.0  # between two parts of up to 64 KiB of a stream
        self.passed = {"control": 0, "stream": 0, "back": 0}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Listen; returns the address."""
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def stop(self) -> None:
        """Close everything."""
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._target.rsplit(":", 1)
        try:
            there_reader, there_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        kind: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        tasks = [
            asyncio.ensure_future(self._forward(reader, there_writer, kind)),
            asyncio.ensure_future(self._back(there_reader, writer, kind)),
        ]
        self._tasks.update(tasks)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for side in (writer, there_writer):
            side.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: asyncio.Future[str]) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            writer.write(await reader.readexactly(PROOF_BYTES))
            verb = await reader.readexactly(4)
            name = "stream" if verb == b"JOIN" else "control"
            kind.set_result(name)
            data: bytes | bytearray | None = verb
            at = 0
            while data:
                begin, at = at, at + len(data)
                data = await self._damage(name, begin, bytearray(data))
                if data is None:
                    return
                writer.write(data)
                await writer.drain()
                self.passed[name] += len(data)
                data = await reader.read(65536)

    async def _damage(self, kind: str, begin: int, data: bytearray) -> bytearray | None:
        end = begin + len(data)

        def here(place: Place | None) -> bool:
            return place is not None and place[0] == kind and begin <= place[1] < end

        if self.flip_at is not None and here(self.flip_at):
            data[self.flip_at[1] - begin] ^= 1
            self.flip_at = None
        if here(self.stall_at):
            await asyncio.sleep(3600)
        if here(self.cut_at):
            return None
        if kind == "stream" and begin > 0:
            if self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(self.pause_s)
        return data

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: asyncio.Future[str]) -> None:
        at = 0
        with contextlib.suppress(OSError):
            while data := bytearray(await reader.read(65536)):
                begin, at = at, at + len(data)
                if self.flip_back_at is not None and begin <= self.flip_back_at < at and kind.done() and kind.result() == "stream":
                    data[self.flip_back_at - begin] ^= 1
                    self.flip_back_at = None
                writer.write(data)
                await writer.drain()
                self.passed["back"] += len(data)
