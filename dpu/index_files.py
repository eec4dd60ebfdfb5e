"""Making and opening an index, and looking through a doubtful one without risk to this process."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import lmdb

from meshfusion.dpu.index import META_POOL, META_VERSION, Index, IndexTotals
from meshfusion.dpu.index_errors import REBUILD, index_error
from meshfusion.dpu.store import records
from meshfusion.jbof.errors import FormatError, MediaError, MeshFusionError

_EXIT_REPORTED = 3
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
            meta = env.open_db(b"meta")
            for name in (b"chunks", b"positions", b"segments", b"holders"):
                env.open_db(name)
            with env.begin(write=True, db=meta) as txn:
                txn.put(META_VERSION, str(records.INDEX_VERSION).encode())
                txn.put(META_POOL, pool_uuid.encode())
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
    path: Path, pool_uuid: str, capacity_bytes: int, *, payload_bytes: int = 0, readonly: bool = False
) -> Index:
    """Open and check that the index is of this version and belongs to this pool.

    Raises :class:`FormatError` when it is missing, damaged, of another version or of another pool. A truncated or
    damaged file may kill the process that reads it, so :func:`scan_in_child` comes first.
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
        with env.begin(db=index.meta) as txn:
            version, owner = txn.get(META_VERSION), txn.get(META_POOL)
        if version != str(records.INDEX_VERSION).encode():
            raise FormatError(
                f"the index {data} has version {_text(version)}, this is version {records.INDEX_VERSION}",
                next_step="use the MeshFusion version that made it, or create a new pool",
            )
        if owner != pool_uuid.encode():
            raise FormatError(
                f"the index {data} belongs to pool {_text(owner)}, not to {pool_uuid}",
                next_step="point the pool at its own directory; indexes cannot be swapped",
            )
        return index
    except lmdb.Error as error:
        env.close()
        raise index_error(str(path), error) from error
    except FormatError:
        env.close()
        raise


def scan_in_child(path: Path, pool_uuid: str, capacity_bytes: int, *, deadline_s: float) -> IndexTotals:
    """Scan the index in a child process: a damaged LMDB page can kill the process that reads it.

    A new interpreter, not a fork: the caller may be an engine with many threads and locks.
    Raises :class:`FormatError` when the child dies or finds damage in the structure.
    """
    command = [sys.executable, "-m", "meshfusion.dpu.index_files", str(path), pool_uuid, str(capacity_bytes)]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired:
        raise FormatError(f"the index {path} could not be read within {deadline_s:.0f} s", next_step=REBUILD) from None
    if child.returncode != 0:
        raise _child_error(path, child.returncode, child.stderr)
    return IndexTotals(**json.loads(child.stdout))


def _child_error(path: Path, returncode: int, stderr: str) -> FormatError:
    last_line = (stderr.strip().splitlines() or ["no message"])[-1]
    if returncode == _EXIT_REPORTED:
        return FormatError(last_line, next_step=REBUILD)
    what = f"is damaged: reading it ended with exit code {returncode} ({last_line})"
    if returncode == -signal.SIGBUS:
        what = "is truncated: pages that it names lie behind its end"
    return FormatError(f"the index {path} {what}", next_step=REBUILD)


def _scan_main(path: str, pool_uuid: str, capacity_bytes: str) -> None:
    with open_index(Path(path), pool_uuid, int(capacity_bytes), readonly=True) as index:
        index.check_structure()
        print(json.dumps(dataclasses.asdict(index.scan())))


def _text(value: bytes | None) -> str:
    return "unknown" if value is None else bytes(value).decode(errors="replace")


if __name__ == "__main__":
    try:
        _scan_main(*sys.argv[1:])
    except MeshFusionError as reported:
        print(reported.message.replace("\n", " "), file=sys.stderr)
        sys.exit(_EXIT_REPORTED)
