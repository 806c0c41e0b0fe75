"""Certificates and keys for a federation: its own certificate authority, a certificate of the
server, two keys for each site.

They are meant for trials and for federations that trust one operator; where there is a certificate
authority, use its certificates.
"""

from __future__ import annotations

import datetime
import ipaddress
import secrets
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CURVE = ec.SECP384R1()
"""What Flower takes for the keys of SuperNodes."""


def _write(path: Path, content: bytes, secret: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # or the new content would have the old permissions
    path.touch(mode=0o600 if secret else 0o644)
    path.write_bytes(content)
    return path


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.TraditionalOpenSSL
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def certificates(
    folder: Path, hosts: Sequence[str] = ("localhost", "127.0.0.1"), days: float = 30
) -> dict[str, Path]:
    """Make `ca.pem`, `server.pem` and `server.key` for a server under these names or addresses;
    returns the paths by name.

    The key of the certificate authority is not stored, so no other certificate can be made with it.
    """
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    start = min(now, end) - datetime.timedelta(days=1)
    ca_key, key = (ec.generate_private_key(CURVE) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "foedus certificate authority")])

    def builder(subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        made = x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number())
        return made.not_valid_before(start).not_valid_after(end)

    sign_only = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    authority = (
        builder(issuer, ca_key.public_key())
        .add_extension(x509.BasicConstraints(True, 0), True)
        .add_extension(sign_only, True)
    )
    authority = authority.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), False
    )
    names = x509.SubjectAlternativeName([_name(h) for h in hosts])
    server = builder(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])]), key.public_key()
    )
    server = server.add_extension(names, False).add_extension(
        x509.BasicConstraints(False, None), True
    )
    server = server.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
    server = server.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False
    )
    pem = serialization.Encoding.PEM
    return {
        "ca": _write(folder / "ca.pem", authority.sign(ca_key, hashes.SHA384()).public_bytes(pem)),
        "certificate": _write(
            folder / "server.pem", server.sign(ca_key, hashes.SHA384()).public_bytes(pem)
        ),
        "key": _write(folder / "server.key", _pem(key), secret=True),
    }


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def node_key(path: Path) -> tuple[Path, Path]:
    """Make the key pair of a site: `path` (secret, stays there) and `path`.pub (for the server)."""
    key = ec.generate_private_key(CURVE)
    form = serialization.PrivateFormat.OpenSSH
    private = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return _write(path, private, secret=True), _write(path.with_name(path.name + ".pub"), public)


def shared_secret(path: Path) -> Path:
    """Make a secret that two processes of this machine share."""
    return _write(path, secrets.token_bytes(32), secret=True)


def signing_key(path: Path) -> tuple[Path, str]:
    """Make the Ed25519 key with which a site signs its messages of secure aggregation; returns the
    public part in hexadecimal.
    """
    key = ed25519.Ed25519PrivateKey.generate()
    raw = (
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return _write(
        path, key.private_bytes(*raw), secret=True
    ), key.public_key().public_bytes_raw().hex()


def expired(certificate: Path) -> datetime.datetime | None:
    """When a certificate expired, or None."""
    end = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    return end if end <= datetime.datetime.now(datetime.UTC) else None
