"""The certificate authority of one job: made at its launch, it signs a certificate for each role, and its key is forgotten.

So nobody can be let in later, not even by who reads the run directory, and another job's certificates are worth nothing here. Keys
are of the elliptic curve P-256: one is made in less than a millisecond, where RSA takes a tenth of a second, and a handshake costs
the coordinator, to which thousands of agents may come at once, a fraction of RSA's.
"""

from __future__ import annotations

import datetime
import secrets
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from . import files

#: Looked at when a connection is made, so it must outlast the job.
VALID_FOR = datetime.timedelta(days=366)
#: Nodes' clocks differ; one that is behind must not find the certificates of the future.
_VALID_BEFORE = datetime.timedelta(days=1)
_TOKEN_BYTES = 32
#: Which side of a connection a role's certificate is for. The coordinator is also its own client.
_SERVER, _CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
_SIDES = {"coordinator": (_SERVER, _CLIENT), "agent": (_SERVER, _CLIENT), "user": (_CLIENT,)}


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_hex(_TOKEN_BYTES)


def issue(run_dir: Path, run_id: str, valid_for: datetime.timedelta = VALID_FOR, token: str | None = None) -> str:
    """Make the job's authority, and write what its processes need to RUN_DIR/credentials; returns the job's token (`token`, if
    it is given).

    Raises:
        UsageError: the folder cannot be written, or the run id cannot be part of a name.
    """
    names = {role: files.name_of(role, run_id) for role in files.ROLES}
    token = token or new_token()
    key = ec.generate_private_key(ec.SECP256R1())
    until = datetime.datetime.now(datetime.UTC) + valid_for
    issuer = _name(files.name_of("authority", run_id))
    authority = _builder(issuer, issuer, key.public_key(), key, until).add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
    contents = {files.AUTHORITY_FILE: _pem(authority.sign(key, hashes.SHA256())), files.TOKEN_FILE: f"{token}\n".encode()}
    for role, name in names.items():
        own = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(_name(name), issuer, own.public_key(), key, until)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), False)
            .add_extension(x509.ExtendedKeyUsage(_SIDES[role]), False)
        )
        contents[f"{role}.crt"] = _pem(certificate.sign(key, hashes.SHA256()))
        contents[f"{role}.key"] = own.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    files.write_folder(run_dir, contents)
    return token


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, signer: ec.EllipticCurvePrivateKey, until: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(datetime.datetime.now(datetime.UTC), until) - _VALID_BEFORE)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
