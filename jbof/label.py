"""The label of a drive: what it is, for ever. A pure codec, no I/O.

**Label**: exactly one logical block (4096 bytes), at LBA 0 and again at LBA 1. A damaged or foreign copy beside a valid
one is told and passed over; copies of another version or that contradict each other make readers refuse. ::

    offset  size  field
         0     8  magic b"MESHFUSN"
         8     4  format_version: u32, 3
        12     4  flags: u32, 0 in version 3; a reader refuses bits that it does not know
        16    16  pool_uuid
        32    16  drive_uuid
        48     8  created_unix_s: u64
        56     4  lba_bytes: u32, 4096 in version 3
        60     4  segment_lba_count: u32, logical blocks of one segment
        64     4  segment_count: u32
        68     4  data_start_lba: u32, first block of segment 0 (at least 256: the first MiB is for labels and the like)
        72     4  alignment_lba_count: u32, at least 1; data_start_lba and segment_lba_count are multiples of it
        76     2  drive_number: u16, 0 to 254, among the pool's drives; in the high 8 bits of its segments' numbers
        78     2  drive_name_bytes: u16, at most 64
        80    64  drive_name: UTF-8, then zero; the drive's serial or what else tells it from others, empty for a file
       144     4  crc32 (zlib) of bytes 0 to 143
       148  3948  zero
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from meshfusion.jbof.envelope import FormatFault, MediumFormatError, check_magic, check_sealed, damaged, sealed
from meshfusion.jbof.format import (
    DATA_START_LBA,
    FORMAT_VERSION,
    LABEL_LBAS,
    LBA_BYTES,
    OWNER_LBAS,
    RESERVATION_RECORD_LBA,
    UUID_BYTES,
)

MAX_DRIVE_NAME_BYTES: Final = 64

_MAGIC: Final = b"MESHFUSN"
_LABEL: Final = struct.Struct("<8sII16s16sQIIIIIHH64s")
assert _LABEL.size == 144


@dataclass(frozen=True, slots=True)
class Label:
    """What a pool's drive is, for ever. ``pool_uuid`` and ``drive_uuid``: 16 bytes each."""

    pool_uuid: bytes
    drive_uuid: bytes
    created_unix_s: int
    segment_lba_count: int
    segment_count: int
    lba_bytes: int = LBA_BYTES
    data_start_lba: int = DATA_START_LBA
    alignment_lba_count: int = 1
    drive_number: int = 0
    drive_name: str = ""

    @property
    def end_lba(self) -> int:
        """The first block after the last segment: what the medium must at least hold."""
        return self.data_start_lba + self.segment_lba_count * self.segment_count


def encode_label(label: Label) -> bytes:
    """One logical block, to be written at each of ``LABEL_LBAS``."""
    name = label.drive_name.encode()
    assert len(label.pool_uuid) == len(label.drive_uuid) == UUID_BYTES
    assert label.lba_bytes == LBA_BYTES
    assert len(name) <= MAX_DRIVE_NAME_BYTES
    assert _is_possible(label), label
    body = _LABEL.pack(
        _MAGIC,
        FORMAT_VERSION,
        0,
        label.pool_uuid,
        label.drive_uuid,
        label.created_unix_s,
        label.lba_bytes,
        label.segment_lba_count,
        label.segment_count,
        label.data_start_lba,
        label.alignment_lba_count,
        label.drive_number,
        len(name),
        name,
    )
    return sealed(body, LBA_BYTES)


def decode_label(data: bytes, *, where: str = "the pool", name: str = "its label") -> Label:
    """Read one copy of the label. Raises :class:`MediumFormatError`, whose message names the medium as ``where`` and
    the copy as ``name``."""
    what = f"{where}: {name}"
    check_magic(data, _MAGIC, FORMAT_VERSION, what, "pool's label")
    if len(data) != LBA_BYTES:
        raise damaged(f"{what} is {len(data)} bytes long instead of {LBA_BYTES}")
    check_sealed(data, _LABEL.size, what)
    _, _, flags, pool_uuid, drive_uuid, created, lba_bytes, *sizes, drive, name_bytes, text = _LABEL.unpack_from(data)
    if flags or lba_bytes != LBA_BYTES:
        raise MediumFormatError(
            FormatFault.VERSION,
            f"{what} has flags {flags:#x} and lba_bytes {lba_bytes}; this MeshFusion knows flags 0x0 and "
            f"lba_bytes {LBA_BYTES}",
            next_step="Open the pool with the MeshFusion version that wrote it, or create a new pool elsewhere.",
        )
    segment_lbas, segments, data_start, alignment = sizes
    try:
        drive_name = text[:name_bytes].decode()
    except UnicodeDecodeError:
        raise damaged(f"{what}: its drive's name is not UTF-8") from None
    label = Label(
        pool_uuid, drive_uuid, created, segment_lbas, segments, lba_bytes, data_start, alignment, drive, drive_name
    )
    if name_bytes > MAX_DRIVE_NAME_BYTES or not _is_possible(label):
        raise damaged(
            f"{what} has impossible sizes: segment_lba_count {segment_lbas}, segment_count {segments}, "
            f"data_start_lba {data_start}, alignment_lba_count {alignment}, drive_name_bytes {name_bytes}"
        )
    return label


def decode_label_copies(copies: Sequence[bytes], *, where: str = "the pool") -> Label:
    """The label as :func:`examine_label_copies` finds it."""
    return examine_label_copies(copies, where=where)[0]


def examine_label_copies(copies: Sequence[bytes], *, where: str = "the pool") -> tuple[Label, tuple[str, ...]]:
    """The label, and what is wrong with those of its ``copies`` that are damaged or foreign.

    Raises :class:`MediumFormatError` when no copy is valid, and also when one is of another version or two valid ones
    differ. Beside a valid copy, a torn or overwritten one says only that something wrote there: the checksum of the
    other proves what this pool is. But a whole label of another version means that another MeshFusion took this medium
    for its own, and what it changed besides is not known; of two valid labels, neither proves itself. So when unsure,
    refuse: only cached chunks are at stake.
    """
    assert len(copies) == len(LABEL_LBAS)
    labels: list[Label] = []
    errors: list[MediumFormatError] = []
    for data, lba, ordinal in zip(copies, LABEL_LBAS, ("first", "second"), strict=True):
        try:
            labels.append(
                decode_label(data, where=where, name=f"the {ordinal} copy of its label (byte {lba * LBA_BYTES})")
            )
        except MediumFormatError as error:
            errors.append(error)
    telling = list(FormatFault)
    worst = max(errors, key=lambda error: telling.index(error.fault), default=None)
    if worst is not None and (not labels or worst.fault is FormatFault.VERSION):
        raise worst
    if any(label != labels[0] for label in labels):
        raise damaged(f"{where}: the two copies of its label are both valid and contradict each other")
    return labels[0], tuple(error.message for error in errors)


def _is_possible(label: Label) -> bool:
    alignment = label.alignment_lba_count
    return (
        min(label.segment_lba_count, label.segment_count, alignment) > 0
        and label.data_start_lba > max((*LABEL_LBAS, *OWNER_LBAS, RESERVATION_RECORD_LBA + 1))
        and label.data_start_lba % alignment == label.segment_lba_count % alignment == 0
    )
