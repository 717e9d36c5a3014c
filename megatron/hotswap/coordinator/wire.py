"""gRPC without generated code: one bidirectional stream an agent, one unary call for a user's commands, msgpack inside.

The messages are control/messages.py; msgspec checks every field's type, gRPC bounds every message's size.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..control import messages as m

SERVICE = "deadpool.Coordinator"
AGENT_STREAM = "Agent"
COMMAND = "Command"
MESSAGE_BYTES_MAX = 4 << 20

OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.so_reuseport", 0),  # a second coordinator on the same port must fail, not share it
)


class Command(msgspec.Struct, frozen=True):
    """A user's command to a running job."""

    token: str
    injection: m.Injection | None = None


class Status(msgspec.Struct, frozen=True):
    """The answer."""

    ok: bool
    text: str
    phase: str = ""
    version: int = 0
    committed: int = -1
    step: int = 0
    nodes: dict[str, list[int]] = {}  # active node -> ranks
    spares: list[str] = []


encode = msgspec.msgpack.Encoder().encode
decode_from_agent: Any = msgspec.msgpack.Decoder(m.FromAgent).decode
decode_from_coordinator: Any = msgspec.msgpack.Decoder(m.FromCoordinator).decode
decode_command: Any = msgspec.msgpack.Decoder(Command).decode
decode_status: Any = msgspec.msgpack.Decoder(Status).decode
