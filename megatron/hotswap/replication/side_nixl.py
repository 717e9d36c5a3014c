"""The side process that uses NIXL (see nixl.py): python -m megatron.hotswap.replication.side_nixl LINK_FD."""

from __future__ import annotations

import importlib
import importlib.util
import os
import struct
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from .side_loop import Library, Request, run

#: What can be installed under: one import name for each CUDA that the wheel was built with. None of them needs CUDA for host memory.
DISTRIBUTIONS = {"nixl_cu12": "nixl-cu12", "nixl_cu13": "nixl-cu13", "nixl": "nixl"}
#: Where the bytes are in the offerer's address space; the keys of its registered memory follow where the taker does not have them.
_TICKET = struct.Struct("<Q")
_TAG = struct.Struct("<I")
_HOST_MEMORY = "DRAM"


@dataclass
class _Registration:
    address: int
    length_bytes: int
    descriptors: Any
    told: bool = False  # whether the other end has its keys


class Nixl(Library):
    """One NIXL agent with UCX beneath. The taker reads out of the offerer's memory: nobody writes into another's."""

    def __init__(self) -> None:
        self._agent: Any = None
        self._peer = ""
        self._registrations: list[_Registration] = []
        self._taken: set[bytes] = set()  # tags that the other end has taken and whose requests have not been told

    def load(self) -> str:
        name = next((name for name in DISTRIBUTIONS if importlib.util.find_spec(name) is not None), None)
        if name is None:
            raise ModuleNotFoundError(f"none of {', '.join(DISTRIBUTIONS.values())} is installed for {sys.executable}")
        nixl = importlib.import_module(f"{name}._api")
        # NIXL's own thread would poll all the time: an eighth of a core was measured for an idle link. Here polling ends with the
        # transfers: the taker's, and the offerer's, which is told of each by a notification.
        config = nixl.nixl_agent_config(backends=["UCX"], enable_prog_thread=False)
        self._agent = nixl.nixl_agent(f"deadpool-{os.uname().nodename}-{os.getpid()}-{os.urandom(4).hex()}", config)
        if "UCX" not in self._agent.backends:
            raise RuntimeError(f"this NIXL has no UCX; it has {', '.join(self._agent.plugin_list)}")
        return f"NIXL {metadata.version(DISTRIBUTIONS[name])} over UCX"

    def begin(self, end: int) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def meet(self, blob: bytes) -> None:
        self._learn(blob)

    def register(self, address: int, length_bytes: int) -> object:
        descriptors = self._agent.register_memory([(address, length_bytes, 0, "")], mem_type=_HOST_MEMORY)
        self._registrations.append(_Registration(address, length_bytes, descriptors))
        return self._registrations[-1]

    def deregister(self, registration: object) -> None:
        assert isinstance(registration, _Registration)
        self._registrations.remove(registration)
        self._agent.deregister_memory(registration.descriptors)

    def offer(self, address: int, length_bytes: int, tag: int) -> tuple[bytes, Request | None]:
        inside = next(r for r in self._registrations if r.address <= address < r.address + r.length_bytes)
        keys = b"" if inside.told else bytes(self._agent.get_partial_agent_metadata(inside.descriptors, inc_conn_info=False))
        inside.told = True

        def taken() -> bool:
            for notifications in self._agent.get_new_notifs().values():
                self._taken.update(notifications)
            if _TAG.pack(tag) not in self._taken:
                return False
            self._taken.remove(_TAG.pack(tag))
            return True

        return _TICKET.pack(address) + keys, taken

    def take(self, address: int, length_bytes: int, tag: int, ticket: bytes) -> Request:
        (source,) = _TICKET.unpack_from(ticket)
        if keys := ticket[_TICKET.size :]:
            self._learn(keys)
        agent = self._agent
        here = agent.get_xfer_descs([(address, length_bytes, 0)], mem_type=_HOST_MEMORY)
        there = agent.get_xfer_descs([(source, length_bytes, 0)], mem_type=_HOST_MEMORY)
        handle = agent.initialize_xfer("READ", here, there, self._peer, _TAG.pack(tag))
        state = agent.transfer(handle)

        def done() -> bool:
            nonlocal state
            if state == "PROC":
                state = agent.check_xfer_state(handle)
            if state == "ERR":
                raise RuntimeError("NIXL reported an error in a transfer")
            if state != "DONE":
                return False
            agent.release_xfer_handle(handle)
            return True

        return done

    def _learn(self, blob: bytes) -> None:
        name = self._agent.add_remote_agent(blob)
        self._peer = name.decode() if isinstance(name, bytes) else str(name)


if __name__ == "__main__":
    run(Nixl())
