"""Block devices made of files, where that is permitted."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def loop_device_of(data_path: Path) -> Iterator[Path]:
    """Skips the test where none can be made."""
    device = Path(privileged("losetup", "--find", "--show", str(data_path)))
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", str(device)], check=True)


def privileged(*command: str) -> str:
    """What the command prints; skips the test where it is missing or not permitted."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip(f"{command[0]} is not installed")
    if done.returncode:
        pytest.skip(f"needs hardware: {' '.join(command)} is not permitted here: {done.stderr.strip()}")
    return done.stdout.strip()
