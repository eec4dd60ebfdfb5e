"""Who uses a pool's mappings: many at once, and alone whoever opens or closes them.

The service holds it while it serves, a command that reads beside it likewise. Who ends tries to be alone, and only
then closes the mappings: the last one does. The lock ends with its process.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Final

from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.jbof.errors import MediaError, PoolBusyError

LOCK_FILE: Final = "encryption.lock"
_PATIENCE_S: Final = 90.0  # another one may be waiting for cryptsetup
_BETWEEN_TRIES_S: Final = 0.05


class UseLock:
    """Held from :meth:`take` to :meth:`release`. ``is_alone``: nobody else holds it, and nobody can begin to."""

    def __init__(self, descriptor: int, *, is_alone: bool) -> None:
        self._descriptor = descriptor
        self.is_alone = is_alone

    @classmethod
    def take(cls, layout: PoolLayout, *, patience_s: float = _PATIENCE_S) -> UseLock:
        """Alone where nobody else has it, else beside them; while one is alone that is waited for. Raises
        PoolBusyError and MediaError."""
        file = layout.directory / LOCK_FILE
        descriptor = _open(file)
        try:
            end_s = time.monotonic() + patience_s
            while True:
                for kind in (fcntl.LOCK_EX, fcntl.LOCK_SH):
                    if _try(descriptor, kind):
                        return cls(descriptor, is_alone=kind == fcntl.LOCK_EX)
                if time.monotonic() >= end_s:
                    raise PoolBusyError(
                        f"another process has been opening or closing the encrypted drives of {layout.directory} for "
                        f"{patience_s:g} s",
                        next_step=f"see which: fuser -v {file}",
                    )
                time.sleep(_BETWEEN_TRIES_S)
        except BaseException:
            os.close(descriptor)
            raise

    def share(self) -> None:
        """Others may use them, too."""
        if self.is_alone:
            self.is_alone = False
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def try_alone(self) -> bool:
        """Is nobody else there? What is asked last: where somebody is, the lock may be lost."""
        self.is_alone = self.is_alone or _try(self._descriptor, fcntl.LOCK_EX)
        return self.is_alone

    def release(self) -> None:
        os.close(self._descriptor)


def _open(file: Path) -> int:
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise MediaError(f"{file} cannot be locked: {error}", next_step="check its permissions") from error


def _try(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
