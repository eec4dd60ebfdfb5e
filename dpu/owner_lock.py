"""One owner per pool and per drive (rule 2): exclusive locks on the pool's directory and on its data.

Both, because two pool directories (a copy of one, say) may name the same device. Locks end with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.jbof.errors import MediaError, PoolBusyError
from meshfusion.jbof.media.file import Place

_PATIENCE_S = 0.1
_SHARED_PATIENCE_S = 30.0
_BETWEEN_TRIES_S = 0.02
_MAX_NOTE_BYTES = 400


@dataclass(slots=True)
class OwnerLock:
    """Descriptors that hold the locks; worker processes open the data beside them, without locking it."""

    directory_fd: int
    data_fds: list[int]

    @classmethod
    def take(cls, layout: PoolLayout, data: Sequence[Path] = ()) -> OwnerLock:
        """Take the pool for this process. ``data``: of its drives; none given: of its only one.

        Raises :class:`PoolBusyError`, or :class:`MediaError` for anything else.
        """
        directory_fd = _take_directory(layout)
        try:
            data_fds = _lock_all(layout, data or (layout.data,))
        except BaseException:
            os.close(directory_fd)
            raise
        taken = cls(directory_fd, data_fds)
        taken._note(f"{os.getpid()}\n")
        return taken

    def announce_service(self, address: str, name: str = "") -> None:
        """Note for others that this process serves the pool at ``address``, as ``name`` where it serves several."""
        self._note(f"{os.getpid()}\n{address}\n" + (f"{name}\n" if name else ""))

    def _note(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk: only the name of the owner is lost
            os.ftruncate(self.directory_fd, 0)  # first, so that no address of an earlier owner stays
            os.pwrite(self.directory_fd, text.encode(), 0)

    def take_data(self, layout: PoolLayout, path: Path) -> None:
        """One more drive, or one that has come back; nothing to do when it is held. Raises as :meth:`take`."""
        try:
            found = Place.of(path.stat())
        except OSError as error:
            raise MediaError(f"{path} cannot be locked: {error}", next_step="attach the drive") from error
        if all(Place.of(os.fstat(held)) != found for held in self.data_fds):
            self.data_fds += _lock_all(layout, (path,))

    def release_data(self, place: Place) -> None:
        """A drive that has left the pool: others may have it."""
        for held in [held for held in self.data_fds if Place.of(os.fstat(held)) == place]:
            self.data_fds.remove(held)
            os.close(held)

    def release(self) -> None:
        for data_fd in self.data_fds:
            os.close(data_fd)
        os.close(self.directory_fd)


def served_at(layout: PoolLayout) -> str:
    """The address of the service that has the pool; "" when nobody has it, or who has it serves nobody."""
    return _announced(layout).address


def served_as(layout: PoolLayout) -> str:
    """What the pool is called by the service that has it and others; "" where it has no other."""
    return _announced(layout).name


class _Owner(NamedTuple):
    """``process``: its id, or what stands for it. ``address``, ``name``: "" where none is announced (yet)."""

    process: str
    address: str
    name: str


_NOBODY = _Owner("", "", "")


def _announced(layout: PoolLayout) -> _Owner:
    try:
        descriptor = os.open(layout.lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return _NOBODY
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _owner(descriptor)
    except OSError:
        return _NOBODY
    finally:
        os.close(descriptor)
    return _NOBODY


@contextlib.contextmanager
def lock_directory(layout: PoolLayout) -> Iterator[None]:
    """Nobody has the pool meanwhile; its drives may be away. Raises as :meth:`OwnerLock.take`."""
    descriptor = _take_directory(layout)
    try:
        yield
    finally:
        os.close(descriptor)


def _take_directory(layout: PoolLayout) -> int:
    descriptor = _open(layout.lock, os.O_RDWR | os.O_CREAT)
    try:
        if not _lock(descriptor):
            owner = _owner(descriptor)
            raise _in_use(layout, owner.process, owner.address)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def lock_data(layout: PoolLayout, path: Path) -> Iterator[None]:
    """Hold a drive that is to become one of the pool's. Raises PoolBusyError when another pool has it."""
    (descriptor,) = _lock_all(layout, (path,))
    try:
        yield
    finally:
        os.close(descriptor)


def _lock_all(layout: PoolLayout, data: Sequence[Path]) -> list[int]:
    descriptors: list[int] = []
    try:
        for path in data:
            descriptors.append(_open(path, os.O_RDONLY))
            if not _lock(descriptors[-1]):
                raise PoolBusyError(
                    f"the data {path}, meant for {layout.directory}, is in use by another pool directory",
                    next_step="use that pool, or name a drive of its own for this one",
                )
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return descriptors


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise MediaError(f"{path} cannot be locked: {error}", next_step="check its permissions") from error


def _owner(directory_fd: int) -> _Owner:
    lines = os.pread(directory_fd, _MAX_NOTE_BYTES, 0).decode(errors="replace").split("\n")
    address, name = (lines[i] if len(lines) > i + 1 and lines[i].isprintable() else "" for i in (1, 2))
    return _Owner(lines[0].strip() or "unknown", address, name)


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
    """With patience for who only looks, and holds the lock shared: for an instant, who asks whether the pool is owned,
    and, as long as it probes a block device that was written to, udev (https://systemd.io/BLOCK_DEVICE_LOCKING). An
    owner holds it alone."""
    end_s = time.monotonic() + _PATIENCE_S
    shared_end_s = time.monotonic() + _SHARED_PATIENCE_S
    while not _locked(descriptor, fcntl.LOCK_EX):
        is_shared = _locked(descriptor, fcntl.LOCK_SH)
        if is_shared:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        if time.monotonic() > (shared_end_s if is_shared else end_s):
            return False
        time.sleep(_BETWEEN_TRIES_S)
    return True


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise MediaError(f"a lock was refused: {error}", next_step="use a filesystem with flock") from error
    return True
