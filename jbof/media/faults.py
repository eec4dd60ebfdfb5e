"""What a file or block device can do wrong, as errors that say what to do about it."""

from __future__ import annotations

import enum
import errno
import os
from pathlib import Path
from typing import Final

from meshfusion.jbof.errors import MediaError


class MediaFault(enum.Enum):
    FULL = "full"
    READ_ONLY = "read_only"  # or not permitted
    SHORT = "short"  # the medium ends before the transfer does
    MISSING = "missing"  # nothing usable at this path
    EXISTS = "exists"
    UNSUPPORTED = "unsupported"  # O_DIRECT is required and not to be had
    IO = "io"


_FAULT_OF_ERRNO: Final = {
    errno.ENOSPC: MediaFault.FULL,
    errno.EDQUOT: MediaFault.FULL,
    errno.EROFS: MediaFault.READ_ONLY,
    errno.EACCES: MediaFault.READ_ONLY,
    errno.EPERM: MediaFault.READ_ONLY,
    errno.ENOENT: MediaFault.MISSING,
    errno.ENOTDIR: MediaFault.MISSING,
    errno.EISDIR: MediaFault.MISSING,
    errno.ELOOP: MediaFault.MISSING,
    errno.ENAMETOOLONG: MediaFault.MISSING,
    errno.ENXIO: MediaFault.MISSING,
    errno.EEXIST: MediaFault.EXISTS,
}
_NEXT_STEP: Final = {
    MediaFault.FULL: "Free space on this filesystem (or raise the quota), or choose a smaller size.",
    MediaFault.READ_ONLY: "Make the path readable and writable for this user, or choose another path.",
    MediaFault.SHORT: "The file was truncated. Create the pool anew: it holds only recomputable data.",
    MediaFault.MISSING: "Check the path; `mfctl pool create` makes a new pool.",
    MediaFault.EXISTS: "Choose another path, or remove this file if nothing needs it.",
    MediaFault.UNSUPPORTED: "Put the pool on a filesystem with O_DIRECT (ext4, XFS), or set direct to auto.",
    MediaFault.IO: "Look at the kernel log (dmesg) and the drive's health; replace the drive if it repeats.",
}


class DataFileError(MediaError):
    """A :class:`MediaError` that says which operation failed where. ``errno`` is 0 when the kernel reported none."""

    def __init__(self, fault: MediaFault, what: str, path: Path, *, offset_bytes: int = 0, errno_: int = 0) -> None:
        cause = f": {os.strerror(errno_)} ({errno.errorcode.get(errno_, errno_)})" if errno_ else ""
        super().__init__(f"{path}: {what}{cause}", next_step=_NEXT_STEP[fault])
        self.fault = fault
        self.path = path
        self.offset_bytes = offset_bytes
        self.errno = errno_

    @classmethod
    def from_os_error(cls, error: OSError, what: str, path: Path, *, offset_bytes: int = 0) -> DataFileError:
        code = error.errno or 0
        fault = _FAULT_OF_ERRNO.get(code, MediaFault.IO)
        return cls(fault, what, path, offset_bytes=offset_bytes, errno_=code)
