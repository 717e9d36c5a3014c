"""Messages that were sent as msgpack, read: exactly what the type says, or one named error.

The decoder builds nothing but the given types, so no message can run code. An announced length costs nothing until its bytes are
there, and what they become is at most some tens of times as large; whoever receives bounds the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from .errors import Malformed

_WORDS_MAX = 300


def decoder(kind: Any) -> Callable[[bytes], Any]:
    """A function that reads a message of this type (or union of types).

    It raises:
        Malformed: the bytes are no such message.
    """
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(raw: bytes) -> Any:
        try:
            return decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as wrong:  # the last: nested deeper than any message is
            raise Malformed(f"what came is no message that is known here: {str(wrong)[:_WORDS_MAX]}") from None

    return read
