"""A certificate authority for tests, made with the ``cryptography`` package: real keys, real signatures."""

from __future__ import annotations

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from meshfusion.dpu.api.security.client_security import ClientSecurity
from meshfusion.dpu.api.security.server_tls import ServerTlsFiles

Key = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey | rsa.RSAPrivateKey

DAY = timedelta(days=1)
NO_PASSPHRASE = serialization.NoEncryption()


class Pair(NamedTuple):
    """Paths of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """Its certificate lies at ``path``."""

    def __init__(self, folder: Path, name: str = "ca", key: Key | None = None) -> None:
        self._folder = folder
        self._key = key or ec.generate_private_key(ec.SECP256R1())
        self._name = _name(f"the test's {name}")
        now = datetime.now(UTC)
        builder = _builder(self._name, self._name, self._key.public_key(), now - DAY, now + 90 * DAY)
        self.certificate = builder.add_extension(x509.BasicConstraints(True, None), critical=True).sign(
            self._key, self._hash
        )
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(self.pem)

    @property
    def _hash(self) -> hashes.SHA256 | None:
        """Edwards' curves have their own inside."""
        return None if isinstance(self._key, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey) else hashes.SHA256()

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        subject: str,
        *,
        file: str | None = None,
        sans: tuple[str, ...] = ("localhost", "127.0.0.1"),
        key: Key | None = None,
        start: timedelta = -DAY,
        life: timedelta = 60 * DAY,
        uses: tuple[x509.ObjectIdentifier, ...] = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH),
    ) -> Pair:
        """``start`` and ``life`` from now on. Written beside and moved into place, as tools that renew do."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        builder = _builder(_name(subject), self._name, key.public_key(), now + start, now + life)
        builder = builder.add_extension(x509.BasicConstraints(False, None), critical=True)
        if uses:
            builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        if sans:
            builder = builder.add_extension(x509.SubjectAlternativeName(list(map(_san, sans))), critical=False)
        certificate = builder.sign(self._key, self._hash)
        pair = Pair(self._folder / f"{file or subject}.pem", self._folder / f"{file or subject}.key")
        pem = serialization.Encoding.PEM
        replace(pair.key, key.private_bytes(pem, serialization.PrivateFormat.PKCS8, NO_PASSPHRASE), mode=0o600)
        replace(pair.certificate, certificate.public_bytes(pem))
        return pair


def server_files(ca: Authority, client_ca: Authority | None) -> ServerTlsFiles:
    return ServerTlsFiles(*ca.issue("server"), None if client_ca is None else client_ca.path)


def client_of(ca: Authority, pair: Pair | None = None, token_file: Path | None = None) -> ClientSecurity:
    certificate, key = pair or (None, None)
    return ClientSecurity(ca.path, certificate, key, token_file=token_file)


def replace(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(data)
    beside.chmod(mode)
    os.replace(beside, path)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _san(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.UniformResourceIdentifier(text) if "://" in text else x509.DNSName(text)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: CertificatePublicKeyTypes, start: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
    )
