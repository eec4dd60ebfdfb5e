"""Reservations of a block device through Linux: NVMe's, and SCSI's alike (include/uapi/linux/pr.h, Documentation/block/
pr.rst).

Linux has had no call to read reservations but for the newest versions; an NVMe namespace is asked with the command
itself.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path
from typing import Final

from meshfusion.jbof.drives.reservation import ReservationConflictError
from meshfusion.jbof.drives.system.ioctls import (
    NVME_IO,
    PR_PREEMPT_ABORT,
    PR_REGISTER,
    PR_RELEASE,
    PR_RESERVE,
    nvme_passthru,
)
from meshfusion.jbof.errors import MediaError, UnsupportedError
from meshfusion.jbof.nvme.command import IoOpcode
from meshfusion.jbof.nvme.reservations import REPORT_BYTES, ReservationReport, ReservationType, parse_report

_REGISTRATION: Final = struct.Struct("<QQII")  # old key, new key, flags
_RESERVATION: Final = struct.Struct("<QII")  # key, type, flags
# Own key, the victim's, type, flags. The structure's names old_key and new_key, and Documentation/block/pr.rst, say it
# the other way round; but drivers/nvme/host/pr.c and drivers/scsi/sd.c both pass the first on as the caller's key.
_PREEMPTION: Final = struct.Struct("<QQII")
_IGNORE_KEY: Final = 1 << 0

# A positive result of a call is NVMe's status, from Linux 6.5 on SCSI's in its place (PR_STS_*); of a SCSI disk it is
# SCSI's result, whose lowest byte is the status.
_NVME_CONFLICT: Final = 0x83
_NVME_INVALID_OPCODE: Final = 0x01
_NVME_STATUS_BITS: Final = 0x7FF
_SCSI_CONFLICT: Final = 0x18
_SCSI_STATUS_BITS: Final = 0xFF
_WRONG_ID_FORMAT: Final = 0x18  # Host Identifier Inconsistent Format, of a report
_NO_SUCH_THING: Final = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL)


class BlockReservations:
    """:class:`~meshfusion.jbof.drives.reservation.Reservations` of an open block device.

    Needs CAP_SYS_ADMIN. The host is what the driver takes for one: for NVMe its host identifier, or, where that is not
    set, the controller.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self._path = path
        self._is_nvme = path.resolve().name.startswith("nvme")

    @classmethod
    def open(cls, path: Path) -> BlockReservations:
        """Raises :class:`~meshfusion.jbof.errors.MediaError`."""
        try:
            return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), path)
        except OSError as error:
            raise MediaError(
                f"{path} cannot be opened: {error.strerror}", next_step="Run this as root; check that it is there."
            ) from error

    def close(self) -> None:
        """The reservation stays."""
        os.close(self._fd)

    def register(self, key: int) -> None:
        """A host that is registered replaces its key. NVMe wants the replacement said, so it is tried second."""
        try:
            self._ioctl("register", PR_REGISTER, _REGISTRATION.pack(0, key, 0, 0))
        except ReservationConflictError:
            self._ioctl("register", PR_REGISTER, _REGISTRATION.pack(1, key, _IGNORE_KEY, 0))

    def unregister(self, key: int) -> None:
        self._ioctl("unregister", PR_REGISTER, _REGISTRATION.pack(key, 0, 0, 0))

    def acquire(self, key: int, kind: ReservationType) -> None:
        self._ioctl("reserve", PR_RESERVE, _RESERVATION.pack(key, kind, 0))

    def preempt_and_abort(self, key: int, victim_key: int, kind: ReservationType) -> None:
        self._ioctl("preempt-abort", PR_PREEMPT_ABORT, _PREEMPTION.pack(key, victim_key, kind, 0))

    def release(self, key: int, kind: ReservationType) -> None:
        self._ioctl("release", PR_RELEASE, _RESERVATION.pack(key, kind, 0))

    def report(self) -> ReservationReport | None:
        if not self._is_nvme:
            return None
        for extended in (True, False):
            words = (REPORT_BYTES // 4 - 1, int(extended))
            try:
                done = nvme_passthru(
                    self._fd,
                    NVME_IO,
                    IoOpcode.RESERVATION_REPORT.value,
                    nsid=self._nsid(),
                    dwords=words,
                    read_bytes=REPORT_BYTES,
                )
            except OSError as error:
                raise self._failed("report", error.strerror or str(error)) from error
            if done.status & _NVME_STATUS_BITS != _WRONG_ID_FORMAT:
                break
        if done.status:
            raise self._failed("report", f"NVMe status {done.status:#06x}")
        return parse_report(done.data, extended=extended)

    def _nsid(self) -> int:
        """NVME_IOCTL_ID."""
        return fcntl.ioctl(self._fd, 0x4E40)

    def _ioctl(self, what: str, number: int, argument: bytes) -> None:
        try:
            status = fcntl.ioctl(self._fd, number, bytearray(argument))  # of bytes it would return a copy
        except OSError as error:
            if error.errno == errno.EBADE:
                raise self._conflict(what) from error
            if error.errno in _NO_SUCH_THING:
                raise self._lacking(f"{what}: {error.strerror}") from error
            raise self._failed(what, error.strerror or str(error)) from error
        if self._is_nvme and status & _NVME_STATUS_BITS == _NVME_INVALID_OPCODE:
            raise self._lacking("the drive does not know the command")
        if self._is_conflict(status):
            raise self._conflict(what)
        if status:
            raise self._failed(what, f"status {status:#06x}")

    def _is_conflict(self, status: int) -> bool:
        if self._is_nvme:
            return status & _NVME_STATUS_BITS == _NVME_CONFLICT or status == _SCSI_CONFLICT
        return status & _SCSI_STATUS_BITS == _SCSI_CONFLICT

    def _lacking(self, why: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self._path} has no reservations: {why}",
            next_step="Use a drive that has them: `mfctl jbof show` tells.",
        )

    def _conflict(self, what: str) -> ReservationConflictError:
        return ReservationConflictError(
            f"{self._path}: {what}: reservation conflict", next_step="See which other service uses this drive."
        )

    def _failed(self, what: str, why: str) -> MediaError:
        return MediaError(
            f"{self._path}: {what} failed: {why}", next_step="Run this as root; see the kernel's log for the drive."
        )
