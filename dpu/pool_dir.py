"""A pool on disk: its directory, its label, its owner lock."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from meshfusion.dpu.index_files import create_index
from meshfusion.dpu.pool_place import (
    CREATING,
    DATA_POINTER,
    building,
    check_free,
    check_not_in_progress,
    is_free,
    sync_directory,
)
from meshfusion.dpu.pool_sizes import size_problems
from meshfusion.jbof.envelope import FormatFault, MediumFormatError
from meshfusion.jbof.errors import ConfigError, FormatError, MediaError
from meshfusion.jbof.format import DATA_START_LBA, FORMAT_VERSION, LABEL_LBAS, LBA_BYTES
from meshfusion.jbof.label import Label, encode_label, examine_label_copies
from meshfusion.jbof.media.drive_facts import alignment_bytes, drive_name
from meshfusion.jbof.media.faults import DataFileError
from meshfusion.jbof.media.file import DirectMode, create_data_file, open_data_file
from meshfusion.jbof.segments import SegmentGeometry
from meshfusion.jbof.sizes import format_size

DEFAULT_SEGMENT_BYTES = 64 << 20
LIVENESS_SUFFIX = ".alive"
_MAX_POINTER_BYTES = 4096
_ONLY_CACHED = "only cached chunks are lost"


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Where the parts of a pool lie. ``data`` raises :class:`FormatError` when its pointer is damaged."""

    directory: Path

    @property
    def data(self) -> Path:
        return _data_pointer(self.directory / DATA_POINTER) or self.directory / "data"

    @property
    def index(self) -> Path:
        return self.directory / "index"

    @property
    def exported(self) -> Path:
        """There once hosts of a target were let in: how it was exported."""
        return self.directory / "exported"

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
    path: Path,
    *,
    size_bytes: int,
    segment_bytes: int = DEFAULT_SEGMENT_BYTES,
    data_path: Path | None = None,
    overwrite_serial: str | None = None,
) -> Label:
    """Make a new, empty pool in ``path``: a new directory, or one that :func:`~meshfusion.dpu.pool_place.is_free`.
    Space is reserved now, so a full disk shows now. Of ``size_bytes``, whole blocks and segments are used.
    ``overwrite_serial``: what is on ``data_path`` may be overwritten if this is its drive's serial, or its own name.

    Raises :class:`ConfigError` for sizes and paths that cannot work, :class:`FormatError` when something is there
    already, :class:`~meshfusion.jbof.errors.PoolBusyError` while another process creates it, and :class:`MediaError`
    when the space cannot be had. Nothing half-made is left behind; what a killed process leaves, the next creation
    removes.
    """
    for problem in size_problems(size_bytes, segment_bytes):
        raise ConfigError(problem.problem, next_step=problem.fix)
    size_bytes -= size_bytes % LBA_BYTES
    path = path.absolute()
    alignment = _alignment_bytes(data_path, segment_bytes)
    data_start_lba = -(-DATA_START_LBA * LBA_BYTES // alignment) * (alignment // LBA_BYTES)
    label = Label(
        pool_uuid=uuid.uuid4().bytes,
        drive_uuid=uuid.uuid4().bytes,
        created_unix_s=int(time.time()),
        lba_bytes=LBA_BYTES,
        segment_lba_count=segment_bytes // LBA_BYTES,
        segment_count=(size_bytes - data_start_lba * LBA_BYTES) // segment_bytes,
        data_start_lba=data_start_lba,
        alignment_lba_count=alignment // LBA_BYTES,
        drive_name="" if data_path is None else drive_name(data_path),
    )
    try:
        _check_place(path, data_path)
        with building(path):
            _build(PoolLayout(path), label, size_bytes, data_path, overwrite_serial)
    except DataFileError as error:
        if error.errno != errno.EFBIG:
            raise
        raise MediaError(
            f"the filesystem of {path} cannot hold a file of {format_size(size_bytes)}",
            next_step="choose a smaller size, another filesystem such as XFS, or a block device with --data-path",
        ) from error
    except OSError as error:
        raise MediaError(
            f"the pool {path} cannot be created: {error}", next_step="check space and permissions of its directory"
        ) from error
    return label


def read_label(layout: PoolLayout) -> Label:
    """The pool's label, as :func:`read_label_copies` finds it."""
    return read_label_copies(layout)[0]


def read_label_copies(layout: PoolLayout) -> tuple[Label, tuple[str, ...]]:
    """The pool's label, checked against the size of its data, and what is wrong with a copy of it that is not needed.

    Raises :class:`FormatError` when this is no pool, of another version, damaged or truncated,
    :class:`~meshfusion.jbof.errors.PoolBusyError` while it is being created, and :class:`MediaError` when it cannot
    be read.
    """
    _check_is_pool(layout)
    label, problems, _ = read_data_label(layout)
    return label, problems


def read_data_label(layout: PoolLayout) -> tuple[Label, tuple[str, ...], int]:
    """The same of a pool whose index may be gone, and the size of its data in bytes."""
    if not layout.data.exists():
        outside = layout.data.parent != layout.directory
        raise FormatError(
            f"the pool's data {layout.data} is missing",
            next_step=("attach the device; if it is gone, " if outside else "") + recreate_step(layout),
        )
    label, problems, size_bytes = _read_label_copies(layout)
    found_name = drive_name(layout.data)
    if label.drive_name and found_name != label.drive_name:
        raise FormatError(
            f"{layout.data} is the drive {found_name or 'without a serial'!r}; this pool lies on {label.drive_name!r}",
            next_step="attach that drive; a copy of a pool cannot be used as one",
        )
    needed_bytes = label.data_start_lba * label.lba_bytes + geometry_of(label).capacity_bytes
    if size_bytes < needed_bytes:
        raise FormatError(
            f"{layout.data} is truncated: {size_bytes} bytes of {needed_bytes}",
            next_step=recreate_step(layout, size_bytes=needed_bytes),
        )
    return label, problems, size_bytes


def recreate_step(layout: PoolLayout, *, size_bytes: int = 4 << 30) -> str:
    """The commands that make the pool anew, empty, as one sentence."""
    path, data = shlex.quote(str(layout.directory)), shlex.quote(str(layout.data))
    create = f"mfctl pool create {path} --size {format_size(size_bytes)}"
    if layout.data.parent == layout.directory:
        return f"remove the pool's directory and create it anew: rm -r {path}, then {create}; {_ONLY_CACHED}"
    blank = f"dd if=/dev/zero of={data} bs={LBA_BYTES} count={len(LABEL_LBAS)} conv=notrunc"
    return (
        f"make sure that {data} holds nothing else, then remove the pool's directory and create it anew: rm -r {path}, "
        f"then {blank}, then {create} --data-path {data}; {_ONLY_CACHED}"
    )


def note_exported(layout: PoolLayout, exported_as: str) -> None:
    """Before a host of a target is let in: whoever makes the index anew must know that there may be some."""
    try:
        if layout.exported.exists() and layout.exported.read_text().strip() == exported_as:
            return
        layout.exported.write_text(f"{exported_as}\n")
        sync_directory(layout.directory)
    except OSError as error:
        raise MediaError(
            f"{layout.exported} cannot be written: {error}", next_step="check space and permissions there"
        ) from error


def check_data_path(data_path: Path, size_bytes: int, overwrite_serial: str | None = None) -> None:
    """Can the file or device ``data_path`` become the data of a new pool? Raises what :func:`create_pool` would."""
    serial = drive_name(data_path) or data_path.name
    if overwrite_serial not in (None, serial):
        raise ConfigError(
            f"{data_path} is {serial!r}, not {overwrite_serial!r}: nothing was overwritten",
            next_step="name the drive that is meant, by its path and its serial",
        )
    with contextlib.closing(open_data_file(data_path, writable=True, direct=DirectMode.AUTO)) as data:
        if data.size_bytes < size_bytes:
            raise ConfigError(
                f"{data_path} has {data.size_bytes} bytes, the pool wants {size_bytes}",
                next_step="lower --size or use a larger device",
            )
        head = bytearray(2 * LBA_BYTES)
        with contextlib.closing(open_data_file(data_path, writable=False, direct=DirectMode.OFF)) as reader:
            reader.read_into(0, memoryview(head))
    if any(head) and overwrite_serial is None:
        raise FormatError(
            f"{data_path} is not blank: something has been written at its start",
            next_step="make sure it is the right device and that nobody needs what is on it, then overwrite it: "
            f"--force --serial {shlex.quote(serial)}",
        )


# ---- inside ------------------------------------------------------------------------------------------------------


def _data_pointer(file: Path) -> Path | None:
    """The path that ``file`` holds; None when there is no such file."""
    try:
        with file.open("rb") as opened:
            raw = opened.read(_MAX_POINTER_BYTES + 1).strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise MediaError(f"{file} cannot be read: {error.strerror}", next_step="check its permissions") from error
    with contextlib.suppress(UnicodeDecodeError):
        text = raw.decode()
        if text.startswith("/") and text.isprintable() and len(raw) <= _MAX_POINTER_BYTES:
            return Path(text)
    raise FormatError(
        f"{file} is damaged: it does not hold the absolute path of the pool's data",
        next_step="write the path of the data's file or block device into it, or create the pool anew elsewhere",
    )


def _check_is_pool(layout: PoolLayout) -> None:
    path = layout.directory
    try:
        if layout.index.is_dir():
            os.listdir(path)
            return
        check_not_in_progress(path)
        free = is_free(path)
    except OSError as error:
        raise MediaError(
            f"the pool {path} cannot be read: {error.strerror}",
            next_step="run as the user that owns the pool, or correct the path or its permissions",
        ) from error
    if not free and layout.data.exists() and layout.holders.is_dir():
        raise FormatError(
            f"the index of the pool {path} is missing",
            next_step=f"make it anew from what is on the medium: mfctl pool rebuild-index {shlex.quote(str(path))}",
        )
    create, other = f"mfctl pool create {path} --size 4GiB", "name a pool's directory: other files lie in this place"
    raise FormatError(f"{path} is not a MeshFusion pool", next_step=create if free else other)


def _check_place(path: Path, data_path: Path | None) -> None:
    if path.is_symlink() and not path.exists():
        raise ConfigError(
            f"{path} is a symbolic link to {os.readlink(path)}, which does not exist",
            next_step="make the directory that it points to, or remove the link",
        )
    if not path.parent.is_dir():
        raise ConfigError(f"the directory {path.parent} does not exist", next_step=f"mkdir -p {path.parent}")
    if data_path is not None and not data_path.exists():
        raise ConfigError(
            f"the data path {data_path} does not exist: it must name an existing file or block device",
            next_step="correct it, or leave it out to keep the data in the pool's directory",
        )
    check_free(path)


def _alignment_bytes(data_path: Path | None, segment_bytes: int) -> int:
    """What segments are aligned to. Raises :class:`ConfigError` when they cannot be."""
    alignment = LBA_BYTES if data_path is None else alignment_bytes(data_path, LBA_BYTES)
    if segment_bytes % alignment:
        raise ConfigError(
            f"segments of {format_size(segment_bytes)} do not fit the drive {data_path}, which writes and frees in "
            f"pieces of {format_size(alignment)}",
            next_step=f"use a segment size that is a multiple of {format_size(alignment)}",
        )
    return alignment


def _build(
    layout: PoolLayout, label: Label, size_bytes: int, data_path: Path | None, overwrite_serial: str | None
) -> None:
    """All parts; the index comes to its place last and at once, and without an index this is no pool."""
    index = layout.directory / CREATING / "index"
    if data_path is None:
        create_data_file(layout.data, size_bytes)
    else:
        check_data_path(data_path, size_bytes, overwrite_serial)
        (layout.directory / DATA_POINTER).write_text(str(data_path.absolute()))
    layout.holders.mkdir(mode=0o700)
    create_index(index, str(uuid.UUID(bytes=label.pool_uuid)), geometry_of(label).capacity_bytes)
    sync_directory(index)
    write_label(layout.data, label)
    sync_directory(layout.directory)
    index.rename(layout.index)
    sync_directory(layout.directory)


def _read_label_copies(layout: PoolLayout) -> tuple[Label, tuple[str, ...], int]:
    """As :func:`read_label_copies`, and the size of the data in bytes."""
    path, copies = layout.data, []
    with contextlib.closing(open_data_file(path, writable=False, direct=DirectMode.OFF)) as data:
        if data.size_bytes < (max(LABEL_LBAS) + 1) * LBA_BYTES:
            raise FormatError(
                f"{path} is truncated: {data.size_bytes} bytes, not even a label", next_step=recreate_step(layout)
            )
        for lba in LABEL_LBAS:
            raw = bytearray(LBA_BYTES)
            data.read_into(lba, memoryview(raw))
            copies.append(bytes(raw))
        try:
            return *examine_label_copies(copies, where=str(path)), data.size_bytes
        except MediumFormatError as error:
            if error.fault is FormatFault.DAMAGED:  # nothing to be checked without a label
                raise FormatError(error.message, next_step=recreate_step(layout)) from error
            raise


def write_label(data_path: Path, label: Label) -> None:
    """Both copies, durably. Raises :class:`DataFileError`."""
    raw = encode_label(label)
    assert len(raw) == LBA_BYTES
    with contextlib.closing(open_data_file(data_path, writable=True, direct=DirectMode.OFF)) as data:
        for lba in LABEL_LBAS:
            data.write_from(lba, memoryview(raw))
        data.flush()


__all__ = [
    "DEFAULT_SEGMENT_BYTES",
    "FORMAT_VERSION",
    "LIVENESS_SUFFIX",
    "PoolLayout",
    "check_data_path",
    "create_pool",
    "geometry_of",
    "note_exported",
    "read_data_label",
    "read_label",
    "read_label_copies",
    "recreate_step",
    "write_label",
]
