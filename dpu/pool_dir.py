"""A pool on disk: its directory, its label, its owner lock."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from meshfusion.dpu.index_files import create_index
from meshfusion.jbof.errors import ConfigError, FormatError, MediaError
from meshfusion.jbof.format import (
    DATA_START_LBA,
    FORMAT_VERSION,
    LABEL_LBAS,
    LBA_BYTES,
    Label,
    decode_label_copies,
    encode_label,
)
from meshfusion.jbof.media.file import DirectMode, create_data_file, open_data_file
from meshfusion.jbof.segments import SegmentGeometry

DEFAULT_SEGMENT_BYTES = 64 << 20
MIN_SEGMENT_COUNT = 4
LIVENESS_SUFFIX = ".alive"
_DATA_POINTER = "data.path"  # present when the data lies outside the pool directory (a block device)


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Where the parts of a pool lie."""

    directory: Path

    @property
    def data(self) -> Path:
        pointer = self.directory / _DATA_POINTER
        if pointer.exists():
            return Path(pointer.read_text().strip())
        return self.directory / "data"

    @property
    def index(self) -> Path:
        return self.directory / "index"

    @property
    def lock(self) -> Path:
        return self.directory / "owner.lock"

    @property
    def holders(self) -> Path:
        return self.directory / "holders"

    def liveness(self, holder_id: str) -> Path:
        return self.holders / f"{holder_id}{LIVENESS_SUFFIX}"


def geometry_of(label: Label) -> SegmentGeometry:
    return SegmentGeometry(label.lba_bytes, label.data_start_lba, label.segment_lba_count, label.segment_count)


def create_pool(
    path: Path, *, size_bytes: int, segment_bytes: int = DEFAULT_SEGMENT_BYTES, data_path: Path | None = None
) -> Label:
    """Make a new, empty pool in the new directory ``path``. Space is reserved now, so a full disk shows now.

    Raises :class:`ConfigError` for sizes that cannot work, :class:`FormatError` when something is there already, and
    :class:`MediaError` when the space cannot be had. Nothing half-made is left behind.
    """
    _check_sizes(size_bytes, segment_bytes)
    path = path.absolute()
    if path.exists() and any(path.iterdir() if path.is_dir() else [path]):
        raise FormatError(f"{path} exists and is not empty", next_step="choose a new directory for the pool")
    if not path.parent.is_dir():
        raise ConfigError(f"the directory {path.parent} does not exist", next_step=f"mkdir -p {path.parent}")
    label = Label(
        pool_uuid=uuid.uuid4().bytes,
        created_unix_s=int(time.time()),
        lba_bytes=LBA_BYTES,
        segment_lba_count=segment_bytes // LBA_BYTES,
        segment_count=(size_bytes - DATA_START_LBA * LBA_BYTES) // segment_bytes,
        data_start_lba=DATA_START_LBA,
    )
    building = path.parent / f".{path.name}.creating-{os.getpid()}"
    layout = PoolLayout(building)
    try:
        building.mkdir(mode=0o700)
        layout.holders.mkdir(mode=0o700)
        if data_path is None:
            create_data_file(layout.data, size_bytes)
        else:
            _check_device_is_blank(data_path, size_bytes)
            (building / _DATA_POINTER).write_text(str(data_path.absolute()))
        pool_uuid = str(uuid.UUID(bytes=label.pool_uuid))
        create_index(layout.index, pool_uuid, geometry_of(label).capacity_bytes)
        _write_label(layout.data, label)
        _sync_directory(layout.index)
        _sync_directory(building)
        if path.exists():
            path.rmdir()
        building.rename(path)
        _sync_directory(path.parent)
    except OSError as error:
        raise MediaError(
            f"the pool {path} cannot be created: {error}", next_step="check space and permissions of its directory"
        ) from error
    finally:
        _remove_tree(building)
    return label


def read_label(layout: PoolLayout) -> Label:
    """The pool's label, checked against the size of its data.

    Raises :class:`FormatError` when this is no pool, of another version, damaged or truncated.
    """
    if not layout.directory.is_dir() or not layout.index.is_dir():
        raise FormatError(
            f"{layout.directory} is not a MeshFusion pool",
            next_step=f"mfctl pool create {layout.directory} --size 4GiB",
        )
    if not layout.data.exists():
        raise FormatError(
            f"the pool's data {layout.data} is missing", next_step="attach the device, or create the pool anew"
        )
    label, size_bytes = _read_label_copies(layout.data)
    needed_bytes = label.data_start_lba * label.lba_bytes + geometry_of(label).capacity_bytes
    if size_bytes < needed_bytes:
        raise FormatError(
            f"{layout.data} is truncated: {size_bytes} bytes of {needed_bytes}",
            next_step="restore the file, or move the pool away and create it anew: only cached chunks are lost",
        )
    return label


# ---- inside ------------------------------------------------------------------------------------------------------


def _check_sizes(size_bytes: int, segment_bytes: int) -> None:
    if segment_bytes % LBA_BYTES or segment_bytes < 1 << 20:
        raise ConfigError(
            f"segment size {segment_bytes} is not a multiple of {LBA_BYTES} bytes of at least 1 MiB",
            next_step="use a segment size such as 64MiB",
        )
    minimum = MIN_SEGMENT_COUNT * segment_bytes + DATA_START_LBA * LBA_BYTES
    if size_bytes < minimum:
        raise ConfigError(
            f"pool size {size_bytes} is too small: {MIN_SEGMENT_COUNT} segments of {segment_bytes} need {minimum}",
            next_step="use a larger size or smaller segments",
        )


def _check_device_is_blank(data_path: Path, size_bytes: int) -> None:
    with contextlib.closing(open_data_file(data_path, writable=True, direct=DirectMode.AUTO)) as data:
        if data.size_bytes < size_bytes:
            raise ConfigError(
                f"{data_path} has {data.size_bytes} bytes, the pool wants {size_bytes}",
                next_step="lower --size or use a larger device",
            )
        head = bytearray(2 * LBA_BYTES)
        with contextlib.closing(open_data_file(data_path, writable=False, direct=DirectMode.OFF)) as reader:
            reader.read_into(0, memoryview(head))
    if any(head):
        raise FormatError(
            f"{data_path} is not blank: something has been written at its start",
            next_step=f"make sure it is the right device, then `wipefs -a {data_path}` and zero its first 8 KiB",
        )


def _read_label_copies(path: Path) -> tuple[Label, int]:
    """The first valid copy of the label, and the size of the data in bytes."""
    copies = []
    with contextlib.closing(open_data_file(path, writable=False, direct=DirectMode.OFF)) as data:
        if data.size_bytes < (max(LABEL_LBAS) + 1) * LBA_BYTES:
            raise FormatError(f"{path} is truncated: {data.size_bytes} bytes", next_step="create the pool anew")
        for lba in LABEL_LBAS:
            raw = bytearray(LBA_BYTES)
            data.read_into(lba, memoryview(raw))
            copies.append(bytes(raw))
        return decode_label_copies(copies, where=str(path)), data.size_bytes


def _write_label(data_path: Path, label: Label) -> None:
    raw = encode_label(label)
    assert len(raw) == LBA_BYTES
    with contextlib.closing(open_data_file(data_path, writable=True, direct=DirectMode.OFF)) as data:
        for lba in LABEL_LBAS:
            data.write_from(lba, memoryview(raw))
        data.flush()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_tree(path: Path) -> None:
    """Remove a half-made pool directory, if it is still under its building name."""
    shutil.rmtree(path, ignore_errors=True)


__all__ = [
    "DEFAULT_SEGMENT_BYTES",
    "FORMAT_VERSION",
    "LIVENESS_SUFFIX",
    "PoolLayout",
    "create_pool",
    "geometry_of",
    "read_label",
]
