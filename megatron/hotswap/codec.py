"""Messages as msgpack, read: exactly what the type says, or one named error. Large ones are packed.

The decoder builds nothing but the given types, so no message can run code. An announced length costs nothing until its bytes are
there, and what they become is at most some tens of times as large; whoever receives bounds the bytes.

A membership of thousands of ranks repeats itself, and goes to every agent: packed, it is an eighth. Only what a coordinator says or
records is packed; nobody else's bytes are unpacked.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import msgspec

from .errors import Malformed

_WORDS_MAX = 300
#: A byte that no msgpack begins with. What follows is msgpack, deflated.
PACKED = b"\xc1"
_PACK_FROM_BYTES = 64 << 10
#: Deflate's best level gains a tenth over its fastest, and takes ten times as long.
_FASTEST = 1
#: Of a packed message, unpacked: an order to a million ranks has 80 MB.
_UNPACKED_BYTES_MAX = 128 << 20


def decoder(kind: Any, packed: bool = False) -> Callable[[bytes], Any]:
    """A function that reads a message of this type (or union of types), which may be packed if that is said.

    It raises:
        Malformed: the bytes are no such message.
    """
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(raw: bytes) -> Any:
        try:
            return decode(_unpack(raw) if packed and raw[:1] == PACKED else raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as wrong:  # the last: nested deeper than any message is
            raise Malformed(f"what came is no message that is known here: {str(wrong)[:_WORDS_MAX]}") from None

    return read


def packing_encoder() -> Callable[[Any], bytes]:
    """A function that writes messages, large ones packed. The same object, given again, is not written anew: what a coordinator says to
    thousands of agents is one object."""
    encode = msgspec.msgpack.Encoder().encode
    last: tuple[Any, bytes] = (None, b"")

    def write(message: Any) -> bytes:
        nonlocal last
        known, raw = last
        if message is known:
            return raw
        raw = encode(message)
        if len(raw) > _PACK_FROM_BYTES:
            raw = PACKED + zlib.compress(raw, _FASTEST)
            last = message, raw
        return raw

    return write


def _unpack(raw: bytes) -> bytes:
    inflate = zlib.decompressobj()
    try:
        found = inflate.decompress(memoryview(raw)[1:], _UNPACKED_BYTES_MAX)
    except zlib.error as wrong:
        raise Malformed(f"what came is packed, and cannot be unpacked: {wrong}") from None
    if not inflate.eof or inflate.unused_data:
        raise Malformed(f"what came is packed, and is cut off, or more than {_UNPACKED_BYTES_MAX} bytes, or followed by more")
    return found
