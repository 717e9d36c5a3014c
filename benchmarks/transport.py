"""H2H over TCP against one bare C socket stream: memory to memory, between two processes on loopback.

    python benchmarks/transport.py [--gib 1] [--repetitions 9] [--streams N]

The transport does what it does in a job: mutual proof, chunks with checksums on both sides, the checksum of the whole, the
replica's header, the acknowledgement. The C program (c_stream.c, compiled here) only moves bytes. Repetitions alternate, so that
both see the same machine; the ratio is the median over the pairs. Prints one line of JSON; rates in 1e9 bytes a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from megatron.hotswap.replication.chunks import CHUNK_BYTES
from megatron.hotswap.replication.outgoing import Outgoing
from megatron.hotswap.replication.tcp import STREAMS, TcpTransport
from megatron.hotswap.replication.transfer import ReplicaStore
from megatron.hotswap.snapshot.layout import HEADER_BYTES
from megatron.hotswap.snapshot.slots import Slots

RUN, TOKEN, LOOPBACK = "bench", "token", "127.0.0.1"
METADATA_ROOM, METADATA_BYTES = 64 << 10, 20_000


async def hold(options: argparse.Namespace) -> None:
    """The holder's process: prints its address and serves until its standard input ends."""
    transport = TcpTransport(TOKEN, LOOPBACK, streams=options.streams)
    print(await transport.serve(ReplicaStore(RUN, lambda wanted: None)), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await transport.close()


async def own(options: argparse.Namespace) -> None:
    """The owner's process: at each line on standard input pushes the next generation, prints the seconds."""
    payload_bytes = int(options.gib * (1 << 30))
    slots = Slots.create(HEADER_BYTES + METADATA_ROOM + payload_bytes, 1)
    slots.view(0)[HEADER_BYTES:] = bytes([7]) * (METADATA_ROOM + payload_bytes)
    transport = TcpTransport(TOKEN, LOOPBACK, streams=options.streams)
    loop, generation = asyncio.get_running_loop(), 0
    while await loop.run_in_executor(None, sys.stdin.readline):
        generation += 1
        began = time.perf_counter()
        outgoing = Outgoing.of_copy(
            slots,
            0,
            lambda: payload_bytes,
            run_id=RUN,
            rank=0,
            generation=generation,
            layout_hash=bytes(32),
            metadata_bytes=METADATA_BYTES,
            payload_bytes=payload_bytes,
            chunk_bytes=options.chunk_bytes,
        )
        await transport.push(options.address, outgoing)
        print(f"{time.perf_counter() - began:.9f}", flush=True)
    await transport.close()


class Sender:
    """A process that sends once at each line, and its receiver."""

    def __init__(self, receiver: list[str], sender: list[str]) -> None:
        self._receiver = subprocess.Popen(receiver, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._receiver.stdout is not None
        place = self._receiver.stdout.readline().strip()
        self._sender = subprocess.Popen([*sender, place], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self) -> float:
        assert self._sender.stdin is not None and self._sender.stdout is not None
        self._sender.stdin.write("go\n")
        self._sender.stdin.flush()
        return float(self._sender.stdout.readline())

    def end(self) -> None:
        for process in (self._sender, self._receiver):
            assert process.stdin is not None
            process.stdin.close()
        for process in (self._sender, self._receiver):
            process.wait(30)


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, float]:
    program, total = str(scratch / "c_stream"), int(options.gib * (1 << 30))
    subprocess.run(["cc", "-O2", str(Path(__file__).with_name("c_stream.c")), "-o", program], check=True)
    me = [sys.executable, __file__, "--gib", str(options.gib), "--streams", str(options.streams), "--chunk-bytes", str(options.chunk_bytes)]
    c = Sender([program, "recv", str(total)], [program, "send", str(total)])
    tcp = Sender([*me, "--role", "hold"], [*me, "--role", "own", "--address"])
    try:
        for warm_up in (c, tcp, tcp):  # the holder has two slots to touch
            warm_up.seconds()
        pairs = [(c.seconds(), tcp.seconds()) for _ in range(options.repetitions)]
    finally:
        c.end()
        tcp.end()
    return {
        "tcp_vs_c_stream": round(statistics.median(c_s / tcp_s for c_s, tcp_s in pairs), 3),
        "tcp_gb_per_s": round(total / 1e9 / statistics.median(tcp_s for _, tcp_s in pairs), 3),
        "c_gb_per_s": round(total / 1e9 / statistics.median(c_s for c_s, _ in pairs), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="bytes of one transfer, in GiB")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--chunk-bytes", type=int, default=CHUNK_BYTES)
    parser.add_argument("--role", choices=["hold", "own"], help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role is not None:
        asyncio.run({"hold": hold, "own": own}[options.role](options))
        return
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(measure(options, Path(scratch))))


if __name__ == "__main__":
    main()
