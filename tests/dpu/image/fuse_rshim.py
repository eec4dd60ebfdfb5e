"""``/dev/rshimN`` as a file system: a fake card behind real files, with the errors that the driver gives.

``python -m tests.dpu.image.fuse_rshim FOLDER SPEED`` mounts it until it is unmounted. Besides the driver's files there
is ``control``: what is written to it, as JSON, changes the card's behaviour or, empty, the card; it reads how that is.
"""

from __future__ import annotations

import errno
import json
import stat
import sys
import threading
import time
from typing import Any

import mfusepy

from tests.dpu.image.fake_card import FakeCard

_MODES = {"boot": 0o200, "misc": 0o600, "console": 0o600, "rshim": 0o600, "control": 0o600}


class RshimFiles(mfusepy.Operations):
    """``speed``: how many seconds pass for the card in one."""

    use_ns = True

    def __init__(self, card: FakeCard, speed: float) -> None:
        self._card, self._speed = card, speed
        self._began_s = time.monotonic()
        self._lock = threading.RLock()
        self._read_once: set[int] = set()
        self._states: dict[int, bytes] = {}
        self._handles = 0

    def _now(self) -> FakeCard:
        self._card.now_s = max(self._card.now_s, (time.monotonic() - self._began_s) * self._speed)
        return self._card

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        name = path.lstrip("/")
        if not name:
            return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
        if name not in _MODES:
            raise mfusepy.FuseOSError(errno.ENOENT)
        return {"st_mode": stat.S_IFREG | _MODES[name], "st_nlink": 1, "st_size": 0}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *_MODES]

    def open(self, path: str, fi: Any) -> int:
        fi.direct_io = True  # as for a device: no size, no cache
        with self._lock:
            if path == "/boot":
                self._failing(lambda: self._now().open_boot())
            self._handles += 1
            fi.fh = self._handles
            if path == "/control":
                self._states[fi.fh] = json.dumps(self._state()).encode()
            return 0

    def read(self, path: str, size: int, offset: int, fi: Any) -> bytes:
        with self._lock:
            if path == "/control":
                return self._states[fi.fh][offset : offset + size]
            if path != "/misc":
                raise mfusepy.FuseOSError(errno.ENOSYS)
            if fi.fh in self._read_once:
                return b""
            self._read_once.add(fi.fh)
            return self._now().read_misc().encode()[:size]

    def write(self, path: str, data: bytes, offset: int, fi: Any) -> int:
        with self._lock:
            if path == "/boot":
                return int(self._failing(lambda: self._now().write_boot(data)))
            if path == "/misc":
                if offset:
                    raise mfusepy.FuseOSError(errno.EINVAL)
                self._failing(lambda: self._now().write_misc(data))
            elif path == "/control":
                self._change(json.loads(data))
            return len(data)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        return 0  # a device that is opened for writing is not made shorter

    def release(self, path: str, fi: Any) -> int:
        with self._lock:
            if path == "/boot":
                self._now().close_boot()
        return 0

    def _change(self, behaviour: dict[str, Any]) -> None:
        """Of nothing at all: another card, as one is that has just been unpacked."""
        if not behaviour:
            self._card, self._began_s = FakeCard(), time.monotonic()
        for name, value in behaviour.items():
            setattr(self._card.behaviour, name, tuple(value) if isinstance(value, list) else value)

    def _state(self) -> dict[str, Any]:
        card = self._now()
        return {
            "resets": card.resets,
            "installed": card.installed,
            "erased_pool_drives": card.erased_pool_drives,
            "cut_short": card.cut_short,
            "up_for_s": card.up_for_s(),
            "clear_on_read": card.clear_on_read,
            "display_level": card.display_level,
            "pushed_bytes": len(card.pushed),
            "is_boot_open": card.is_boot_open,
        }

    def _failing(self, call: Any) -> Any:
        try:
            return call()
        except OSError as error:
            raise mfusepy.FuseOSError(error.errno or errno.EIO) from None


if __name__ == "__main__":
    mfusepy.FUSE(RshimFiles(FakeCard(), float(sys.argv[2])), sys.argv[1], foreground=True, raw_fi=True, nothreads=False)
