"""The directory that a pool is made in: whether it is free, the right to build there, and removing half-made pools."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from meshfusion.jbof.errors import ConfigError, PoolBusyError

DATA_POINTER = "data.path"  # present when the data lies outside the pool directory (a block device)
DRIVE_LIST = "drives"  # see drive_list.py
ENCRYPTION_NOTE = "encryption"  # see encryption/note.py
CREATING = ".creating"  # the creator's lock and the index to be; present only while a pool is being made
# Made before the index.
_TEXTS = rf"{re.escape(DATA_POINTER)}|{DRIVE_LIST}|{ENCRYPTION_NOTE}"
_PARTS = re.compile(rf"data(\.\d+)?|holders|{_TEXTS}|\.({_TEXTS})\.new")


def own_file(path: Path, drive_number: int) -> Path:
    """Where the data of a drive lies that is a file inside the pool's directory ``path``."""
    return path / (f"data.{drive_number}" if drive_number else "data")


def is_free(path: Path) -> bool:
    """Can a pool be created in ``path``? Nothing is there, or a directory made ready for a pool, say by a package or
    a mount, or the remains of a creation whose process was killed. Raises OSError when it may not be looked into."""
    return not os.path.lexists(path) or (path.is_dir() and not _strangers(path))


def check_not_in_progress(path: Path) -> None:
    """Raises :class:`PoolBusyError` while another process creates a pool in ``path``."""
    try:
        descriptor = os.open(path / CREATING / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _busy(path) from None
    finally:
        os.close(descriptor)


def check_free(path: Path) -> None:
    """Raises ConfigError where no pool can be created in ``path``, and OSError as :func:`is_free`."""
    if is_free(path):
        return
    if path.is_dir() and {"index", "holders"} <= set(os.listdir(path)):
        shown = shlex.quote(str(path))
        raise ConfigError(
            f"there is a pool in {path} already",
            next_step=f"use it, see mfctl pool status {shown}; or choose a new directory; or, when nobody needs what "
            f"it holds, remove it first: rm -r {shown}",
        )
    raise ConfigError(
        f"{path} exists and is not empty" if path.is_dir() else f"{path} exists and is no directory",
        next_step="choose a new directory for the pool, or an empty one",
    )


@contextlib.contextmanager
def building(path: Path) -> Iterator[None]:
    """Hold the right to build in ``path``; when the block fails, remove what it made.

    Not beside it and renamed: ``path`` may be a mount point, a symbolic link, or the only place we may write to. The
    lock ends with its process, so remains under a free lock are nobody's.
    """
    made = not path.exists()
    if made:
        path.mkdir(mode=0o700, exist_ok=True)
    try:
        with _creation_lock(path):
            try:
                check_free(path)  # again: another creation may have ended meanwhile
                _remove_parts(path)
                yield
            except BaseException:
                if "index" not in os.listdir(path):
                    _remove_parts(path)
                raise
            finally:
                shutil.rmtree(path / CREATING, ignore_errors=True)
        if made:
            sync_directory(path.parent)
    except BaseException:
        if made:
            with contextlib.suppress(OSError):  # not ours alone any more
                path.rmdir()
        raise


@contextlib.contextmanager
def _creation_lock(path: Path) -> Iterator[None]:
    lock = path / CREATING / "lock"
    busy = _busy(path)
    try:
        lock.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise busy from None  # it is just being removed
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not lock.exists() or not os.path.samestat(os.stat(lock), os.fstat(descriptor)):
            raise busy  # its holder has ended, and the file with it
    except (BlockingIOError, FileNotFoundError):
        os.close(descriptor)
        raise busy from None
    except BaseException:
        os.close(descriptor)
        raise
    try:
        yield
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Make the names in ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(file: Path, text: str, *, mode: int = 0o666) -> None:
    """All of it, or what was there before, also when the power fails. ``mode``: of the file, less the process' umask.
    Raises OSError."""
    part = file.with_name(f".{file.name}.new")
    with open(part, "w", opener=lambda path, flags: os.open(path, flags, mode)) as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    part.rename(file)
    sync_directory(file.parent)


# ---- inside ------------------------------------------------------------------------------------------------------


def _busy(path: Path) -> PoolBusyError:
    return PoolBusyError(
        f"the pool {path} is being created by another process", next_step="wait a moment, then use that pool"
    )


def _strangers(path: Path) -> set[str]:
    """What lies in the directory ``path`` and neither is to be expected there nor left by a killed creation."""
    names = set(os.listdir(path)) - {"lost+found"}  # the root of an ext4 filesystem has that
    if CREATING in names and "index" not in names:
        names = {name for name in names if name != CREATING and not _PARTS.fullmatch(name)}
    return names


def _remove_parts(path: Path) -> None:
    """Remove what a creation makes before its end; its lock stays."""
    for name in filter(_PARTS.fullmatch, os.listdir(path)):
        with contextlib.suppress(FileNotFoundError):
            (path / name).rmdir() if name == "holders" else (path / name).unlink()
    shutil.rmtree(path / CREATING / "index", ignore_errors=True)
