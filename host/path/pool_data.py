"""The data of a pool's drives that a path moves. Pool LBAs are split here, and nowhere else on the way.

See :mod:`meshfusion.jbof.pool_addresses`. What a path reads or writes at once lies on one drive.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.media.file import DataFile
from meshfusion.jbof.pool_addresses import namespace_of, pool_lba, split_pool_lba


class DriveNotOpenError(MediaError):
    """A drive of the pool that this process has not opened (yet): that says nothing of what lies on it."""


class PoolData:
    """``files``: by namespace, at least one; it owns them. Threads write, and one flushes when they have."""

    def __init__(self, files: Mapping[int, DataFile]) -> None:
        assert files, "a pool without data"
        self.files = dict(files)
        self._unflushed: set[int] = set()

    def at(self, address: int) -> tuple[DataFile, int]:
        """The file and the LBA in it of a pool LBA, to read there.

        Raises :class:`DriveNotOpenError`: what lies on one drive is never looked for on another.
        """
        namespace, lba = split_pool_lba(address)
        file = self.files.get(namespace)
        if file is None:
            raise DriveNotOpenError(
                f"drive {namespace - 1} of the pool is not open here",
                next_step="look for why in the engine's log: mfctl jbof drives tells when the drive is back",
            )
        return file, lba

    def to_write(self, namespace: int) -> DataFile:
        """The file of a namespace, which is to be flushed from now on. Raises as :meth:`at` does."""
        file, _ = self.at(pool_lba(namespace, 0))
        self._unflushed.add(namespace)
        return file

    def flush(self) -> None:
        """Every drive that was written to since it was last flushed (rule 1). Raises MediaError also for one that was
        exchanged: what is durable must be so where others look for it."""
        for namespace in sorted(self._unflushed):
            self.files[namespace].flush()
            self._unflushed.discard(namespace)
            self.files[namespace].check_place()

    def close(self) -> None:
        with ExitStack() as stack:
            for file in self.files.values():
                stack.callback(file.close)


def as_pool_data(data: DataFile | PoolData) -> PoolData:
    """A single file is the pool's drive 0."""
    return PoolData({namespace_of(0): data}) if isinstance(data, DataFile) else data
