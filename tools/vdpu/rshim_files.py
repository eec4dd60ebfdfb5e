"""``/dev/rshimN`` as a file system, for a card that is none: the files of the rshim driver, and the errors it gives.

Modelled on ``src/rshim_fuse.c`` of github.com/Mellanox/rshim-user-space. Needs FUSE and the package mfusepy.
"""

from __future__ import annotations

import errno
import stat
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

import mfusepy

FILES: Final = {"boot": 0o200, "misc": 0o600, "console": 0o600, "rshim": 0o600}
_T = TypeVar("_T")


class RshimCard(Protocol):
    """What is behind the files. Calls come one at a time, and raise OSError with the number that the driver gives."""

    def read_misc(self) -> str: ...
    def write_misc(self, data: bytes) -> None: ...
    def open_boot(self) -> None: ...

    def write_boot(self, data: bytes) -> int:
        """How many bytes were taken."""

    def close_boot(self) -> None: ...


class RshimFiles(mfusepy.Operations):
    """``card``: asked for before each call, so that it can live in time."""

    use_ns = True

    def __init__(self, card: Callable[[], RshimCard]) -> None:
        self._card = card
        self._lock = threading.RLock()
        self._read_once: set[int] = set()
        self._handles = 0

    def modes(self) -> dict[str, int]:
        return FILES

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        name = path.lstrip("/")
        if not name:
            return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
        if name not in self.modes():
            raise mfusepy.FuseOSError(errno.ENOENT)
        return {"st_mode": stat.S_IFREG | self.modes()[name], "st_nlink": 1, "st_size": 0}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *self.modes()]

    def open(self, path: str, fi: Any) -> int:
        fi.direct_io = True  # as for a device: no size, no cache
        with self._lock:
            if path == "/boot":
                failing(lambda: self._card().open_boot())
            self._handles += 1
            fi.fh = self._handles
            return 0

    def read(self, path: str, size: int, offset: int, fi: Any) -> bytes:
        with self._lock:
            if path != "/misc":
                raise mfusepy.FuseOSError(errno.ENOSYS)
            if fi.fh in self._read_once:
                return b""
            self._read_once.add(fi.fh)
            return self._card().read_misc().encode()[:size]

    def write(self, path: str, data: bytes, offset: int, fi: Any) -> int:
        with self._lock:
            if path == "/boot":
                return failing(lambda: self._card().write_boot(data))
            if path == "/misc":
                if offset:
                    raise mfusepy.FuseOSError(errno.EINVAL)
                failing(lambda: self._card().write_misc(data))
            return len(data)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        return 0  # a device that is opened for writing is not made shorter

    def release(self, path: str, fi: Any) -> int:
        with self._lock:
            self._read_once.discard(fi.fh)
            if path == "/boot":
                self._card().close_boot()
        return 0


def failing(call: Callable[[], _T]) -> _T:
    """What ``call`` gives; its OSError as FUSE wants it."""
    try:
        return call()
    except OSError as error:
        raise mfusepy.FuseOSError(error.errno or errno.EIO) from None
