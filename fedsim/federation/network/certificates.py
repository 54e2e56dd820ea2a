"""Makes certificates and keys for TLS and node authentication, to be thrown away after a run."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedsim.types import FedsimError

_CLOCK_SKEW = timedelta(minutes=5)
"""Certificates are valid from so long ago, for machines whose clocks are behind."""


@dataclass(frozen=True, kw_only=True)
class Authority:
    """Names the files of a certificate authority and of the one server that it vouches for."""

    certificate: Path
    """What nodes verify the server with; no secret."""
    key: Path
    server_certificate: Path
    server_key: Path


def make_authority(folder: Path, hosts: Sequence[str], *, days: int = 2) -> Authority:
    """Writes ca.crt, ca.key, server.crt and server.key into `folder`; `hosts` are names and IPs.

    Both certificates end after `days`. The files are readable by their owner alone.

    Raises:
        FedsimError: one of the files exists, or others may write into the folder.
    """
    authority = Authority(
        certificate=folder / "ca.crt",
        key=folder / "ca.key",
        server_certificate=folder / "server.crt",
        server_key=folder / "server.key",
    )
    prepare(folder, list(vars(authority).values()))
    ca_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name, server_name = _name("fedsim throw-away authority"), _name("fedsim server")
    ca = (
        _builder(ca_name, ca_name, ca_key.public_key(), ca_key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    server = (
        _builder(server_name, ca_name, server_key.public_key(), ca_key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    write_private(authority.certificate, ca.public_bytes(Encoding.PEM))
    write_private(authority.key, _private(ca_key, PrivateFormat.PKCS8))
    write_private(authority.server_certificate, server.public_bytes(Encoding.PEM))
    write_private(authority.server_key, _private(server_key, PrivateFormat.PKCS8))
    return authority


def make_node_key(path: Path) -> Path:
    """Writes a node's private key (ECDSA P-384, of OpenSSH's form) and returns its public key.

    `path` is for `flower-supernode --auth-supernode-private-key`, what is returned (`path` + .pub)
    for `flwr supernode register`.

    Raises:
        FedsimError: one of the files exists, or others may write into the folder.
    """
    public = path.with_name(path.name + ".pub")
    prepare(path.parent, [path, public])
    key = ec.generate_private_key(ec.SECP384R1())
    write_private(path, _private(key, PrivateFormat.OpenSSH))
    line = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    write_private(public, line + b"\n")
    return public


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
    days: int,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False
        )
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: ec.EllipticCurvePrivateKey, form: PrivateFormat) -> bytes:
    return key.private_bytes(Encoding.PEM, form, NoEncryption())


def prepare(folder: Path, files: Sequence[Path]) -> None:
    """Makes the folder (for its owner alone) and refuses to replace any of `files`.

    Raises:
        FedsimError: one of the files exists, or others may write into the folder.
    """
    for missing in reversed([folder, *folder.parents]):
        missing.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_mode & 0o022:
        raise FedsimError(
            f"{folder} is no place for keys, since others may write into it: chmod 700 {folder}"
        )
    for file in files:
        if file.exists() or file.is_symlink():
            raise FedsimError(f"{file} exists: remove it, or name another folder")


def write_private(path: Path, content: bytes) -> None:
    """Writes a new file that only its owner may read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
