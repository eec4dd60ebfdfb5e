"""Files of secrets, each written once and as a whole."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from meshfusion.dpu.pool_place import sync_directory, write_durably
from meshfusion.jbof.errors import MediaError

_MODE: Final = 0o600
"""As SPDK wants them."""


class KeyDisk:
    """Without a state of its own; from any thread."""

    def names(self, folder: Path) -> list[str]:
        """Of all files there; none of a folder that cannot be read."""
        try:
            return [path.name for path in folder.iterdir()]
        except OSError:
            return []

    def read(self, file: Path) -> str:
        """Raises :class:`~meshfusion.jbof.errors.MediaError`."""
        try:
            return file.read_text()
        except UnicodeDecodeError:
            return ""  # no secret's text: whoever parses it says so
        except OSError as error:
            raise _trouble(file, error) from error

    def write(self, file: Path, text: str) -> None:
        """All of it, and durable when this returns, for its owner's eyes only. Raises MediaError: then it is not there,
        or as a whole."""
        try:
            write_durably(file, text, mode=_MODE)
        except OSError as error:
            raise _trouble(file, error) from error

    def remove(self, file: Path) -> None:
        """And what an unfinished :meth:`write` of it left. What cannot be removed stays."""
        for path in (file, file.with_name(f".{file.name}.new")):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def sync(self, folder: Path) -> None:
        """Which files are there is durable when this returns. Raises MediaError."""
        try:
            sync_directory(folder)
        except OSError as error:
            raise _trouble(folder / "*", error) from error

    def made_at_s(self, file: Path) -> float | None:
        """When it was written, in seconds since 1970; None: nobody knows."""
        try:
            return file.stat().st_mtime
        except OSError:
            return None


def _trouble(path: Path, error: OSError) -> MediaError:
    problem = f"the key file {path}: {error.strerror}"
    return MediaError(problem, next_step="check the pool's directory: space, permissions")
