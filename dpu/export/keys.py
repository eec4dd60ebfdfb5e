"""Secrets of worker incarnations: one each, in a file that the target reads, gone with its incarnation."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.nvme.auth_keys import Secret, format_secret, new_secret, parse_secret

_SUFFIX: Final = ".key"


class HostKeys:
    """``folder``: only its owner may enter it. Files are of mode 0600, as SPDK wants them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, incarnation: str) -> Path:
        return self._folder / f"{incarnation}{_SUFFIX}"

    def make(self, incarnation: str) -> None:
        """A new key, unless there is one. Raises :class:`~meshfusion.jbof.errors.MediaError`."""
        try:
            descriptor = os.open(self.path(incarnation), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return
        except OSError as error:
            raise _trouble(self.path(incarnation), error) from error
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{format_secret(new_secret())}\n")
        except OSError as error:
            self.forget(incarnation)
            raise _trouble(self.path(incarnation), error) from error

    def read(self, incarnation: str) -> Secret:
        """Raises :class:`~meshfusion.jbof.errors.MediaError`, or what a damaged key raises."""
        try:
            return parse_secret(self.path(incarnation).read_text())
        except OSError as error:
            raise _trouble(self.path(incarnation), error) from error

    def forget(self, incarnation: str) -> None:
        with contextlib.suppress(OSError):
            self.path(incarnation).unlink(missing_ok=True)

    def forget_all_but(self, incarnations: Iterable[str]) -> None:
        """What an earlier owner of the pool left."""
        kept = {self.path(incarnation) for incarnation in incarnations}
        for path in self._folder.glob(f"*{_SUFFIX}"):
            if path not in kept:
                self.forget(path.name.removesuffix(_SUFFIX))


def _trouble(path: Path, error: OSError) -> MediaError:
    problem = f"the key file {path}: {error.strerror}"
    return MediaError(problem, next_step="check the pool's directory: space, permissions")
