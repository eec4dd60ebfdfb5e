"""Mounting the fake rshim for a test."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from ctypes.util import find_library
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

    def renew(self) -> Mounted:
        """Another card is there."""
        self.behave()
        return self

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.folder / "control").read_text())
        return state


@contextlib.contextmanager
def mounted(folder: Path, *, speed: float = 200.0) -> Iterator[Mounted]:
    """Skips where the kernel has no FUSE, and, which CI does not accept, where the library for it is missing."""
    if not Path("/dev/fuse").exists():
        pytest.skip("needs hardware: a kernel with FUSE (/dev/fuse)")
    library = find_library("fuse3")
    if library is None:
        pytest.skip("libfuse 3 is not installed: apt-get install fuse3")
    folder.mkdir(parents=True)
    command = (sys.executable, "-m", "tests.dpu.image.fuse_rshim", str(folder), str(speed))
    environment = {**os.environ, "FUSE_LIBRARY_PATH": library}  # else it is looked for with a compiler, for seconds
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, env=environment) as process:
        try:
            give_up_s = time.monotonic() + 120
            while not (folder / "misc").exists():
                assert process.poll() is None, process.stderr and process.stderr.read().decode()
                assert time.monotonic() < give_up_s, "the file system was not mounted"
                time.sleep(0.02)
            yield Mounted(folder)
        finally:
            subprocess.run(("umount", "-l", str(folder)), check=False, capture_output=True)
            process.terminate()
            process.wait(10)
