"""What travels to a holder that has the rank's payload already: the rank's own metadata and header, without the payload. Pure.

Without a distributed optimizer every data-parallel peer has the same parameters and optimizer state, so a peer's own snapshot is
the rank's replica but for the metadata. The header inside names the checksum of the rank's whole snapshot: what is put together
from the metadata here and a peer's payload is the rank's own, bit for bit, or it is refused (guarantee 6).

An envelope is sent like any snapshot, as one whose payload is empty.
"""

from __future__ import annotations

import msgspec

from ..codec import decoder
from ..errors import Malformed, SnapshotMismatch
from ..snapshot.layout import Header


class Envelope(msgspec.Struct, frozen=True):
    """`header` is that of the rank's snapshot; `peers` are the ranks whose payload is the same."""

    header: bytes
    metadata: bytes
    peers: tuple[int, ...]

    @property
    def inner(self) -> Header:
        """The header of the rank's snapshot.

        Raises:
            SnapshotMismatch: it is none.
        """
        return Header.unpack(self.header)


_ENCODER = msgspec.msgpack.Encoder()
_decode = decoder(Envelope)


def is_envelope(header: Header) -> bool:
    """Whether what is under this header is an envelope: no model has an empty payload."""
    return header.payload_bytes == 0


def pack(inner: Header, metadata: bytes, peers: tuple[int, ...]) -> bytes:
    """The bytes that are the envelope's own metadata."""
    return _ENCODER.encode(Envelope(inner.pack(), metadata, peers))


def unpack(raw: bytes) -> Envelope:
    """Read one.

    Raises:
        SnapshotMismatch: it is none.
    """
    try:
        envelope: Envelope = _decode(raw)
    except Malformed as damaged:
        raise SnapshotMismatch(f"what was sent without a payload is no envelope: {damaged}") from damaged
    return envelope
