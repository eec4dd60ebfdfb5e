"""Where processes of one user leave small files for each other."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from meshfusion.jbof.errors import ConfigError

ENVIRONMENT: Final = "MESHFUSION_RUN_DIR"
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def run_dir(environ: Mapping[str, str], uid: int) -> Path:
    """Of the user ``uid``; it may not be there yet.

    Source of the second: XDG Base Directory Specification 0.8, ``XDG_RUNTIME_DIR``.
    """
    if told := environ.get(ENVIRONMENT):
        return Path(told)
    if uid == 0:
        return Path("/run/meshfusion")
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "meshfusion"
    return Path(f"/tmp/meshfusion-{uid}")


def make_run_dir(path: Path, uid: int) -> None:
    """For its user alone, if it is not there. Raises as :func:`check_run_dir` does, or OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_run_dir(path, uid)


def check_run_dir(path: Path, uid: int) -> None:
    """Can nobody else put files there? Raises :class:`~meshfusion.jbof.errors.ConfigError`, or OSError.

    Root takes what belongs to somebody else: it looks only where others cannot make a directory.
    """
    found = path.lstat()
    problem = ""
    if not stat.S_ISDIR(found.st_mode):
        problem = "is not a directory"
    elif uid not in (0, found.st_uid):
        problem = f"belongs to uid {found.st_uid}"
    elif found.st_mode & _OTHERS_WRITE:
        problem = f"can be written to by others (mode {stat.S_IMODE(found.st_mode):o})"
    if problem:
        raise ConfigError(
            f"the run directory {path} {problem}",
            next_step=f"Remove it, or set {ENVIRONMENT} to a directory of your own, for engines and mfctl alike.",
        )


def replace_file(path: Path, data: bytes) -> None:
    """Readers find the old content or the new. Raises OSError."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
