"""Reading small files that matter to security: certificates, keys, tokens."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from meshfusion.jbof.errors import FieldValueError

MAX_FILE_BYTES: Final = 1 << 20
# device, inode, size, mtime_ns, ctime_ns; empty where there is no file
FileIdentity = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SmallFile:
    """``data`` may be a secret, so it is in no repr."""

    path: Path
    data: bytes = field(repr=False)


def read_small(path: Path, field_name: str) -> SmallFile:
    """A file that anybody may read. Raises :class:`~meshfusion.jbof.errors.FieldValueError`."""
    return _read(path, field_name, None)


def read_secret(path: Path, field_name: str, *, may_group_root_read: bool = True) -> SmallFile:
    """A file that nobody but its owner may read; ``may_group_root_read``: or the group root.

    Raises :class:`~meshfusion.jbof.errors.FieldValueError`, which is told of what is open, not of what it holds.
    """
    return _read(path, field_name, may_group_root_read)


def identity_of(path: Path) -> FileIdentity:
    """Equal as long as the file at ``path``, or what a link there leads to, is the same and unchanged."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _read(path: Path, field_name: str, may_group_root_read: bool | None) -> SmallFile:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # no waiting for a pipe's other end
    except FileNotFoundError:
        raise FieldValueError("does not exist", "correct the path", field=field_name) from None
    except OSError as error:
        fix = f"let the user of this process (uid {os.geteuid()}) read it"
        raise FieldValueError(f"cannot be opened: {error.strerror}", fix, field=field_name) from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise FieldValueError("is not a regular file", "name a file", field=field_name)
        if found.st_size > MAX_FILE_BYTES:
            problem = f"has {found.st_size} bytes, more than the {MAX_FILE_BYTES} of any such file"
            raise FieldValueError(problem, "name another file", field=field_name)
        if may_group_root_read is not None:
            _refuse_open(path, found, field_name, may_group_root_read=may_group_root_read)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return SmallFile(path, file.read(MAX_FILE_BYTES))
    except OSError as error:
        raise FieldValueError(f"cannot be read: {error.strerror}", "correct the path", field=field_name) from error
    finally:
        os.close(descriptor)


def _refuse_open(path: Path, found: os.stat_result, field_name: str, *, may_group_root_read: bool) -> None:
    allowed = stat.S_IRUSR | stat.S_IWUSR | stat.S_IXUSR
    if may_group_root_read and found.st_gid == 0:
        allowed |= stat.S_IRGRP
    mode = stat.S_IMODE(found.st_mode)
    if mode & ~allowed:
        others = "other users can read or change it" if mode & 0o066 else "other users can use it"
        raise FieldValueError(
            f"has the mode {mode:04o}: {others}",
            f"chmod 600 {path}; and if that was so for long, replace what it holds",
            field=field_name,
        )
