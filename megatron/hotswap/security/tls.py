"""TLS 1.3 with a job's credentials, for connections that are plain sockets, and why a handshake failed, in words."""

from __future__ import annotations

import contextlib
import socket
import ssl

from ..errors import UsageError
from .files import Credentials, name_of

_PROBE_TIMEOUT_S = 5.0
#: What the other side says when it refuses a certificate (alerts of RFC 8446, section 6.2), by OpenSSL's names.
_ALERTS = {
    "CERTIFICATE_REQUIRED": "it asks for a certificate of this job, and none was shown",
    "CERTIFICATE_EXPIRED": "the certificate shown to it has expired",
    "UNKNOWN_CA": "the certificate shown to it is not of this job: another job's, or of an earlier run in the same directory",
    "BAD_CERTIFICATE": "the certificate shown to it is not of this job: another job's, or of an earlier run in the same directory",
    "DECRYPT_ERROR": "the certificate shown to it is not of this job: another job's, or of an earlier run in the same directory",
    "WRONG_VERSION_NUMBER": "it does not speak TLS, so it is no part of this job, or was started without encryption",
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


def _context(protocol: int, credentials: Credentials, *, certificate: bool = True) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cadata=credentials.authority.decode("ascii"))
        if certificate:
            context.load_cert_chain(credentials.certificate_file, credentials.key_file)
    except (ValueError, OSError) as damaged:  # ssl.SSLError is an OSError
        raise UsageError(f"the certificates in {credentials.folder} cannot be used: {damaged}; start the job anew") from damaged
    return context


def in_words(failure: OSError) -> str:
    """Why a handshake failed."""
    if isinstance(failure, ssl.SSLCertVerificationError):
        if failure.verify_code == _EXPIRED:
            return "its certificate has expired"
        return f"its certificate is not of this job ({failure.verify_message}): it is another job's, or this is an earlier run's directory"
    reason = getattr(failure, "reason", None) or ""
    for alert, words in _ALERTS.items():
        if alert in reason:
            return words
    return str(failure) or "no answer in time"


def why_refused(address: str, credentials: Credentials) -> str | None:
    """Do once more the handshake with the coordinator that gRPC has failed in, which says only that; returns why, in words. None: this
    handshake is fine. Blocks for some seconds at most."""
    host, port = address.rsplit(":", 1)
    context = _context(ssl.PROTOCOL_TLS_CLIENT, credentials)
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, int(port)), _PROBE_TIMEOUT_S) as sock,
            context.wrap_socket(sock, server_hostname=name_of("coordinator", credentials.run_id)) as tls,
            contextlib.suppress(TimeoutError),
        ):
            tls.recv(1)  # in TLS 1.3 the server judges the client's certificate when the client is through already
    except OSError as failure:
        return in_words(failure)
    return None
