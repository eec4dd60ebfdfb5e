"""What every structure on the medium shares: magic and version in front, a checksum behind, zeros to the block's end.

::

    0         8  magic
    8         4  version: u32, little-endian
    ...          the rest of the body
    n         4  crc32 (zlib) of bytes 0 to n - 1: u32, little-endian
    n + 4        zero up to the next block boundary

The version is looked at before the checksum, because another version may keep its checksum elsewhere.
"""

from __future__ import annotations

import enum
import struct
import zlib
from typing import Final

from meshfusion.jbof.errors import FormatError

CRC_BYTES: Final = 4

_MAGIC_VERSION: Final = struct.Struct("<8sI")
_CRC: Final = struct.Struct("<I")


class FormatFault(enum.Enum):
    """What is wrong with bytes that should be ours. Later members are more telling than earlier ones."""

    FOREIGN = "foreign"  # not written by MeshFusion
    DAMAGED = "damaged"  # ours, but not as written: checksum, truncation, impossible values
    VERSION = "version"  # ours, in a format that this version does not know


class MediumFormatError(FormatError):
    """A :class:`FormatError` that tells its cases apart by ``fault``."""

    def __init__(self, fault: FormatFault, message: str, *, next_step: str) -> None:
        super().__init__(message, next_step=next_step)
        self.fault = fault


def sealed(body: bytes, length_bytes: int) -> bytes:
    """``body``, its checksum, zeros up to ``length_bytes``."""
    assert len(body) + CRC_BYTES <= length_bytes
    return (body + _CRC.pack(zlib.crc32(body))).ljust(length_bytes, b"\0")


def check_sealed(data: bytes, body_bytes: int, what: str) -> None:
    """Raise unless ``data`` is as :func:`sealed` made it from its first ``body_bytes``."""
    (stored,) = _CRC.unpack_from(data, body_bytes)
    computed = zlib.crc32(data[:body_bytes])
    if stored != computed:
        raise damaged(f"{what} is damaged: its checksum is {computed:08x}, {stored:08x} is stored")
    if data.count(0, body_bytes + CRC_BYTES) != len(data) - body_bytes - CRC_BYTES:
        raise damaged(f"{what} is damaged: bytes that must be zero are not")


def check_magic(data: bytes, magic: bytes, version: int, what: str, kind: str) -> None:
    """Raise unless ``data`` starts with ``magic`` and ``version``; ``kind`` is what the magic stands for."""
    if data[: len(magic)] != magic:
        raise MediumFormatError(
            FormatFault.FOREIGN,
            f"{what} does not start with {magic.decode('ascii')}: this is not a MeshFusion {kind}",
            next_step="Check the path; `mfctl pool create` makes a new pool (never on a file that holds other data).",
        )
    if len(data) < _MAGIC_VERSION.size:
        raise damaged(f"{what} is truncated to {len(data)} bytes")
    found = _MAGIC_VERSION.unpack_from(data)[1]
    if found != version:
        raise MediumFormatError(
            FormatFault.VERSION,
            f"{what} has format version {found}; this MeshFusion reads and writes version {version}",
            next_step="Open the pool with the MeshFusion version that wrote it, or create a new pool elsewhere.",
        )


def damaged(message: str) -> MediumFormatError:
    """The error for bytes that are ours and not as written."""
    return MediumFormatError(
        FormatFault.DAMAGED,
        message,
        next_step="Run `mfctl pool check`. A pool holds only recomputable data: create it anew if it stays damaged.",
    )
