"""Making a header unreadable: its key slots first, which is what cannot be guessed, then all of the file."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from meshfusion.dpu.pool_place import sync_directory
from meshfusion.jbof.drives.system.luks import Luks
from meshfusion.jbof.errors import FormatError, MediaError

_PIECE_BYTES: Final = 1 << 20


def destroy_header(header: Path, luks: Luks) -> None:
    """Nothing to be done where there is none. Raises :class:`~meshfusion.jbof.errors.MediaError`; it can be done again
    then."""
    if not header.exists():
        return
    with contextlib.suppress(FormatError):  # one that is damaged is overwritten all the same
        luks.header_of(header)
        luks.erase(header)
    try:
        with header.open("r+b", buffering=0) as opened:
            left = os.lseek(opened.fileno(), 0, os.SEEK_END)
            os.lseek(opened.fileno(), 0, os.SEEK_SET)
            while left > 0:
                left -= opened.write(os.urandom(min(_PIECE_BYTES, left))) or 0
            os.fsync(opened.fileno())
        header.unlink()
        sync_directory(header.parent)
    except OSError as error:
        raise MediaError(
            f"{header} cannot be destroyed: {error}", next_step="check its permissions and filesystem, then do it again"
        ) from error
