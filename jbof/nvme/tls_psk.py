"""Pre-shared keys of NVMe/TCP over TLS, in the interchange format (NVMe/TCP transport specification 1.0, 3.6.1.5). ::

    NVMeTLSkey-1:HH:<base64 of key and CRC-32>:

``HH`` names the hash with which host and controller derive the retained PSK: 01 is SHA-256, of a key of 32 bytes, and
02 SHA-384, of one of 48. The CRC-32 is that of RFC 1952, in little endian order. nvme-cli (``nvme gen-tls-key``), Linux
and SPDK read and write the same text; SPDK takes it without a line's end.

No error shows a key or a part of one.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
import zlib
from typing import Final

from meshfusion.jbof.errors import ConfigError
from meshfusion.jbof.nvme.auth_keys import RandomBytes

KEY_BYTES: Final = {1: 32, 2: 48}
"""By the hash's identifier."""

_SHA256: Final = 1
_CRC_BYTES: Final = 4
_TEXT: Final = re.compile(r"NVMeTLSkey-1:([0-9]{2}):([A-Za-z0-9+/]+={0,2}):", re.ASCII)


def new_psk(random_bytes: RandomBytes = secrets.token_bytes) -> str:
    """A new key for SHA-256. Not to be shown, as everything here that returns one."""
    key = random_bytes(KEY_BYTES[_SHA256])
    encoded = base64.b64encode(key + _crc(key)).decode()
    return f"NVMeTLSkey-1:{_SHA256:02}:{encoded}:"


def parse_psk(text: str) -> bytes:
    """The configured PSK. White space around the text does not count. Raises
    :class:`~meshfusion.jbof.errors.ConfigError`, which does not show the text."""
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise _bad_key("has not the form NVMeTLSkey-1:HH:<base64>:")
    identifier = int(match.group(1))
    if identifier not in KEY_BYTES:
        raise _bad_key(f"names hash {identifier:02}; known are 01 and 02")
    try:
        decoded = base64.b64decode(match.group(2), validate=True)
    except binascii.Error:
        raise _bad_key("is no valid base64") from None
    key, crc = decoded[:-_CRC_BYTES], decoded[-_CRC_BYTES:]
    if len(key) != KEY_BYTES[identifier]:
        raise _bad_key(f"has {len(key)} bytes; with hash {identifier:02} it must have {KEY_BYTES[identifier]}")
    if crc != _crc(key):
        raise _bad_key("is damaged: its CRC-32 is not that of its bytes")
    return key


def _crc(key: bytes) -> bytes:
    return zlib.crc32(key).to_bytes(_CRC_BYTES, "little")


def _bad_key(problem: str) -> ConfigError:
    return ConfigError(
        f"the TLS key {problem}", next_step="Copy the key as a whole, from NVMeTLSkey-1: to the last colon."
    )
