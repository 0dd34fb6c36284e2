"""Keys and certificates of a federation: an authority, the server's certificate, a key for each node, and the key that signs the app.

A node's key is an ordinary SSH key (ecdsa-sha2-nistp384), and so is the key that signs apps (ed25519).
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import json
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import NameOID

from cwfed.core.errors import CwfedError

LASTS = datetime.timedelta(days=365)
AUTHORITY = "cwfed federation authority"
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def certificates(folder: Path) -> None:
    """Make ca.crt, server.crt and server.key for this machine's own addresses; the key of the authority is not kept."""
    folder.mkdir(parents=True, exist_ok=True)
    key = authority(folder / "ca.crt")
    server_certificate(folder, key, LOOPBACK)


def authority(path: Path) -> ec.EllipticCurvePrivateKey:
    """A new authority: its certificate in this file; its key is returned and not written."""
    key = _key()
    made = _certificate(AUTHORITY, key.public_key(), AUTHORITY, key, lasts=10 * LASTS)
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return key


def server_certificate(folder: Path, authority_key: ec.EllipticCurvePrivateKey, hosts: Iterable[str]) -> None:
    """Make a new server.key, and server.crt for these names and addresses."""
    hosts, key = list(dict.fromkeys(hosts)), _key()
    made = _certificate(hosts[0], key.public_key(), AUTHORITY, authority_key, [_general(host) for host in hosts])
    write_private(folder / "server.key", key)
    (folder / "server.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))


def days_left(certificate: Path) -> float:
    """Days until a certificate expires."""
    ends = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    return (ends - datetime.datetime.now(datetime.UTC)) / datetime.timedelta(days=1)


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def write_private(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """A private key that only its owner may read."""
    _write_secret(
        path,
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )


def read_private(path: Path) -> ec.EllipticCurvePrivateKey:
    """The authority's key in a file; CwfedError if there is none."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise CwfedError(f"{path} is not the private key of an authority ({error})") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CwfedError(f"{path} is not the private key of an authority of cwfed")
    return key


def public_key(path: Path) -> str:
    """The line in a node's public key file; CwfedError unless it is a key that Flower accepts."""
    try:
        line = path.read_text(encoding="utf-8").strip()
        key = serialization.load_ssh_public_key(line.encode())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise CwfedError(
            f"{path} is not a public key ({error}): a node's operator makes one with cwfed flower key"
        ) from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise CwfedError(f"{path} is not an ECDSA key: Flower's nodes need one, as cwfed flower key makes it")
    return " ".join(line.split()[:2])  # without the comment


# --- signing apps


def signing_key(path: Path) -> str:
    """Make a key that signs apps; returns the public key as a line, for the nodes that trust it."""
    key = ed25519.Ed25519PrivateKey.generate()
    _write_secret(
        path,
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        ),
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return public.decode()


def sign(bundle: bytes, path: Path) -> str:
    """A signature of an app, in the form in which Flower's nodes check it (`--trusted-entities`)."""
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise CwfedError(f"{path} is not a key that signs apps ({error})") from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise CwfedError(f"{path} is not a key that signs apps")
    now = int(datetime.datetime.now(datetime.UTC).timestamp())
    signature = key.sign(now.to_bytes(8, "big") + hashlib.sha256(bundle).digest())
    return json.dumps({"signed_at": now, "signature": base64.urlsafe_b64encode(signature).decode().rstrip("=")})


def node_key(folder: Path, name: str) -> Path:
    """Make a node's key pair in SSH's format; returns the private key's file, beside which the public one ends with .pub."""
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
    path.unlink(missing_ok=True)  # an existing file might have other permissions
    path.touch(mode=0o600)
    path.write_bytes(content)


def _certificate(
    subject: str,
    key: ec.EllipticCurvePublicKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    names: list[x509.GeneralName] | None = None,
    lasts: datetime.timedelta = LASTS,
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
        .not_valid_after(now + lasts)
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
