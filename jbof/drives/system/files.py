"""Files and block devices named by the user as drives, for trying."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from meshfusion.jbof.drives.capabilities import AtomicWrites, Capabilities
from meshfusion.jbof.drives.domain import DomainMap, FailureDomain, Location
from meshfusion.jbof.drives.drive import Drive, DriveKind, Found, Passed, without_twins
from meshfusion.jbof.drives.identity import DriveIdentity, inode_identity, label_identity
from meshfusion.jbof.errors import FormatError, MediaError, MeshFusionError
from meshfusion.jbof.format import DATA_START_LBA, LABEL_LBAS, LBA_BYTES
from meshfusion.jbof.label import decode_label_copies
from meshfusion.jbof.nvme.namespaces import DeallocatedRead, LbaFormat
from meshfusion.jbof.sizes import format_size

_BLKGETSIZE64: Final = 0x80081272  # include/uapi/linux/fs.h, on 64-bit machines
_BLKSSZGET: Final = 0x1268
_HEALTH_NOTE: Final = "unknown: a file has no health of its own"


class FileDrives:
    """A :class:`~meshfusion.jbof.drives.drive.DriveSource`. ``paths``: files, block devices, or folders of files."""

    def __init__(self, paths: Iterable[Path], domains: DomainMap | None = None) -> None:
        self._paths = tuple(paths)
        self._domains = domains or DomainMap()

    def discover(self) -> Found:
        drives, passed = [], []
        for path in self._paths:
            try:
                files = _files(path)
            except MeshFusionError as error:
                passed.append(Passed(str(path), error.message, error.next_step))
                continue
            for file in files:
                try:
                    drives.append(self._drive(file))
                except MeshFusionError as error:
                    passed.append(Passed(str(file), error.message, error.next_step))
        found = without_twins(drives)
        return Found(found.drives, (*passed, *found.passed))

    def _drive(self, path: Path) -> Drive:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            about = os.fstat(fd)
            capabilities = _capabilities(fd, about, path)
            _refuse_too_small(path, capabilities.lba_count * capabilities.lba_bytes)
            identity = _identity(fd, about)
        except OSError as error:
            raise _unusable(path, error) from error
        finally:
            os.close(fd)
        found = FailureDomain(drive=identity.unique, dpu="this machine", enclosure=f"filesystem {about.st_dev:x}")
        return Drive(
            identity=identity,
            kind=DriveKind.FILE,
            where=str(path),
            capabilities=capabilities,
            location=Location(slot=path.name, transport="file"),
            domain=self._domains.placed(found, serial=identity.serial, slot=path.name),
            health=None,
            health_note=_HEALTH_NOTE,
        )


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise MediaError(f"{path} does not exist", next_step="Name a file, a block device or a folder of files.")
    if not path.is_dir():
        return [path]
    try:
        return sorted(entry for entry in path.iterdir() if entry.is_file())
    except OSError as error:
        raise _unusable(path, error) from error


def _refuse_too_small(path: Path, size_bytes: int) -> None:
    """Where a pool's folder is named, locks and lists lie beside its data."""
    if size_bytes <= DATA_START_LBA * LBA_BYTES:
        raise MediaError(
            f"{path} is not larger than the head of a drive, {format_size(DATA_START_LBA * LBA_BYTES)}",
            next_step="Name a larger file or a block device.",
        )


def _identity(fd: int, about: os.stat_result) -> DriveIdentity:
    """By the pool's label where there is one."""
    copies = [os.pread(fd, LBA_BYTES, lba * LBA_BYTES) for lba in LABEL_LBAS]
    try:
        return label_identity(decode_label_copies(copies).drive_uuid)
    except FormatError:
        is_device = stat.S_ISBLK(about.st_mode)
        return inode_identity(0 if is_device else about.st_dev, about.st_rdev if is_device else about.st_ino)


def _capabilities(fd: int, about: os.stat_result, path: Path) -> Capabilities:
    if stat.S_ISREG(about.st_mode):
        size_bytes, lba_bytes = about.st_size, LBA_BYTES
    elif stat.S_ISBLK(about.st_mode):
        size_bytes = struct.unpack("<Q", fcntl.ioctl(fd, _BLKGETSIZE64, bytes(8)))[0]
        lba_bytes = struct.unpack("<I", fcntl.ioctl(fd, _BLKSSZGET, bytes(4)))[0]
    else:
        raise MediaError(
            f"{path} is neither a file nor a block device",
            next_step="Name a file, a block device or a folder of files.",
        )
    # What a filesystem or another driver keeps whole is not known, so it is taken to be one block.
    return Capabilities(
        lba_count=size_bytes // lba_bytes,
        lba_bytes=lba_bytes,
        metadata_bytes=0,
        formats=(LbaFormat(lba_bytes, 0, 0),),
        hints=None,
        can_deallocate=stat.S_ISREG(about.st_mode),
        deallocate_limits=None,
        deallocated_read=DeallocatedRead.ZEROS if stat.S_ISREG(about.st_mode) else DeallocatedRead.UNKNOWN,
        has_volatile_write_cache=True,
        atomic=AtomicWrites(1, 1, None, None),
        reservations=None,
        is_shared=False,
        is_write_protected=not os.access(path, os.W_OK),
        endurance_group=0,
    )


def _unusable(path: Path, error: OSError) -> MediaError:
    return MediaError(f"{path} cannot be read: {error.strerror}", next_step="Check its permissions.")
