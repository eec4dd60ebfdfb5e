"""The drives of an encrypted pool, open while a command reads or changes it where no service has it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def drives_open(path: Path) -> Iterator[None]:
    """Of the pool at ``path``, by its key file as it was noted last; beside its service, as that has them. Nothing is
    done for one that is not encrypted. Raises as :func:`~meshfusion.dpu.encryption.slices.open_slices`."""
    from meshfusion.dpu.encryption.note import read_note
    from meshfusion.dpu.encryption.slices import open_slices
    from meshfusion.dpu.pool_dir import PoolLayout
    from meshfusion.jbof.drives.system.luks import CRYPTSETUP

    layout = PoolLayout(path.absolute())
    if read_note(layout) is None:
        yield
        return
    opened = open_slices(layout, CRYPTSETUP)
    try:
        yield
    finally:
        opened.close()
