"""The owner's epoch on the medium: a pure codec, no I/O.

Every owner of the pool begins an epoch (rule 2). The index knows it; so that an index rebuilt from the medium begins a
later one than any owner before, it is written here too, durably, before the owner serves anybody. An epoch's record
lies at ``OWNER_LBAS[epoch % 2]``, so a write that is torn or lost leaves that of the epoch before. ::

    offset  size  field
         0     8  magic b"MESHEPOC"
         8     4  record_version: u32, 3
        12     4  zero
        16     8  epoch: u64
        24    16  pool_uuid
        40    16  drive_uuid
        56     4  crc32 (zlib) of bytes 0 to 55
        60  4036  zero
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from meshfusion.jbof.envelope import check_magic, check_sealed, damaged, sealed
from meshfusion.jbof.errors import FormatError
from meshfusion.jbof.format import LBA_BYTES, OWNER_LBAS, UUID_BYTES
from meshfusion.jbof.label import Label

EPOCH_RECORD_VERSION: Final = 3

_MAGIC: Final = b"MESHEPOC"
_RECORD: Final = struct.Struct("<8sIIQ16s16s")
assert _RECORD.size == 56


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """``epoch``: of the owner that wrote it. The UUIDs are 16 bytes each."""

    epoch: int
    pool_uuid: bytes
    drive_uuid: bytes

    @property
    def lba(self) -> int:
        """Where it belongs."""
        return OWNER_LBAS[self.epoch % len(OWNER_LBAS)]


def encode_epoch_record(record: EpochRecord) -> bytes:
    """One logical block, for ``record.lba``."""
    assert len(record.pool_uuid) == len(record.drive_uuid) == UUID_BYTES
    body = _RECORD.pack(_MAGIC, EPOCH_RECORD_VERSION, 0, record.epoch, record.pool_uuid, record.drive_uuid)
    return sealed(body, LBA_BYTES)


def decode_epoch_record(data: bytes, *, where: str = "the epoch record") -> EpochRecord:
    """Raises :class:`~meshfusion.jbof.envelope.MediumFormatError`."""
    check_magic(data, _MAGIC, EPOCH_RECORD_VERSION, where, "epoch record")
    if len(data) != LBA_BYTES:
        raise damaged(f"{where} is {len(data)} bytes long instead of {LBA_BYTES}")
    check_sealed(data, _RECORD.size, where)
    _, _, _, epoch, pool_uuid, drive_uuid = _RECORD.unpack_from(data)
    return EpochRecord(epoch, pool_uuid, drive_uuid)


def last_epoch(copies: Iterable[bytes], label: Label) -> int:
    """The latest epoch that the blocks at ``OWNER_LBAS`` tell of this drive; 0 when they tell none."""
    epochs = [0]
    for data, lba in zip(copies, OWNER_LBAS, strict=True):
        try:
            record = decode_epoch_record(data)
        except FormatError:
            continue
        if (record.pool_uuid, record.drive_uuid, record.lba) == (label.pool_uuid, label.drive_uuid, lba):
            epochs.append(record.epoch)
    return max(epochs)
