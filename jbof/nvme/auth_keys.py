"""Keys of DH-HMAC-CHAP: their text, how they are made, and what becomes of them before use (Base 8.13). ::

    DHHC-1:HH:<base64 of key and CRC-32>:

``HH`` is 00 for a key that is used as it is, 01, 02 or 03 for one that is hashed with the NQN of its owner first: so a
key that leaks from one host's configuration is of no use under another name. The CRC-32 is that of RFC 1952, in little
endian order. nvme-cli (``nvme gen-dhchap-key``), Linux and SPDK read and write the same text.

No error and no ``repr`` shows a key or a part of one.
"""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
import hmac
import re
import secrets
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from meshfusion.jbof.errors import ConfigError

RandomBytes = Callable[[int], bytes]
"""As many unpredictable bytes as asked for."""

KEY_BYTES: Final = (32, 48, 64)

KEY_ID_CHARS: Final = 16

_CRC_BYTES: Final = 4
_TEXT: Final = re.compile(r"DHHC-1:([0-9]{2}):([A-Za-z0-9+/]+={0,2}):", re.ASCII)
_TRANSFORM_SUFFIX: Final = b"NVMe-over-Fabrics"
_NEXT_STEP: Final = (
    "Copy the key as a whole, from DHHC-1: to the last colon; `nvme gen-dhchap-key` and "
    "meshfusion.jbof.nvme.auth_keys.new_secret make new ones."
)


class AuthHash(enum.IntEnum):
    """Hash functions by their identifier, in keys and in messages (Base 8.13)."""

    SHA256 = 1
    SHA384 = 2
    SHA512 = 3

    @property
    def digest_bytes(self) -> int:
        return _DIGEST_BYTES[self]

    def hmac(self, key: bytes, data: bytes) -> bytes:
        return hmac.digest(key, data, self.name.lower())


_DIGEST_BYTES: Final = {AuthHash.SHA256: 32, AuthHash.SHA384: 48, AuthHash.SHA512: 64}


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """A key that host and target share. ``key``: 32, 48 or 64 bytes. ``transform``: None for a key used as it is."""

    key: bytes
    transform: AuthHash | None = None

    def __post_init__(self) -> None:
        if len(self.key) not in KEY_BYTES:
            raise _bad_key(f"has {len(self.key)} bytes; it must have 32, 48 or 64")

    def __repr__(self) -> str:
        return "Secret(hidden)"


def new_secret(
    length_bytes: int = 32,
    transform: AuthHash | None = AuthHash.SHA256,
    *,
    random_bytes: RandomBytes = secrets.token_bytes,
) -> Secret:
    """A new key. Older Linux wants it as long as the digest of its transform."""
    return Secret(random_bytes(length_bytes), transform)


def parse_secret(text: str) -> Secret:
    """From ``DHHC-1:...:``; white space around it, such as the end of a file's line, does not count.

    Raises :class:`~meshfusion.jbof.errors.ConfigError`, which does not show the text.
    """
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise _bad_key("has not the form DHHC-1:HH:<base64>:")
    identifier = int(match.group(1))
    if identifier not in (0, *AuthHash):
        raise _bad_key(f"names hash {identifier:02}; known are 00 to 03")
    try:
        decoded = base64.b64decode(match.group(2), validate=True)
    except binascii.Error:
        raise _bad_key("is no valid base64") from None
    key, crc = decoded[:-_CRC_BYTES], decoded[-_CRC_BYTES:]
    secret = Secret(key, AuthHash(identifier) if identifier else None)
    if crc != _crc(key):
        raise _bad_key("is damaged: its CRC-32 is not that of its bytes")
    return secret


def format_secret(secret: Secret) -> str:
    """What :func:`parse_secret` reads. It shows the key: for files that only their owner may read."""
    encoded = base64.b64encode(secret.key + _crc(secret.key)).decode()
    return f"DHHC-1:{secret.transform or 0:02}:{encoded}:"


def key_id(text: str) -> str:
    """By which it is told whether two have the same secret: 16 hexadecimal digits of its text. Not secret: a digest of
    random bytes, from which nobody finds them."""
    return hashlib.sha256(b"MeshFusion key id:" + text.strip().encode()).hexdigest()[:KEY_ID_CHARS]


def transformed_key(secret: Secret, nqn: str) -> bytes:
    """The key of the HMAC; ``nqn`` is the owner's: the host's for its key, the subsystem's for the controller's.

    As in ``nvme_auth_transform_key`` of Linux.
    """
    if secret.transform is None:
        return secret.key
    return secret.transform.hmac(secret.key, nqn.encode() + _TRANSFORM_SUFFIX)


def _crc(key: bytes) -> bytes:
    return zlib.crc32(key).to_bytes(_CRC_BYTES, "little")


def _bad_key(problem: str) -> ConfigError:
    return ConfigError(f"the DH-HMAC-CHAP key {problem}", next_step=_NEXT_STEP)
