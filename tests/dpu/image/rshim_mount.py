"""Mounting the fake rshim for a test."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Mounted:
    """``folder``: where ``/dev/rshimN`` would be."""

    folder: Path

    def behave(self, **behaviour: object) -> None:
        (self.folder / "control").write_text(json.dumps(behaviour))

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.folder / "control").read_text())
        return state


@contextlib.contextmanager
def mounted(folder: Path, *, speed: float = 200.0) -> Iterator[Mounted]:
    """Skips where the kernel has no FUSE."""
    if not Path("/dev/fuse").exists():
        pytest.skip("needs hardware: a kernel with FUSE (/dev/fuse)")
    folder.mkdir(parents=True)
    command = (sys.executable, "-m", "tests.dpu.image.fuse_rshim", str(folder), str(speed))
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as process:
        try:
            give_up_s = time.monotonic() + 30
            while not (folder / "misc").exists():
                assert process.poll() is None, process.stderr and process.stderr.read().decode()
                assert time.monotonic() < give_up_s, "the file system was not mounted"
                time.sleep(0.02)
            yield Mounted(folder)
        finally:
            subprocess.run(("umount", "-l", str(folder)), check=False, capture_output=True)
            process.terminate()
            process.wait(10)
