"""The file that a pool's key is in. It is opened and looked at here; only cryptsetup reads what it holds."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshfusion.jbof.errors import ConfigError, FieldValueError

MIN_BYTES: Final = 32
MAX_BYTES: Final = 4096
_MAKE: Final = "make one: (umask 077; head -c 64 /dev/urandom > {path})"


@dataclass(frozen=True, slots=True)
class OpenKey:
    path: Path
    descriptor: int


@contextlib.contextmanager
def open_key(path: Path) -> Iterator[OpenKey]:
    """Raises :class:`~meshfusion.jbof.errors.ConfigError` for a file that others can read, or that can hold no key."""
    try:
        descriptor = _opened(path)
    except FieldValueError as error:
        raise ConfigError(f"the key file {path} {error.problem}", next_step=error.fix) from error
    try:
        yield OpenKey(path, descriptor)
    finally:
        os.close(descriptor)


def key_file_problem(path: Path) -> tuple[str, str] | None:
    """What :func:`open_key` would refuse, and the fix; None: nothing."""
    try:
        os.close(_opened(path))
    except FieldValueError as error:
        return error.problem, error.fix
    return None


def _opened(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # no waiting for a pipe's other end
    except FileNotFoundError:
        raise FieldValueError("does not exist", f"correct the path, or {_MAKE.format(path=path)}") from None
    except OSError as error:
        fix = f"let the user of this process (uid {os.geteuid()}) own it"
        raise FieldValueError(f"cannot be opened: {error.strerror}", fix) from error
    try:
        _check(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise FieldValueError("is not a regular file", _MAKE.format(path="FILE"))
    mode = stat.S_IMODE(found.st_mode)
    if mode & ~(stat.S_IRUSR | stat.S_IWUSR):
        raise FieldValueError(
            f"has the mode {mode:04o}: others than its owner can use it",
            f"chmod 600 {path}; and if that was so for long, replace the key: mfctl pool rekey",
        )
    if found.st_uid != os.geteuid():
        raise FieldValueError(
            f"belongs to the user with uid {found.st_uid}, not to this process' (uid {os.geteuid()})",
            f"chown {os.geteuid()} {path}, or run this as that user",
        )
    if not MIN_BYTES <= found.st_size <= MAX_BYTES:
        raise FieldValueError(
            f"has {found.st_size} bytes; a key has {MIN_BYTES} to {MAX_BYTES}, all of them random",
            _MAKE.format(path="FILE"),
        )
