"""One owner per pool and per drive (rule 2): exclusive locks on the pool's directory and on its data.

Both, because two pool directories (a copy of one, say) may name the same device. Locks end with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path

from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.jbof.errors import MediaError, PoolBusyError

_TRIES = 5
_BETWEEN_TRIES_S = 0.02


@dataclass(frozen=True, slots=True)
class OwnerLock:
    """Descriptors that hold the locks; worker processes open the data beside them, without locking it."""

    directory_fd: int
    data_fd: int

    @classmethod
    def take(cls, layout: PoolLayout) -> OwnerLock:
        """Take the pool for this process. Raises :class:`PoolBusyError`, or :class:`MediaError` for anything else."""
        directory_fd = _open(layout.lock, os.O_RDWR | os.O_CREAT)
        try:
            _lock(directory_fd, f"the pool {layout.directory} is in use by process {_owner(directory_fd)}")
            data_fd = _open(layout.data, os.O_RDONLY)
            try:
                _lock(data_fd, f"the data {layout.data} of {layout.directory} is in use by another pool directory")
            except BaseException:
                os.close(data_fd)
                raise
        except BaseException:
            os.close(directory_fd)
            raise
        with contextlib.suppress(OSError):  # a full disk: only the name of the owner is lost
            os.pwrite(directory_fd, f"{os.getpid()}\n".encode(), 0)
            os.ftruncate(directory_fd, len(f"{os.getpid()}\n"))
        return cls(directory_fd, data_fd)

    def release(self) -> None:
        os.close(self.data_fd)
        os.close(self.directory_fd)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise MediaError(f"{path} cannot be locked: {error}", next_step="check its permissions") from error


def _owner(directory_fd: int) -> str:
    return os.pread(directory_fd, 200, 0).decode(errors="replace").strip() or "unknown"


def _lock(descriptor: int, busy_message: str) -> None:
    """With some patience: who only asks whether the pool is owned holds the lock for an instant."""
    for attempt in range(_TRIES):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt + 1 < _TRIES:
                time.sleep(_BETWEEN_TRIES_S)
        except OSError as error:
            raise MediaError(f"a lock was refused: {error}", next_step="use a filesystem with flock") from error
    raise PoolBusyError(
        busy_message,
        next_step="one process owns a pool; to share it, run `meshfusion --config FILE` and point engines at its "
        "address with `service:`",
    )
