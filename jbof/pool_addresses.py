"""How a pool of several drives numbers its segments and blocks. Pure.

A drive has a *number* in its pool, durable in its label, and its namespace is that number plus one. A segment's number
is the pool's, with the drive's in its high bits; of a drive's blocks, extents name the namespace and the drive's own
LBA. Where one integer has to say which block is meant, it is a *pool LBA*: the drive's number above the drive's LBA. On
drive 0 both are the drive's own.
"""

from __future__ import annotations

from typing import Final

MAX_DRIVE_NUMBER: Final = 254  # NSIDs from 1 to 255
SEGMENT_BITS: Final = 24  # of a drive's own number of a segment; with the drive's they are an unsigned 32-bit integer
MAX_DRIVE_SEGMENTS: Final = 1 << SEGMENT_BITS
LBA_BITS: Final = 40  # of a drive's own LBA: 4 PiB in blocks of 4096 bytes


def first_segment(drive_number: int) -> int:
    """The pool's number of the drive's segment 0."""
    assert 0 <= drive_number <= MAX_DRIVE_NUMBER, drive_number
    return drive_number << SEGMENT_BITS


def drive_of_segment(segment: int) -> int:
    return segment >> SEGMENT_BITS


def namespace_of(drive_number: int) -> int:
    """The NSID under which the drive is exported, and that extents name."""
    assert 0 <= drive_number <= MAX_DRIVE_NUMBER, drive_number
    return drive_number + 1


def drive_of_namespace(namespace: int) -> int:
    """Which drive is exported under this NSID; of none, a number that no drive has."""
    return namespace - 1


def pool_lba(namespace: int, lba: int) -> int:
    """A block of a namespace as one integer."""
    assert 1 <= namespace <= MAX_DRIVE_NUMBER + 1, namespace
    assert 0 <= lba < 1 << LBA_BITS, lba
    return namespace - 1 << LBA_BITS | lba


def is_on_a_drive(namespace: int, lba: int, lba_count: int) -> bool:
    """Could a pool have these blocks?"""
    return 1 <= namespace <= MAX_DRIVE_NUMBER + 1 and 0 <= lba <= (1 << LBA_BITS) - max(lba_count, 1)


def is_one_drives(address: int, lba_count: int) -> bool:
    """Are these blocks, from a pool LBA on, of one drive?"""
    assert lba_count > 0, lba_count
    return address >> LBA_BITS == address + lba_count - 1 >> LBA_BITS


def split_pool_lba(address: int) -> tuple[int, int]:
    """(namespace, LBA in it) of a pool LBA."""
    namespace, lba = (address >> LBA_BITS) + 1, address & (1 << LBA_BITS) - 1
    assert 1 <= namespace <= MAX_DRIVE_NUMBER + 1, address
    return namespace, lba
