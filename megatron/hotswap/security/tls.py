"""TLS 1.3 with a job's credentials, for connections that are plain sockets, and why a handshake failed, in words."""

from __future__ import annotations

import contextlib
import socket
import ssl

from ..errors import UsageError
from .files import Credentials, name_of

_PROBE_TIMEOUT_S = 5.0
_FOREIGN = "the certificate shown to it is not of this job, but of another one, or of an earlier run in the same directory"
#: What the other side says when it refuses a certificate (alerts of RFC 8446, section 6.2), by OpenSSL's names.
_ALERTS = {
    "CERTIFICATE_REQUIRED": "it asks for a certificate of this job, and none was shown",
    "CERTIFICATE_EXPIRED": "the certificate shown to it has expired",
    "UNKNOWN_CA": _FOREIGN,
    "BAD_CERTIFICATE": _FOREIGN,
    "DECRYPT_ERROR": _FOREIGN,
    "WRONG_VERSION_NUMBER": "it does not speak TLS, so it is no part of this job, or was started without encryption",
    "BAD_RECORD_MAC": "what came is not what was sent: it was changed on its way",
    "UNEXPECTED_EOF_WHILE_READING": "it closed the connection in the middle of the TLS handshake",
}
_EXPIRED = 10  # X509_V_ERR_CERT_HAS_EXPIRED


class PeerTls:
    """Agent to agent: both sides show the job's agent certificate, and believe only that."""

    def __init__(self, credentials: Credentials) -> None:
        self.name = name_of("agent", credentials.run_id)
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, credentials)
        self._server.verify_mode = ssl.CERT_REQUIRED
        self._server.num_tickets = 0  # nothing may come on an idle connection; and no session is ever resumed
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT, credentials)

    def wrap(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *, server: bool) -> ssl.SSLObject:
        """One side of a connection whose bytes the caller moves."""
        if server:
            return self._server.wrap_bio(incoming, outgoing, server_side=True)
        return self._client.wrap_bio(incoming, outgoing, server_hostname=self.name)


def _context(protocol: int, credentials: Credentials) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cadata=credentials.authority.decode("ascii"))
        context.load_cert_chain(credentials.certificate_file, credentials.key_file)
    except (ValueError, OSError) as damaged:  # ssl.SSLError is an OSError
        raise UsageError(f"the certificates in {credentials.folder} cannot be used: {damaged}; start the job anew") from damaged
    return context


def in_words(failure: OSError) -> str:
    """Why a handshake, or what came after it, failed."""
    if isinstance(failure, ssl.SSLCertVerificationError):
        return f"its certificate {_judged(failure)}"
    reason = getattr(failure, "reason", None) or ""
    for alert, words in _ALERTS.items():
        if alert in reason:
            return words
    return str(failure) or "no answer in time"


def _judged(failure: ssl.SSLCertVerificationError) -> str:
    if failure.verify_code == _EXPIRED:
        return "has expired"
    return f"is not of this job, but of another one, or of an earlier run in the same directory ({failure.verify_message})"


def why_refused(address: str, credentials: Credentials) -> str | None:
    """gRPC says only that a connection failed. Do the handshake with the coordinator once more; returns why it fails, in words. None: it
    does not, or nobody is there. Blocks for some seconds at most."""
    host, port = address.rsplit(":", 1)
    context = _context(ssl.PROTOCOL_TLS_CLIENT, credentials)
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, int(port)), _PROBE_TIMEOUT_S) as sock,
            context.wrap_socket(sock, server_hostname=name_of("coordinator", credentials.run_id)) as tls,
        ):
            if tls.recv(1):  # in TLS 1.3 the server judges the client's certificate when the client is through already
                return None
    except ConnectionResetError:
        pass
    except ssl.SSLError as failure:
        return in_words(failure)
    except OSError:
        return None
    return _why_not_believed(credentials)


def _why_not_believed(credentials: Credentials) -> str | None:
    """gRPC's server hangs up on a certificate without a word. But it has shown one that this side believes, so both have the same
    authority, and this side can judge its own certificate as the server does."""
    judge, shows = _context(ssl.PROTOCOL_TLS_SERVER, credentials), _context(ssl.PROTOCOL_TLS_CLIENT, credentials)
    judge.verify_mode = ssl.CERT_REQUIRED
    shows.check_hostname, shows.verify_mode = False, ssl.CERT_NONE  # this side's judgement is known
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client, server = shows.wrap_bio(to_client, to_server), judge.wrap_bio(to_server, to_client, server_side=True)
    try:
        for side in (client, server, client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as failure:
        return f"it refuses the certificate shown to it, which {_judged(failure)}"
    except ssl.SSLError as failure:
        return in_words(failure)
    return None
