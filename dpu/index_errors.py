"""What LMDB's errors mean to a user."""

from __future__ import annotations

import errno
import os
from typing import Final

import lmdb

from meshfusion.jbof.errors import FormatError, MediaError, MeshFusionError, PoolBusyError, ServiceUnavailableError

OTHER_POOL = "put the pool's own drive in its place (device names may have changed); indexes cannot be swapped"
REBUILD = "make the index anew from what is on the medium: `mfctl pool rebuild-index`"

_SYSTEM_ERRORS: Final = {
    errno.ENOSPC: "free space on its filesystem",
    errno.EDQUOT: "free space on its filesystem, or raise the quota",
    errno.EROFS: "look at the kernel's log for why its filesystem is read-only (dmesg), and mount it writable again",
    errno.EIO: "look at the kernel's log (dmesg) and the drive's health; replace the drive if it repeats",
}


def index_error(path: str, error: lmdb.Error) -> MeshFusionError:
    """What LMDB's error means to a user."""
    if "already open in this process" in str(error):
        return PoolBusyError(f"the index {path} is open in this process already", next_step="use the open pool")
    if type(error) is lmdb.Error and "closed" in str(error):
        return ServiceUnavailableError(f"the index {path} is closed", next_step="open the pool again")
    if isinstance(error, lmdb.MapFullError):
        return MediaError(f"the index {path} is full", next_step="create the pool with larger chunks or more capacity")
    for code, next_step in _SYSTEM_ERRORS.items():
        if os.strerror(code) in str(error):  # LMDB passes on what the system says, and only its words
            return MediaError(f"the index {path} cannot be written: {error}", next_step=next_step)
    if isinstance(error, lmdb.DiskError | lmdb.ReadonlyError):
        return MediaError(f"the index {path} cannot be written: {error}", next_step="check space and permissions there")
    return FormatError(f"the index {path} is damaged: {error}", next_step=REBUILD)


class OtherPoolError(FormatError):
    """The index and the drive are of different pools."""
