"""Making and opening an index."""

from __future__ import annotations

import os
from pathlib import Path

import lmdb

from meshfusion.dpu.index import Index
from meshfusion.dpu.index_errors import OTHER_POOL, REBUILD, OtherPoolError, index_error
from meshfusion.dpu.index_tables import META_PAYLOAD, META_POOL, META_VERSION, Tables
from meshfusion.dpu.store import records
from meshfusion.jbof.errors import FormatError, MediaError

_MAX_READERS = 512
_ROOM_TO_GROW = 4  # drives may be added while it is open, and LMDB's map stays as it is until it is opened anew
_LOCK_FILE_BYTES = 64 << 10  # more than LMDB needs for _MAX_READERS


def map_size_bytes(capacity_bytes: int) -> int:
    """Address space for the index: room for a chunk per 16 KiB of capacity at 1 KiB each, at least 256 MiB.

    It is a limit, not a reservation: the file grows as entries come.
    """
    return max(256 << 20, capacity_bytes // 16)


def create_index(path: Path, pool_uuid: str, capacity_bytes: int) -> None:
    """A new, empty index in the new directory ``path``. Raises :class:`MediaError` or OSError."""
    path.mkdir(mode=0o700)
    _reserve_lock_file(path)
    try:
        map_size = map_size_bytes(capacity_bytes)
        with lmdb.open(str(path), map_size=map_size, max_dbs=8, max_readers=_MAX_READERS) as env:
            tables = Tables.of(env, create=True)
            with env.begin(write=True, db=tables.meta) as txn:
                txn.put(META_VERSION, str(records.INDEX_VERSION).encode())
                txn.put(META_POOL, pool_uuid.encode())
                txn.put(META_PAYLOAD, b"0")
    except lmdb.Error as error:
        raise index_error(str(path), error) from error


def _reserve_lock_file(path: Path) -> None:
    """LMDB maps its lock file sparse and writes to it: on a full disk that would kill the process (SIGBUS)."""
    descriptor = os.open(path / "lock.mdb", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _LOCK_FILE_BYTES)
    finally:
        os.close(descriptor)


def open_index(
    path: Path, pool_uuid: str, capacity_bytes: int, *, payload_bytes: int | None = None, readonly: bool = False
) -> Index:
    """Open and check that the index is of this version and belongs to this pool. ``payload_bytes``: of all committed
    chunks, as a scan has found it; None: as the index has it noted.

    Raises :class:`FormatError` when it is missing, damaged, of another version or of another pool. A truncated or
    damaged file may kill the process that reads it, so
    :mod:`meshfusion.dpu.index_scan` comes first.
    """
    data = path / "data.mdb"
    if not data.exists():
        raise FormatError(f"the index {data} is missing", next_step=REBUILD)
    try:
        if not readonly:
            _reserve_lock_file(path)
        env = lmdb.open(
            str(path),
            map_size=_ROOM_TO_GROW * map_size_bytes(capacity_bytes),
            max_dbs=8,
            create=False,
            readonly=readonly,
            max_readers=_MAX_READERS,
        )
    except OSError as error:
        raise MediaError(
            f"the index {path} cannot be opened: {error}", next_step="check space and permissions there"
        ) from error
    except lmdb.Error as error:
        raise index_error(str(path), error) from error
    try:
        index = Index(env, payload_bytes)
        with env.begin(db=index.tables.meta) as txn:
            version, owner = txn.get(META_VERSION), txn.get(META_POOL)
        if version != str(records.INDEX_VERSION).encode():
            raise FormatError(
                f"the index {data} has version {_text(version)}, this is version {records.INDEX_VERSION}",
                next_step="use the MeshFusion version that made it, or create a new pool",
            )
        if owner != pool_uuid.encode():
            raise OtherPoolError(
                f"the index {data} belongs to pool {_text(owner)}, not to {pool_uuid}, which is the drive's",
                next_step=OTHER_POOL,
            )
        return index
    except lmdb.Error as error:
        env.close()
        raise index_error(str(path), error) from error
    except FormatError:
        env.close()
        raise


def _text(value: bytes | None) -> str:
    return "unknown" if value is None else bytes(value).decode(errors="replace")
