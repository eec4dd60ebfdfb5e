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
            if not _lock(directory_fd):
                raise _in_use(layout, *_owner(directory_fd))
            data_fd = _open(layout.data, os.O_RDONLY)
            try:
                if not _lock(data_fd):
                    raise PoolBusyError(
                        f"the data {layout.data} of {layout.directory} is in use by another pool directory",
                        next_step="use that pool, or create one with data of its own",
                    )
            except BaseException:
                os.close(data_fd)
                raise
        except BaseException:
            os.close(directory_fd)
            raise
        owner = cls(directory_fd, data_fd)
        owner._note(f"{os.getpid()}\n")
        return owner

    def announce_service(self, address: str) -> None:
        """Note for others that this process serves the pool at ``address``."""
        self._note(f"{os.getpid()}\n{address}\n")

    def _note(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk: only the name of the owner is lost
            os.ftruncate(self.directory_fd, 0)  # first, so that no address of an earlier owner stays
            os.pwrite(self.directory_fd, text.encode(), 0)

    def release(self) -> None:
        os.close(self.data_fd)
        os.close(self.directory_fd)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise MediaError(f"{path} cannot be locked: {error}", next_step="check its permissions") from error


def _owner(directory_fd: int) -> tuple[str, str]:
    """The owner's process, and the address of its service; "" when it has none or has not announced it yet."""
    lines = os.pread(directory_fd, 200, 0).decode(errors="replace").split("\n")
    process, address = lines[0].strip(), lines[1] if len(lines) > 2 else ""
    return process or "unknown", address if address.isprintable() else ""


def _in_use(layout: PoolLayout, process: str, address: str) -> PoolBusyError:
    message = f"the pool {layout.directory} is in use by process {process}"
    if address:
        return PoolBusyError(
            f"{message}, the service at {address}",
            next_step=f"point engines at that service with `service: {address}`, or stop it first: kill {process}",
        )
    return PoolBusyError(
        message,
        next_step="one process owns a pool: stop that one first; to share the pool, let one `meshfusion --config FILE` "
        "own it and point every engine at its address with `service:`",
    )


def _lock(descriptor: int) -> bool:
    """With some patience: who only asks whether the pool is owned holds the lock for an instant."""
    for attempt in range(_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if attempt + 1 < _TRIES:
                time.sleep(_BETWEEN_TRIES_S)
        except OSError as error:
            raise MediaError(f"a lock was refused: {error}", next_step="use a filesystem with flock") from error
    return False
