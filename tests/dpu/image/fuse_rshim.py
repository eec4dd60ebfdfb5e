"""``/dev/rshimN`` as a file system: a fake card behind real files, with the errors that the driver gives.

``python -m tests.dpu.image.fuse_rshim FOLDER SPEED`` mounts it until it is unmounted. Besides the driver's files there
is ``control``: what is written to it, as JSON, changes the card's behaviour or, empty, the card; it reads how that is.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
import time
from typing import Any

import mfusepy

from meshfusion.tools.vdpu.rshim_files import FILES, RshimFiles
from tests.dpu.image.fake_card import FakeCard

_PR_SET_PDEATHSIG = 1


class FakeRshimFiles(RshimFiles):
    """``speed``: how many seconds pass for the card in one."""

    def __init__(self, card: FakeCard, speed: float) -> None:
        super().__init__(self._now)
        self._fake, self._speed = card, speed
        self._began_s = time.monotonic()
        self._states: dict[int, bytes] = {}

    def modes(self) -> dict[str, int]:
        return FILES | {"control": 0o600}

    def _now(self) -> FakeCard:
        self._fake.now_s = max(self._fake.now_s, (time.monotonic() - self._began_s) * self._speed)
        return self._fake

    def open(self, path: str, fi: Any) -> int:
        with self._lock:
            super().open(path, fi)
            if path == "/control":
                self._states[fi.fh] = json.dumps(self._state()).encode()
        return 0

    def read(self, path: str, size: int, offset: int, fi: Any) -> bytes:
        if path != "/control":
            return super().read(path, size, offset, fi)
        with self._lock:
            return self._states[fi.fh][offset : offset + size]

    def write(self, path: str, data: bytes, offset: int, fi: Any) -> int:
        if path != "/control":
            return super().write(path, data, offset, fi)
        with self._lock:
            self._change(json.loads(data))
        return len(data)

    def _change(self, behaviour: dict[str, Any]) -> None:
        """Of nothing at all: another card, as one is that has just been unpacked."""
        if not behaviour:
            self._fake, self._began_s = FakeCard(), time.monotonic()
        for name, value in behaviour.items():
            setattr(self._fake.behaviour, name, tuple(value) if isinstance(value, list) else value)

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


if __name__ == "__main__":
    # Whatever ends the tests ends this too, and with it the mount.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    mfusepy.FUSE(
        FakeRshimFiles(FakeCard(), float(sys.argv[2])), sys.argv[1], foreground=True, raw_fi=True, nothreads=False
    )
