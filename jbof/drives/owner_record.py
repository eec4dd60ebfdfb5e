"""Who reserved a drive: the owner record's bytes on a medium, version 1. Pure codec.

Two blocks of 4096 bytes from `RESERVATION_RECORD_LBA` on, written in turns; only on drives that know reservations. ::

    offset  size  field
         0     8  magic b"MESHOWNR"
         8     4  version: u32, 1
        12     4  flags: u32, bit 0: the owner ended in order
        16     8  sequence: u64, of this write; the block is number sequence % 2
        24     8  epoch: u64
        32     8  reservation key: u64
        40    16  owner's UUID
        56     4  crc32 (zlib) of bytes 0 to 55
        60  4036  zero

The newest valid block counts. A write that is torn damages the older one only.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Sequence
from typing import Final, NamedTuple

from meshfusion.jbof.drives.ownership import OwnerRecord
from meshfusion.jbof.envelope import FormatFault, MediumFormatError, check_magic, check_sealed, damaged, sealed

BLOCK_BYTES: Final = 4096
BLOCK_COUNT: Final = 2

_MAGIC: Final = b"MESHOWNR"
_VERSION: Final = 1
_IS_CLEAN: Final = 1
_BODY: Final = struct.Struct("<8sIIQQQ16s")
assert _BODY.size == 56


class StoredRecord(NamedTuple):
    sequence: int
    record: OwnerRecord


def encode_record(stored: StoredRecord) -> bytes:
    record = stored.record
    flags = _IS_CLEAN if record.is_clean else 0
    body = _BODY.pack(_MAGIC, _VERSION, flags, stored.sequence, record.epoch, record.key, record.owner.bytes)
    return sealed(body, BLOCK_BYTES)


def decode_record(data: bytes, *, where: str) -> StoredRecord:
    """Raises :class:`~meshfusion.jbof.envelope.MediumFormatError`."""
    check_magic(data, _MAGIC, _VERSION, where, "drive's owner record")
    if len(data) != BLOCK_BYTES:
        raise damaged(f"{where} is {len(data)} bytes long instead of {BLOCK_BYTES}")
    check_sealed(data, _BODY.size, where)
    _, _, flags, sequence, epoch, key, owner = _BODY.unpack_from(data)
    if flags & ~_IS_CLEAN or not key or not epoch:
        raise damaged(f"{where} has impossible values: flags {flags:#x}, epoch {epoch}, key {key:#x}")
    return StoredRecord(sequence, OwnerRecord(epoch, uuid.UUID(bytes=owner), key, bool(flags & _IS_CLEAN)))


def newest_record(blocks: Sequence[bytes], *, where: str) -> StoredRecord | None:
    """None where both blocks are zeros: there has been no owner.

    Raises :class:`~meshfusion.jbof.envelope.MediumFormatError` when there is something else and no valid record, and
    for another version: then another MeshFusion owned the drive, and what it did is not known.
    """
    assert len(blocks) == BLOCK_COUNT
    found: list[StoredRecord] = []
    errors: list[MediumFormatError] = []
    for number, data in enumerate(blocks):
        if not any(data):
            continue
        try:
            found.append(decode_record(data, where=f"{where}: block {number} of the owner record"))
        except MediumFormatError as error:
            errors.append(error)
    for fault in errors:
        if fault.fault is FormatFault.VERSION or not found:
            raise fault
    return max(found, key=lambda stored: stored.sequence, default=None)
