"""The store over which a membership's groups meet: served by one worker, a new one for every membership.

torch's TCPStore would do, but its server asks the name service for every client that connects, one after another in its only thread,
and its client asks for the server: at 32 processes the answer that got lost held up all of them for five seconds, and a cluster's name
service is often what suffers first when nodes fail. Ours (csrc/rendezvous.cpp) asks nobody, and serves only those who were told its
secret. docs/design/0006-rendezvous.md.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import deadpool_ext

_SECRET_BYTES = 16
_RETRY_S = 0.05
_LENGTH = struct.Struct("<I")


class Rendezvous:
    """A store that this process serves, as long as the object lives. `address` says all that a client needs: "host:port/secret"."""

    def __init__(self, host: str) -> None:
        """Listen on `host`: an address of this machine, or a name of it.

        Raises:
            RuntimeError: it cannot be listened on.
        """
        numeric = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        secret = secrets.token_hex(_SECRET_BYTES)
        self._server = deadpool_ext.RendezvousServer(numeric, secret)
        self.address = f"{numeric}:{self._server.port}/{secret}"


class RendezvousStore(dist.Store):  # type: ignore[misc]
    """A client, with the operations of torch.distributed.Store but queues; each is one exchange of frames.

    Threads take turns, as with torch's TCPStore: who waits for a key holds up the others, unless they have a `clone`.
    """

    def __init__(self, address: str, timeout: timedelta, require_wanted: Callable[[], None] = lambda: None) -> None:
        """Connect.

        Args:
            address: of a Rendezvous.
            timeout: for connecting, and for what others have to do first.
            require_wanted: raises once nobody wants to meet there any more; asked before each attempt to connect.

        Raises:
            torch.distributed.DistNetworkError: it is not there.
        """
        super().__init__()
        self.set_timeout(timeout)
        self._address = address
        self._require_wanted = require_wanted
        self._turn = threading.Lock()
        self._socket: socket.socket | None = self._connect()

    def _connect(self) -> socket.socket:
        endpoint, secret = self._address.rsplit("/", 1)
        host, port = endpoint.rsplit(":", 1)
        deadline = time.monotonic() + self.timeout.total_seconds()
        while True:
            self._require_wanted()
            try:
                connected = socket.create_connection((host, int(port)), max(_RETRY_S, deadline - time.monotonic()))
            except OSError as failure:
                if time.monotonic() > deadline or isinstance(failure, ConnectionRefusedError):
                    raise dist.DistNetworkError(f"the rendezvous at {endpoint} cannot be reached: {failure}") from failure
                time.sleep(_RETRY_S)
                continue
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.sendall(_frame([secret.encode()]))
            return connected

    def _ask(self, operation: bytes, words: Sequence[bytes], timeout: timedelta | None = None) -> list[bytes]:
        limit = (timeout or self.timeout).total_seconds()
        with self._turn:
            if self._socket is None:
                self._socket = self._connect()
            try:
                self._socket.settimeout(limit)
                self._socket.sendall(_frame([operation, *words]))
                return _words(_take(self._socket, *_LENGTH.unpack(_take(self._socket, _LENGTH.size))))
            except OSError as failure:
                self._socket.close()
                self._socket = None  # an answer that comes late must not be taken for that of the next question
                where = self._address.rsplit("/", 1)[0]
                if isinstance(failure, TimeoutError):
                    asked = b", ".join(words[:3]).decode(errors="replace")
                    raise dist.DistStoreError(f"the rendezvous at {where} did not have {asked} … within {limit:g} s") from failure
                raise dist.DistNetworkError(f"the rendezvous at {where} is gone: {failure}") from failure

    # ---- torch.distributed.Store

    def set(self, key: str, value: bytes | str) -> None:
        """Set one key."""
        self._ask(b"S", [key.encode(), _bytes(value)])

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Set several keys at once."""
        self._ask(b"S", [word for key, value in zip(keys, values, strict=True) for word in (key.encode(), _bytes(value))])

    def get(self, key: str) -> bytes:
        """Its value, once it is there."""
        return self._ask(b"G", [key.encode()])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Their values, once all are there."""
        return self._ask(b"G", [key.encode() for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all are there."""
        self._ask(b"W", [key.encode() for key in keys], timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there."""
        return self._ask(b"C", [key.encode() for key in keys]) == [b"1"]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first; returns the sum."""
        return int(self._ask(b"A", [key.encode(), str(amount).encode()])[0])

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Set the key if it has the expected value (empty: or is not there); returns the value that it has now."""
        return self._ask(b"X", [key.encode(), _bytes(expected), _bytes(desired)])[0]

    def append(self, key: str, value: bytes | str) -> None:
        """Append to a value, empty at first."""
        self._ask(b"P", [key.encode(), _bytes(value)])

    def delete_key(self, key: str) -> bool:
        """Whether it was there."""
        return self._ask(b"D", [key.encode()]) == [b"1"]

    def num_keys(self) -> int:
        """How many there are."""
        return int(self._ask(b"N", [])[0])

    def has_extended_api(self) -> bool:
        """append, multi_get and multi_set are there."""
        return True

    def clone(self) -> RendezvousStore:
        """Another client."""
        return RendezvousStore(self._address, self.timeout, self._require_wanted)


class GroupStore(dist.Store):  # type: ignore[misc]
    """One group's keys in a membership's store. What uses it must be outlived by it: torch holds only its C++ half.

    A gloo group connects over it: a member says where it is, under ".../RANK", and asks for each other one by one. With
    `fetch_at_once` the first question fetches all answers, so that a member makes two operations whatever the group's size. Without, nobody
    is asked before the group is used: what its member says is kept until `posted`, for all groups to be said at once.
    """

    def __init__(self, store: dist.Store, name: str, members: int, fetch_at_once: bool) -> None:
        super().__init__()
        self._unsaid: dict[str, bytes | str] | None = None if fetch_at_once else {}
        self._held: dist.Store | None = store
        self._name = name
        self._members = members
        self._fetch_at_once = fetch_at_once
        self._known: dict[str, bytes] = {}

    @property
    def _store(self) -> dist.Store:
        if self._held is None:
            raise dist.DistStoreError(f"group {self._name} is connected, and has let go of the store over which its members met")
        return self._held

    def release(self) -> None:
        """All members are connected, nothing more is asked. A group may be kept through many memberships, and their stores must not be
        kept with it."""
        self._held = None

    def _own(self, key: str) -> str:
        return f"{self._name}/{key}"

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all are there."""
        if not self._fetch_at_once:
            self._store.wait([self._own(key) for key in keys], timeout or self._store.timeout)
            return
        for key in keys:
            if key not in self._known:
                folder = key.rpartition("/")[0]
                names = [f"{folder}/{member}" for member in range(self._members)]
                found = self._store.multi_get([self._own(name) for name in names])
                self._known |= zip(names, map(bytes, found), strict=True)

    def get(self, key: str) -> bytes:
        """Its value, once it is there."""
        if not self._fetch_at_once:
            return bytes(self._store.get(self._own(key)))
        self.wait([key])
        return self._known[key]

    def set(self, key: str, value: bytes | str) -> None:
        """Set one key."""
        if self._unsaid is None:
            self._store.set(self._own(key), value)
        else:
            self._unsaid[self._own(key)] = value

    def posted(self) -> dict[str, bytes | str]:
        """What is to be set in the membership's store now, by whoever asks; from here on this store does so by itself."""
        unsaid, self._unsaid = self._unsaid or {}, None
        return unsaid

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there."""
        return bool(self._store.check([self._own(key) for key in keys]))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first; returns the sum."""
        return int(self._store.add(self._own(key), amount))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Set the key if it has the expected value; returns the value that it has now."""
        return bytes(self._store.compare_set(self._own(key), expected, desired))

    def delete_key(self, key: str) -> bool:
        """Whether it was there."""
        return bool(self._store.delete_key(self._own(key)))

    def has_extended_api(self) -> bool:
        """There is no append, multi_get or multi_set."""
        return False


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _frame(words: Sequence[bytes]) -> bytes:
    body = b"".join(_LENGTH.pack(len(word)) + word for word in words)
    return _LENGTH.pack(len(body)) + body


def _words(body: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(body):
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size + length
        found.append(body[at - length : at])
    return found


def _take(connected: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = connected.recv(min(length - len(parts), 1 << 20))
        if not part:
            raise ConnectionResetError("it closed the connection")
        parts += part
    return bytes(parts)
