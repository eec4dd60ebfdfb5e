"""One look at a pool's drive where it should be: is it there, is it the same, does it answer, and how fast?

A look opens the drive for itself and past the page cache, and shares nothing with those who use it: one that hangs
holds up nobody. Nothing is written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshfusion.dpu.drive_answers import HangingDriveError
from meshfusion.jbof.drives.identity import DriveIdentity, inode_identity, label_identity
from meshfusion.jbof.drives.life_words import Fault
from meshfusion.jbof.drives.system.block_errors import RESERVATION_CONFLICT
from meshfusion.jbof.errors import FormatError, MediaError
from meshfusion.jbof.format import LABEL_LBAS, LBA_BYTES, OWNER_LBAS
from meshfusion.jbof.label import Label, decode_label_copies
from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.media.drive_facts import drive_name
from meshfusion.jbof.media.faults import DataFileError, MediaFault
from meshfusion.jbof.media.file import DataFile, DirectMode, Place, open_data_file

_FAULTS: Final = {
    MediaFault.FULL: Fault.NO_SPACE,
    MediaFault.READ_ONLY: Fault.READ_ONLY,
    MediaFault.MISSING: Fault.ABSENT,
    MediaFault.SHORT: Fault.ABSENT,
}
_FAULTS_OF_ERRNO: Final = {
    errno.ENODEV: Fault.ABSENT,
    errno.ESHUTDOWN: Fault.ABSENT,
    errno.ETIMEDOUT: Fault.TIMEOUT,
    RESERVATION_CONFLICT: Fault.CONFLICT,
}
# Of this process or machine, not of a drive: callers over the network can use its descriptors up.
_OUR_OWN: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


@dataclass(frozen=True, slots=True)
class Sighting:
    """``identity``: of what is there; None: nothing that could be opened. ``place``: of that. ``fault``: of a command
    that failed; ``latencies_s``: of those that did not. ``epochs``: the blocks that tell of the owner, raw; empty when
    they cannot be read. ``problem``: what is wrong, for people. ``is_blind``: with this process, which could not
    look; it says nothing of the drive."""

    identity: DriveIdentity | None
    place: Place | None = None
    latencies_s: tuple[float, ...] = ()
    epochs: tuple[bytes, ...] = ()
    fault: Fault | None = None
    problem: str = ""
    is_blind: bool = False


def fault_of(error: MediaError) -> Fault:
    """What a failed command says of its drive."""
    if isinstance(error, HangingDriveError):
        return Fault.TIMEOUT
    if not isinstance(error, DataFileError):
        return Fault.MEDIA
    return _FAULTS_OF_ERRNO.get(error.errno) or _FAULTS.get(error.fault, Fault.MEDIA)


def look_at(path: Path, expected: Label | None, lbas: Sequence[int]) -> Sighting:
    """``expected``: its label, where it was here before. ``lbas``: blocks to read, for their latencies."""
    try:
        data = open_data_file(path, writable=False, direct=DirectMode.AUTO)
    except DataFileError as error:
        return Sighting(None, problem=error.message, is_blind=error.errno in _OUR_OWN)
    with contextlib.closing(data):
        place = data.place
        try:
            label = decode_label_copies([_block(data, lba) for lba in LABEL_LBAS], where=str(path))
        except FormatError as error:
            return Sighting(inode_identity(place.device, place.inode), place, problem=error.message)
        except MediaError as error:
            return _failed(place, expected, error)
        problem = _other(path, data, label)
        if problem:
            return Sighting(None, place, problem=problem, is_blind=not _can_open_files())
        identity = label_identity(label.drive_uuid)
        try:
            epochs = tuple(_block(data, lba) for lba in OWNER_LBAS)
            latencies_s = tuple(_timed(data, lba) for lba in lbas if lba < data.lba_count)
        except MediaError as error:
            return Sighting(identity, place, fault=fault_of(error), problem=error.message)
        return Sighting(identity, place, latencies_s, epochs)


def _other(path: Path, data: DataFile, label: Label) -> str:
    """Why it cannot be the drive of that label, or not all of it."""
    found = drive_name(path)
    if label.drive_name and found != label.drive_name:
        return f"{path} is the drive {found or 'without a serial'!r} with the label of {label.drive_name!r}"
    needed_bytes = label.end_lba * label.lba_bytes
    return f"{path} is cut short: {data.size_bytes} bytes of {needed_bytes}" if data.size_bytes < needed_bytes else ""


def _can_open_files() -> bool:
    """Without, no drive has a name."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno not in _OUR_OWN
    return True


def _failed(place: Place, expected: Label | None, error: MediaError) -> Sighting:
    """Its label cannot be read: who was here before is taken to be here still, and has failed."""
    if expected is None:
        return Sighting(None, place, problem=error.message)
    fault = fault_of(error)
    identity = None if fault is Fault.ABSENT else label_identity(expected.drive_uuid)
    return Sighting(identity, place, fault=fault, problem=error.message)


def _timed(data: DataFile, lba: int) -> float:
    began_s = time.monotonic()
    _block(data, lba)
    return time.monotonic() - began_s


def _block(data: DataFile, lba: int) -> bytes:
    with AlignedBuffer(max(LBA_BYTES, os.sysconf("SC_PAGE_SIZE"))) as buffer:
        data.read_into(lba, buffer.view[:LBA_BYTES])
        return bytes(buffer.view[:LBA_BYTES])
