"""H2H over TCP against one bare C socket stream: memory to memory, between two processes on loopback.

    python benchmarks/transport.py [--gib 1] [--repetitions 9] [--streams N]

The transport does what it does in a job: mutual proof, chunks with checksums on both sides, the checksum of the whole, the
replica's header, the acknowledgement; in clear, and encrypted as --hot-swap-encrypt does it. The C program (c_stream.c, compiled here)
only moves bytes. Repetitions alternate, so that all see the same machine; a ratio is the median over the rounds. Prints one line of
JSON; rates in 1e9 bytes a second, processor time of both processes together in seconds a GB.
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

import psutil

from megatron.hotswap.replication.chunks import CHUNK_BYTES
from megatron.hotswap.replication.outgoing import Outgoing
from megatron.hotswap.replication.tcp import STREAMS, TcpTransport
from megatron.hotswap.replication.transfer import ReplicaStore
from megatron.hotswap.security import authority, files
from megatron.hotswap.security.tls import PeerTls
from megatron.hotswap.snapshot.layout import HEADER_BYTES
from megatron.hotswap.snapshot.slots import Slots

RUN, TOKEN, LOOPBACK = "bench", "token", "127.0.0.1"
METADATA_ROOM, METADATA_BYTES = 64 << 10, 20_000


def transport_of(options: argparse.Namespace) -> TcpTransport:
    tls = None if options.credentials is None else PeerTls(files.read(options.credentials, "agent", RUN))
    return TcpTransport(TOKEN, LOOPBACK, streams=options.streams, tls=tls)


async def hold(options: argparse.Namespace) -> None:
    """The holder's process: prints its address and serves until its standard input ends."""
    transport = transport_of(options)
    print(await transport.serve(ReplicaStore(RUN, lambda wanted: None)), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await transport.close()


async def own(options: argparse.Namespace) -> None:
    """The owner's process: at each line on standard input pushes the next generation, prints the seconds."""
    payload_bytes = int(options.gib * (1 << 30))
    slots = Slots.create(HEADER_BYTES + METADATA_ROOM + payload_bytes, 1)
    slots.view(0)[HEADER_BYTES:] = bytes([7]) * (METADATA_ROOM + payload_bytes)
    transport = transport_of(options)
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

    def processor_s(self) -> float:
        """Of both processes, so far."""
        times = [psutil.Process(process.pid).cpu_times() for process in (self._sender, self._receiver)]
        return sum(t.user + t.system for t in times)

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
    authority.issue(scratch, RUN)
    secretly = [*me, "--credentials", str(scratch)]
    tls = Sender([*secretly, "--role", "hold"], [*secretly, "--role", "own", "--address"])
    senders = (c, tcp, tls)
    try:
        for warm_up in (c, tcp, tcp, tls, tls):  # a holder has two slots to touch
            warm_up.seconds()
        before = [sender.processor_s() for sender in senders]
        rounds = [[sender.seconds() for sender in senders] for _ in range(options.repetitions)]
        spent = [sender.processor_s() - s for sender, s in zip(senders, before, strict=True)]
    finally:
        for sender in senders:
            sender.end()
    names, moved = ("c", "tcp", "encrypted"), total / 1e9
    rates = {f"{n}_gb_per_s": round(moved / statistics.median(times), 3) for n, times in zip(names, zip(*rounds, strict=True), strict=True)}
    costs = {f"{n}_processor_s_per_gb": round(s / moved / options.repetitions, 3) for n, s in zip(names, spent, strict=True)}
    return {
        "tcp_vs_c_stream": round(statistics.median(c_s / tcp_s for c_s, tcp_s, _ in rounds), 3),
        "encrypted_vs_tcp": round(statistics.median(tcp_s / tls_s for _, tcp_s, tls_s in rounds), 3),
        **rates,
        **costs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="bytes of one transfer, in GiB")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--chunk-bytes", type=int, default=CHUNK_BYTES)
    parser.add_argument("--role", choices=["hold", "own"], help=argparse.SUPPRESS)
    parser.add_argument("--credentials", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role is not None:
        asyncio.run({"hold": hold, "own": own}[options.role](options))
        return
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(measure(options, Path(scratch))))


if __name__ == "__main__":
    main()
