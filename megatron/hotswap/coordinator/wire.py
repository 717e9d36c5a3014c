"""gRPC without generated code: one bidirectional stream an agent, one unary call for a user's commands, msgpack inside.

The messages are control/messages.py; msgspec checks every field's type, gRPC bounds every message's size. Every connection is TLS,
and both sides show a certificate of the job's own authority (security/). The server takes messages as bytes and reads them itself,
so that it can refuse one by its sender's name.
"""

from __future__ import annotations

from typing import Any

import grpc
import msgspec

from ..codec import decoder, packing_encoder
from ..control import messages as m
from ..errors import Malformed
from ..security.files import Credentials, name_of

SERVICE = "deadpool.Coordinator"
AGENT_STREAM = "Agent"
COMMAND = "Command"
MESSAGE_BYTES_MAX = 4 << 20
_AGENTS_MAX = 1 << 20
#: Of Status. A field that is added leaves it as it is; one that is taken away or changes its meaning does not.
STATUS_SCHEMA = 1

OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),  # a server counts its clients' pings as an attack, unless it has something to say in between
    ("grpc.enable_http_proxy", 0),
    ("grpc.so_reuseport", 0),  # a second coordinator on the same port must fail, not share it
    # When a job starts, or finds its coordinator again, all agents call at once: gRPC cancels calls at random once a thousand wait.
    ("grpc.server.max_pending_requests", _AGENTS_MAX),
    ("grpc.server.max_pending_requests_hard_limit", _AGENTS_MAX),
)


class Command(msgspec.Struct, frozen=True):
    """A user's command to a running job. Who may give it is said by the certificate."""

    injection: m.Injection | None = None
    save: bool = False  # write a durable generation
    release: str | None = None  # a node, from quarantine
    detail: bool = False  # the lists of the status too


class RankStatus(msgspec.Struct, frozen=True):
    """Where a rank is and how far. `step` and `phase` are those that it was in at its agent's last heartbeat; empty before the first."""

    rank: int
    node: str
    worker: int
    step: int | None
    phase: str
    holders: list[str]  # nodes that hold its replicas


class NodeStatus(msgspec.Struct, frozen=True):
    """A node that is here."""

    node: str
    state: str  # active, spare, starting or unhealthy
    heard_s: float  # since it was last heard


class LostStatus(msgspec.Struct, frozen=True):
    """A node that was given up."""

    t: float  # seconds since 1970
    node: str
    reason: str


class RecoveryStatus(msgspec.Struct, frozen=True):
    """A complete recovery, as summary.json has it."""

    t: float  # when it was complete, seconds since 1970
    kind: str  # reset, respawn or swap
    nodes_lost: list[str]
    ranks_respawned: list[int]
    reasons: list[str]
    generation: int
    steps_rerun: int
    total_s: float
    phases: dict[str, float]


class Status(msgspec.Struct, frozen=True):
    """The answer; docs/watching.md documents it, since `deadpool status --json` prints it. What is long is bounded (status.py), and
    only there where `Command.detail` asks for it."""

    ok: bool
    text: str
    phase: str = ""
    version: int = 0
    committed: int = -1
    step: int = 0
    nodes: dict[str, list[int]] = {}  # active node -> ranks
    spares: list[str] = []
    durable: int = -1  # newest generation that is whole on disk
    saving: bool = False  # whether one is being written, or is to be
    save_text: str = ""  # how the last one went
    schema: int = STATUS_SCHEMA
    run_id: str = ""
    world_size: int = 0
    step_s: float | None = None  # of the last completed step
    exposed_stall_s: float | None = None
    generation_lag: int | None = None  # completed steps after the committed generation
    generations_skipped: int = 0
    recoveries_total: int = 0
    nodes_lost_total: int = 0
    metrics: str = ""  # host:port of the coordinator's, if they are served
    ranks: list[RankStatus] = []
    agents: list[NodeStatus] = []
    lost: list[LostStatus] = []  # the last ones
    recoveries: list[RecoveryStatus] = []  # the last ones
    quarantined: dict[str, str] = {}  # node -> why, and until when


class _OldJoin(msgspec.Struct):
    """What a Join has had in every protocol."""

    protocol: int
    node: str = "?"


encode = msgspec.msgpack.Encoder().encode
encode_order = packing_encoder()
decode_from_agent = decoder(m.FromAgent)
decode_from_coordinator = decoder(m.FromCoordinator, packed=True)
decode_command = decoder(Command)
decode_status = decoder(Status)
_decode_old_join = decoder(_OldJoin)


def why_no_join(raw: bytes, wrong: Malformed) -> str:
    """Why a first message that cannot be read is refused: it may be the Join of another version."""
    try:
        old = _decode_old_join(raw)
    except Malformed:
        return str(wrong)
    if old.protocol == m.PROTOCOL:
        return str(wrong)
    return f"protocol {m.PROTOCOL} is spoken here, node {old.node[:255]!r} speaks {old.protocol}; install the same version"


# ---- TLS


def listen(server: grpc.aio.Server, address: str, shown: Credentials) -> int:
    """Serve at an address whoever has a certificate of the job; returns the port.

    Raises:
        RuntimeError: it is taken.
    """
    pair = (shown.key, shown.certificate)
    return int(server.add_secure_port(address, grpc.ssl_server_credentials([pair], shown.authority, require_client_auth=True)))


def channel(address: str, shown: Credentials, *more: tuple[str, Any]) -> grpc.aio.Channel:
    """A channel to the job's coordinator, wherever it runs now. `more`: options of gRPC's."""
    return grpc.aio.secure_channel(address, _client(shown), options=(*_expecting_coordinator(shown), *more))


def blocking_channel(address: str, shown: Credentials) -> grpc.Channel:
    """The same, for a caller without a loop."""
    return grpc.secure_channel(address, _client(shown), options=_expecting_coordinator(shown))


def _client(shown: Credentials) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(shown.authority, shown.key, shown.certificate)


def _expecting_coordinator(shown: Credentials) -> tuple[tuple[str, Any], ...]:
    return (*OPTIONS, ("grpc.ssl_target_name_override", name_of("coordinator", shown.run_id)))


def role_of(context: Any) -> str:
    """The role in the certificate of who calls: the first part of its name. gRPC has checked that the job's authority signed it."""
    names = context.auth_context().get("x509_common_name", [b""])
    return str(names[0].decode(errors="replace").split(".", 1)[0])
