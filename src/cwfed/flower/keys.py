"""Keys and certificates for a federation on one machine, to try it: an authority, the server's certificate, a key a node.

In production the certificate comes from your own authority; a node's key is an ordinary SSH key (ecdsa-sha2-nistp384).
"""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

LASTS = datetime.timedelta(days=365)


def certificates(folder: Path) -> None:
    """ca.crt, server.crt and server.key for this machine's own addresses."""
    folder.mkdir(parents=True, exist_ok=True)
    authority_key, server_key = _key(), _key()
    authority = _certificate(
        "cwfed trial authority", authority_key.public_key(), "cwfed trial authority", authority_key
    )
    names = [
        x509.DNSName("localhost"),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        x509.IPAddress(ipaddress.ip_address("::1")),
    ]
    server = _certificate("localhost", server_key.public_key(), "cwfed trial authority", authority_key, names)
    (folder / "ca.crt").write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    (folder / "server.crt").write_bytes(server.public_bytes(serialization.Encoding.PEM))
    _write_secret(
        folder / "server.key",
        server_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )


def node_key(folder: Path, name: str) -> Path:
    """A node's key pair in SSH's format; gives the private one, the public one has the ending .pub."""
    folder.mkdir(parents=True, exist_ok=True)
    key, path = _key(), folder / name
    _write_secret(
        path,
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        ),
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_name(f"{name}.pub").write_bytes(public)
    return path


def _key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _write_secret(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)


def _certificate(
    subject: str,
    key: ec.EllipticCurvePublicKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    names: list[x509.GeneralName] | None = None,
) -> x509.Certificate:
    def called(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(called(subject))
        .issuer_name(called(issuer))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + LASTS)
        .add_extension(x509.BasicConstraints(ca=names is None, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=names is None,
        crl_sign=names is None,
        encipher_only=False,
        decipher_only=False,
    )
    builder = builder.add_extension(usage, critical=True)
    if names is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(issuer_key, hashes.SHA384())
