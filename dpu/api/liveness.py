"""Liveness files: how the service knows that no process of a worker incarnation exists any more (rule 3, local path).

A holder keeps a shared flock on its file for as long as it may write. Taking the exclusive lock therefore proves that
no write of it is in flight; the file is marked under that lock, so nobody can become this holder again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from meshfusion.jbof.errors import MediaError

_FENCED_MARK = b"fenced\n"


def create_liveness(path: Path) -> None:
    """Called by the service when it admits a holder. Raises :class:`MediaError`."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise MediaError(
            f"the liveness file {path} cannot be made: {error}",
            next_step="check the pool directory: space, permissions",
        ) from error


def hold_liveness(path: Path) -> int:
    """Called by every process of a holder before it writes; returns the descriptor to keep open.

    Raises :class:`MediaError` when the holder has been fenced or the file is out of reach.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _fenced(path) from None
    except OSError as error:
        raise MediaError(
            f"the liveness file {path} is out of reach: {error}",
            next_step="run the engine on the service's machine, with access to the pool directory",
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise _fenced(path) from None
    except OSError as error:
        os.close(descriptor)
        raise MediaError(
            f"the liveness file {path} cannot be locked: {error}",
            next_step="put the pool directory on a local filesystem that supports flock",
        ) from error
    found = os.fstat(descriptor)
    if found.st_nlink == 0 or found.st_size > 0:
        os.close(descriptor)
        raise _fenced(path)
    return descriptor


def take_liveness_away(path: Path) -> bool:
    """Called by the service: True when every process of this holder is gone. Its file then carries a mark, so that
    nobody can hold it again; :func:`forget_liveness` removes it once the fence is durable.

    False when a process lives, and when that cannot be found out. A missing file is such a case: whoever removed it may
    have left a writer behind, and unknown means no.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(descriptor, _FENCED_MARK, 0)
        return True
    except OSError:  # BlockingIOError: a process holds it
        return False
    finally:
        os.close(descriptor)


def forget_liveness(path: Path) -> None:
    """Called by the service when nobody will ask about this holder again."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _fenced(path: Path) -> MediaError:
    return MediaError(f"{path}: this worker incarnation was fenced", next_step="restart the engine")
