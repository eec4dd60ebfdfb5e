"""What must be true of certificates before anything is served or called with them. Files in, problems out.

The date comes in as an argument. Every problem is a :class:`~meshfusion.jbof.errors.FieldValueError`, whose field is
the key of a configuration's ``tls`` part.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, ObjectIdentifier

from meshfusion.dpu.api.security.files import SmallFile
from meshfusion.jbof.errors import FieldValueError

EXPIRY_WARNING: Final = timedelta(days=14)
# What gRPC's own TLS library takes of the other side, as tried with it; of others a handshake fails without a reason.
_KINDS: Final = frozenset({"RSA", "P-256", "P-384"})
_SIGNING_KINDS: Final = _KINDS | {"P-521", "Ed25519"}
_MIN_RSA_BITS: Final = 2048
_CURVES: Final = {"secp256r1": "P-256", "secp384r1": "P-384", "secp521r1": "P-521"}


class Purpose(enum.Enum):
    SERVER = ExtendedKeyUsageOID.SERVER_AUTH
    CLIENT = ExtendedKeyUsageOID.CLIENT_AUTH


@dataclass(frozen=True, slots=True)
class Expiry:
    """Of the first certificate of ``path`` that expires; in UTC."""

    path: Path
    not_after: datetime

    def warning(self, now: datetime) -> str | None:
        """Is it time for another one?"""
        if self.not_after - now > EXPIRY_WARNING:
            return None
        return f"{self.path} is valid only until {_date(self.not_after)}: put a new certificate in its place before"


def check_pair(certificate: SmallFile, key: SmallFile, purpose: Purpose, now: datetime) -> Expiry:
    """A certificate with the chain that leads to its CA, and the key of it."""
    chain = _certificates(certificate, "certificate")
    for one in chain:
        _check_dates(one, "certificate", now)
    _check_key_kind(chain[0], _KINDS, "certificate")
    for one in chain[1:]:
        _check_key_kind(one, _SIGNING_KINDS, "certificate")
    _check_order(chain)
    _check_purpose(chain[0], purpose)
    public = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    if _private_key(key).public_key().public_bytes(*public) != chain[0].public_key().public_bytes(*public):
        raise FieldValueError(
            f"is not the key of the certificate {certificate.path} ({_name(chain[0])})",
            "put the certificate and its key there together",
            field="key",
        )
    return Expiry(certificate.path, min(one.not_valid_after_utc for one in chain))


def check_authorities(file: SmallFile, field: str, now: datetime) -> Expiry:
    """CA certificates, of which one must be valid: an old and a new one may stand side by side."""
    found = _certificates(file, field)
    for one in found:
        _check_key_kind(one, _SIGNING_KINDS, field)
        if not _is_authority(one):
            raise FieldValueError(
                f"holds {_name(one)}, which is no certificate of a CA",
                "name the file with the certificate of the CA that signs the other side's certificates",
                field=field,
            )
    valid = [one for one in found if one.not_valid_before_utc <= now <= one.not_valid_after_utc]
    if not valid:
        for one in found:
            _check_dates(one, field, now)
    return Expiry(file.path, max(one.not_valid_after_utc for one in valid))


def _certificates(file: SmallFile, field: str) -> Sequence[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(file.data)
    except ValueError as error:
        raise FieldValueError(
            "holds no certificate in PEM form (or a damaged one)", "name a file with BEGIN CERTIFICATE in it",
            field=field,
        ) from error  # fmt: skip


def _private_key(file: SmallFile) -> PrivateKeyTypes:
    try:
        return load_pem_private_key(file.data, password=None)
    except TypeError as error:
        fix = f"store it without: openssl pkey -in {file.path} -out FILE, then chmod 600 FILE"
        raise FieldValueError("is protected by a passphrase, which nobody would type", fix, field="key") from error
    except (ValueError, UnsupportedAlgorithm):
        # Without its cause: a parser's words may quote what it read.
        raise FieldValueError(
            "holds no private key in PEM form (or a damaged one)", "name a file with BEGIN PRIVATE KEY in it",
            field="key",
        ) from None  # fmt: skip


def _check_dates(one: x509.Certificate, field: str, now: datetime) -> None:
    if now > one.not_valid_after_utc:
        problem = f"expired: {_name(one)} was valid until {_date(one.not_valid_after_utc)}"
        raise FieldValueError(problem, "put a new certificate in its place", field=field)
    if now < one.not_valid_before_utc:
        problem = f"is not valid yet: {_name(one)} is from {_date(one.not_valid_before_utc)} on"
        raise FieldValueError(problem, "check this machine's clock, or wait until then", field=field)


def _check_order(chain: Sequence[x509.Certificate]) -> None:
    for one, issuer in pairwise(chain):
        try:
            one.verify_directly_issued_by(issuer)
        except (ValueError, TypeError, InvalidSignature) as error:
            raise FieldValueError(
                f"holds {_name(one)} and then {_name(issuer)}, which did not sign it",
                "order it: the certificate first, then the one of its CA, and so on",
                field="certificate",
            ) from error


def _check_key_kind(one: x509.Certificate, kinds: frozenset[str], field: str) -> None:
    try:
        kind = _key_kind(one)
    except (ValueError, UnsupportedAlgorithm):
        kind = "of a kind that is not known here"
    if kind not in kinds:
        raise FieldValueError(
            f"{_name(one)} has a key that is {kind}",
            f"make one with a key that is {', '.join(sorted(kinds))} (RSA of {_MIN_RSA_BITS} bits or more)",
            field=field,
        )


def _key_kind(one: x509.Certificate) -> str:
    key = one.public_key()
    if isinstance(key, rsa.RSAPublicKey):
        return "RSA" if key.key_size >= _MIN_RSA_BITS else f"RSA of {key.key_size} bits"
    if isinstance(key, ec.EllipticCurvePublicKey):
        return _CURVES.get(key.curve.name, key.curve.name)
    return type(key).__name__.removesuffix("PublicKey")


def _check_purpose(one: x509.Certificate, purpose: Purpose) -> None:
    """One that names purposes must name this one; the other side would refuse it."""
    uses = _extended_uses(one)
    if uses and purpose.value not in uses and ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE not in uses:
        raise FieldValueError(
            f"{_name(one)} is for other purposes than that of a {purpose.name.lower()}",
            f"make one with extendedKeyUsage={'serverAuth' if purpose is Purpose.SERVER else 'clientAuth'}",
            field="certificate",
        )


def _extended_uses(one: x509.Certificate) -> frozenset[ObjectIdentifier]:
    try:
        return frozenset(one.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except x509.ExtensionNotFound:
        return frozenset()
    except ValueError as error:
        raise _bad_extensions(one) from error


def _is_authority(one: x509.Certificate) -> bool:
    try:
        return one.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False
    except ValueError as error:
        raise _bad_extensions(one) from error


def _bad_extensions(one: x509.Certificate) -> FieldValueError:
    return FieldValueError(f"{_name(one)} has extensions that cannot be read", "make a new one", field="certificate")


def _name(one: x509.Certificate) -> str:
    try:
        return f"the certificate of {one.subject.rfc4514_string() or 'nobody'}"
    except ValueError:
        return f"the certificate {one.serial_number:x}"


def _date(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M} UTC"
