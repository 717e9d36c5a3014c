"""A process manager for two: the PMI-1 protocol, which MPICH and its kin speak in MPI_Init.

PMI-1 is lines of text on a descriptor named in PMI_FD: a process puts what the others must know of it (its network addresses)
under keys, waits in a barrier, and gets what the others have put. Here each of the two processes is served by its own agent, and
a barrier is an exchange of what was put, over the connection that the agents have already. So two processes on two nodes form an
MPI world of their own without mpirun, srun or a server, and a world that breaks takes no other with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import msgspec

from ..codec import decoder
from ..errors import Malformed, PeerFault
from .side import Exchange

#: The world's two processes are told that they are on different nodes, so MPI makes no shared memory of its own, which would
#: stay in /dev/shm when the process is killed.
_WORLD = {"PMI_process_mapping": "(vector,(0,2,1))"}
_LINE_BYTES_MAX = 1 << 16
_KEYS_MAX = 1024  # between two barriers; MPICH puts one or two
_decode_put = decoder(dict[str, str])
_ANSWERS = {
    "init": "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1",
    "get_maxes": "cmd=maxes rc=0 kvsname_max=64 keylen_max=64 vallen_max=4096",
    "get_appnum": "cmd=appnum rc=0 appnum=0",
    "get_universe_size": "cmd=universe_size rc=0 size=2",
    "finalize": "cmd=finalize_ack rc=0",
}


def environment(descriptor: int, end: int) -> dict[str, str]:
    """The variables that MPI_Init looks for."""
    return {"PMI_FD": str(descriptor), "PMI_RANK": str(end), "PMI_SIZE": "2", "PMI_SPAWNED": "0"}


async def serve(sock: socket.socket, exchange: Exchange) -> None:
    """Answer one process until it closes its end or this is cancelled. The socket is not closed.

    Raises:
        PeerFault: it said what PMI-1 does not have, or the other end is gone.
    """
    reader, writer = await asyncio.open_connection(sock=sock.dup(), limit=_LINE_BYTES_MAX)
    # MPI may name shared memory after the key-value space, and a node has several links: each has a name of its own.
    answers = {**_ANSWERS, "get_my_kvsname": f"cmd=my_kvsname rc=0 kvsname=deadpool-{os.urandom(8).hex()}"}
    known = dict(_WORLD)
    put: dict[str, str] = {}
    try:
        while line := await _line(reader):
            words = dict(word.split("=", 1) for word in line.split() if "=" in word)
            command = words.get("cmd", "")
            if command in answers:
                answer = answers[command]
            elif command == "put" and len(put) < _KEYS_MAX:
                put[words["key"]] = words["value"]
                answer = "cmd=put_result rc=0 msg=success"
            elif command == "barrier_in":
                theirs = await exchange(msgspec.msgpack.encode(put))
                known.update(put)
                known.update(_printable(_decode_put(theirs)))
                put.clear()
                answer = "cmd=barrier_out rc=0"
            elif command == "get":
                value = known.get(words["key"])
                answer = "cmd=get_result rc=-1 msg=key_not_found value=unknown"
                if value is not None:
                    answer = f"cmd=get_result rc=0 msg=success value={value}"
            else:
                raise PeerFault(f"MPI asked its process manager for {line[:200]!r}, which a world of two does not have")
            writer.write(answer.encode() + b"\n")
            await writer.drain()
    except (KeyError, Malformed, OSError) as wrong:
        raise PeerFault(f"the exchange of MPI's addresses broke: {type(wrong).__name__}: {wrong}") from wrong
    finally:
        with contextlib.suppress(OSError):
            writer.close()


def _printable(said: dict[str, str]) -> dict[str, str]:
    """What the other end has put, which becomes part of lines here.

    Raises:
        PeerFault: it would end a line.
    """
    for text in (*said, *said.values()):
        if not text.isprintable():
            raise PeerFault(f"the other end's MPI has put what is no line of PMI-1: {text[:200]!r}")
    return said


async def _line(reader: asyncio.StreamReader) -> str:
    try:
        return (await reader.readuntil(b"\n")).decode(errors="replace").strip()
    except asyncio.IncompleteReadError:
        return ""
    except asyncio.LimitOverrunError as long:
        raise PeerFault(f"MPI sent its process manager a line of more than {_LINE_BYTES_MAX} bytes") from long
