"""A folder that appears whole or not at all, however its making ends."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from meshfusion.tools.image.errors import BuildError

_LOCK: Final = "lock"


@contextmanager
def staged_folder(output: Path) -> Iterator[Path]:
    """An empty folder that becomes ``output`` when the block ends without an error. Raises BuildError where something
    is there already, and OSError.

    What a build that was killed has left beside it is removed by the next one.
    """
    if os.path.lexists(output):
        raise BuildError(f"{output} is there already", next_step="Remove it, or name another folder.")
    output.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{output.name}.building-"
    _remove_left(output.parent, prefix)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=output.parent))
    try:
        with (work / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # who looks for what was left sees that this is not
            folder = work / "content"
            folder.mkdir(mode=0o755)
            yield folder
            if os.path.lexists(output):
                raise BuildError(f"{output} was made meanwhile", next_step="Remove it, or name another folder.")
            folder.rename(output)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _remove_left(parent: Path, prefix: str) -> None:
    for left in parent.glob(f"{prefix}*"):
        with suppress(OSError), (left / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
