"""A TCP relay between two agents that damages, cuts or stops what passes through it."""

from __future__ import annotations

import asyncio
import contextlib


class Proxy:
    """Relays to `target`. Offsets count the bytes from the client, the token's proof included."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.flip_at: int | None = None  # flip a bit of this byte
        self.cut_at: int | None = None  # close both sides before this byte
        self.stall_at: int | None = None  # stop relaying before this byte, with the connection open
        self.passed = 0
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
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        tasks = [
            asyncio.ensure_future(self._forward(reader, there_writer, damage=True)),
            asyncio.ensure_future(self._forward(there_reader, writer, damage=False)),
        ]
        self._tasks.update(tasks)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for side in (writer, there_writer):
            side.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, damage: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if damage:
                    data = await self._damage(bytearray(data))
                    if data is None:
                        return
                writer.write(data)
                await writer.drain()

    async def _damage(self, data: bytearray) -> bytearray | None:
        begin, self.passed = self.passed, self.passed + len(data)
        if self.flip_at is not None and begin <= self.flip_at < self.passed:
            data[self.flip_at - begin] ^= 1
            self.flip_at = None
        if self.stall_at is not None and self.stall_at < self.passed:
            await asyncio.sleep(3600)
        if self.cut_at is not None and self.cut_at < self.passed:
            return None
        return data
