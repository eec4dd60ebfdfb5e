"""What LMDB's errors mean to a user."""

from __future__ import annotations

import lmdb

from meshfusion.jbof.errors import FormatError, MediaError, MeshFusionError, PoolBusyError, ServiceUnavailableError

REBUILD = "make the index anew from what is on the medium: `mfctl pool rebuild-index`"


def index_error(path: str, error: lmdb.Error) -> MeshFusionError:
    """What LMDB's error means to a user."""
    if "already open in this process" in str(error):
        return PoolBusyError(f"the index {path} is open in this process already", next_step="use the open pool")
    if type(error) is lmdb.Error and "closed" in str(error):
        return ServiceUnavailableError(f"the index {path} is closed", next_step="open the pool again")
    if isinstance(error, lmdb.MapFullError):
        return MediaError(f"the index {path} is full", next_step="create the pool with larger chunks or more capacity")
    if isinstance(error, lmdb.DiskError | lmdb.ReadonlyError):
        return MediaError(f"the index {path} cannot be written: {error}", next_step="check space and permissions there")
    if "No space left" in str(error):
        return MediaError(f"the index {path} cannot grow: {error}", next_step="free space on its filesystem")
    return FormatError(f"the index {path} is damaged: {error}", next_step=REBUILD)
