"""Whether a file or device may become a drive of a new pool: it is there, large enough, and blank."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import uuid
from collections.abc import Sequence
from pathlib import Path

from meshfusion.dpu.pool_dir import read_label_at
from meshfusion.jbof.errors import ConfigError, FormatError, MeshFusionError, PoolBusyError
from meshfusion.jbof.format import DATA_START_LBA, LBA_BYTES
from meshfusion.jbof.label import Label
from meshfusion.jbof.media.drive_facts import drive_name
from meshfusion.jbof.media.file import DirectMode, open_data_file
from meshfusion.jbof.pool_addresses import MAX_DRIVE_NUMBER


def check_data_paths(
    data_paths: Sequence[Path], size_bytes: int, overwrite_serial: str | None = None, left_by: bytes | None = None
) -> None:
    """Can these become the drives of a new pool, ``size_bytes`` of each? ``left_by``: the pool whose creation in the
    same place was killed, and whose labels count as none.

    Raises what :func:`~meshfusion.dpu.pool_create.create_pool_of_drives` would."""
    if len(data_paths) > MAX_DRIVE_NUMBER + 1:
        raise ConfigError(
            f"{len(data_paths)} drives are more than the {MAX_DRIVE_NUMBER + 1} that a pool can have",
            next_step="name fewer, and make another pool of the others",
        )
    for i, data_path in enumerate(data_paths):
        check_exists(data_path)
        if any(data_path.samefile(other) for other in data_paths[:i]):
            raise ConfigError(f"{data_path} is named twice", next_step="name each drive once")
        check_data_path(data_path, size_bytes - size_bytes % LBA_BYTES, overwrite_serial, left_by)


def check_exists(data_path: Path) -> None:
    if not data_path.exists():
        raise ConfigError(
            f"the data path {data_path} does not exist: it must name an existing file or block device",
            next_step="correct it, or leave it out to keep the data in the pool's directory",
        )


def check_data_path(
    data_path: Path, size_bytes: int, overwrite_serial: str | None = None, left_by: bytes | None = None
) -> None:
    """Can the file or device ``data_path`` become the data of a new pool? ``left_by``: as of :func:`check_data_paths`.
    Raises what :func:`~meshfusion.dpu.pool_create.create_pool` would."""
    serial = drive_name(data_path) or data_path.name
    if overwrite_serial not in (None, serial):
        raise ConfigError(
            f"{data_path} is {serial!r}, not {overwrite_serial!r}: nothing was overwritten",
            next_step="name the drive that is meant, by its path and its serial",
        )
    _check_unclaimed(data_path)
    with contextlib.closing(open_data_file(data_path, writable=True, direct=DirectMode.AUTO)) as data:
        if data.size_bytes < size_bytes:
            raise ConfigError(
                f"{data_path} has {data.size_bytes} bytes, the pool wants {size_bytes}",
                next_step="lower --size or use a larger device",
            )
        # Where labels and their like go: some file systems begin well behind the first blocks.
        head = bytearray(min(DATA_START_LBA * LBA_BYTES, data.size_bytes // LBA_BYTES * LBA_BYTES))
        with contextlib.closing(open_data_file(data_path, writable=False, direct=DirectMode.OFF)) as reader:
            reader.read_into(0, memoryview(head))
    if not any(head) or overwrite_serial is not None:
        return
    label = _label_on(data_path)
    if label is None or label.pool_uuid != left_by:
        raise FormatError(
            f"{data_path} is not blank: {_told(label)}",
            next_step="make sure it is the right device and that nobody needs what is on it, then overwrite it: "
            f"mfctl pool create or jbof add with --force --serial {shlex.quote(serial)}",
        )


def _check_unclaimed(data_path: Path) -> None:
    """Of a device: no filesystem that is mounted, no volume and no encrypted drive lies on it. (open(2), O_EXCL.)"""
    if not data_path.is_block_device():
        return
    try:
        os.close(os.open(data_path, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise PoolBusyError(
                f"{data_path} is in use: mounted, or something lies on it, such as a volume or an encrypted drive",
                next_step=f"see what: lsblk {shlex.quote(str(data_path))}; and name another device, or end that",
            ) from error


def _label_on(data_path: Path) -> Label | None:
    try:
        return read_label_at(data_path, "")[0]
    except MeshFusionError:
        return None


def _told(label: Label | None) -> str:
    if label is None:
        return "something has been written at its start"
    return f"it is drive {label.drive_number} of pool {uuid.UUID(bytes=label.pool_uuid)}"
