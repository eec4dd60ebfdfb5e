"""Making a new pool: its place, its drive, its label, its empty index."""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from meshfusion.dpu.blank_drives import check_data_path, check_data_paths, check_exists
from meshfusion.dpu.drive_list import DriveList, pool_of_killed_creation, read_drive_list, write_drive_list
from meshfusion.dpu.encryption.making import (
    check_can_encrypt,
    clear_remains,
    close_all,
    encrypt,
    slices_at,
    undo,
    undo_all,
)
from meshfusion.dpu.encryption.note import KeyPlace, read_note
from meshfusion.dpu.index_files import create_index
from meshfusion.dpu.owner_lock import OwnerLock, lock_data
from meshfusion.dpu.pool_dir import PoolLayout, geometry_of, remove_new_label, write_new_label
from meshfusion.dpu.pool_drives import PoolDrives, find_drives, list_of_one, listed_drive
from meshfusion.dpu.pool_place import (
    CREATING,
    DATA_POINTER,
    building,
    check_free,
    check_not_in_progress,
    own_file,
    sync_directory,
    write_durably,
)
from meshfusion.dpu.pool_sizes import size_problems, usual_segment_bytes
from meshfusion.dpu.pool_wipe import Tell, nobody, wipe
from meshfusion.jbof.drives.system.luks import CRYPTSETUP, Luks
from meshfusion.jbof.errors import ConfigError, MediaError, MeshFusionError, UnsupportedError
from meshfusion.jbof.format import DATA_START_LBA, LBA_BYTES
from meshfusion.jbof.label import Label
from meshfusion.jbof.media.drive_facts import alignment_bytes, drive_name
from meshfusion.jbof.media.faults import DataFileError
from meshfusion.jbof.media.file import create_data_file
from meshfusion.jbof.pool_addresses import MAX_DRIVE_NUMBER
from meshfusion.jbof.segment_geometry import SegmentGeometry
from meshfusion.jbof.sizes import format_size


def create_pool(
    path: Path,
    *,
    size_bytes: int,
    segment_bytes: int | None = None,
    data_path: Path | None = None,
    overwrite_serial: str | None = None,
    tell: Tell = nobody,
    encryption: KeyPlace | None = None,
    luks: Luks = CRYPTSETUP,
) -> Label:
    """Make a new, empty pool in ``path``: a new directory, or one that :func:`~meshfusion.dpu.pool_place.is_free`.
    Space is reserved now, so a full disk shows now. Of ``size_bytes``, whole blocks and segments are used.
    ``segment_bytes`` None: :func:`~meshfusion.dpu.pool_sizes.usual_segment_bytes`.
    ``overwrite_serial``: what is on ``data_path`` may be overwritten if this is its drive's serial, or its own name.
    Nothing of it can be read afterwards (:mod:`meshfusion.dpu.pool_wipe`), which may take as long as overwriting it
    all; ``tell`` is told how far that is. ``encryption``: what is written to ``data_path`` is encrypted, with the key
    there; its drive is closed again when this returns (:func:`~meshfusion.dpu.encryption.slices.open_slices`).

    Raises :class:`ConfigError` for sizes and paths that cannot work and when something is in ``path`` already,
    :class:`FormatError` when something is on ``data_path``, :class:`~meshfusion.jbof.errors.PoolBusyError` while
    another process creates it, and :class:`MediaError` when the space cannot be had. Nothing half-made is left behind;
    what a killed process leaves, the next creation removes.
    """
    (label,) = create_pool_of_drives(
        path,
        size_bytes=size_bytes,
        segment_bytes=segment_bytes,
        data_paths=(data_path,),
        overwrite_serial=overwrite_serial,
        tell=tell,
        encryption=encryption,
        luks=luks,
    )
    return label


def create_pool_of_drives(
    path: Path,
    *,
    size_bytes: int,
    segment_bytes: int | None = None,
    data_paths: Sequence[Path | None],
    overwrite_serial: str | None = None,
    tell: Tell = nobody,
    encryption: KeyPlace | None = None,
    luks: Luks = CRYPTSETUP,
) -> tuple[Label, ...]:
    """As :func:`create_pool`, with a drive for each of ``data_paths``, None for a file in ``path``; ``size_bytes``: of
    each. ``overwrite_serial``: of a pool of one drive."""
    assert data_paths, "a pool without drives"
    assert len(data_paths) == 1 or overwrite_serial is None, "which of the drives?"
    segment_bytes = usual_segment_bytes(size_bytes) if segment_bytes is None else segment_bytes
    for problem in size_problems(size_bytes, segment_bytes):
        raise ConfigError(problem.problem, next_step=problem.fix)
    size_bytes -= size_bytes % LBA_BYTES
    path = path.absolute()
    named = [data_path for data_path in data_paths if data_path is not None]
    try:
        _check_place(path)
        check_not_in_progress(path)
        clear_remains(PoolLayout(path), luks)
        if encryption is not None:
            _check_encrypted(encryption, data_paths, luks)
        left_by = pool_of_killed_creation(path)
        check_data_paths(named, size_bytes, overwrite_serial, left_by)
        pool_uuid = uuid.uuid4().bytes
        labels = tuple(
            _new_label(pool_uuid, number, size_bytes, segment_bytes, data_path)
            for number, data_path in enumerate(data_paths)
        )
        with building(path):
            encrypting = None if encryption is None else partial(encrypt, PoolLayout(path), encryption, luks=luks)
            try:
                _build(PoolLayout(path), labels, size_bytes, data_paths, overwrite_serial, left_by, tell, encrypting)
            except BaseException:
                undo_all(PoolLayout(path), luks)
                raise
        close_all(PoolLayout(path), luks)
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
    return labels


def add_drive(
    path: Path,
    *,
    size_bytes: int,
    data_path: Path | None = None,
    overwrite_serial: str | None = None,
    tell: Tell = nobody,
    luks: Luks = CRYPTSETUP,
) -> Label:
    """Give the pool at ``path``, which nobody serves, another drive: the empty ``data_path`` or a file in ``path``.
    ``tell``: as of :func:`create_pool`.

    Raises what :func:`create_pool` raises, PoolBusyError while somebody has the pool or the drive, and UnsupportedError
    for a pool that has had all the drives it can have.
    """
    layout = PoolLayout(path.absolute())
    drives = find_drives(layout)
    owner = OwnerLock.take(layout, drives.paths)
    try:
        return add_listed_drive(layout, drives, size_bytes, data_path, overwrite_serial, tell=tell, luks=luks)
    except OSError as error:
        raise MediaError(
            f"a drive cannot be added to {path}: {error}", next_step="check space and permissions of its directory"
        ) from error
    finally:
        owner.release()


def add_listed_drive(
    layout: PoolLayout,
    drives: PoolDrives,
    size_bytes: int,
    data_path: Path | None,
    overwrite_serial: str | None,
    check: Callable[[SegmentGeometry], None] = lambda geometry: None,
    *,
    tell: Tell = nobody,
    is_wiped: bool = False,
    luks: Luks = CRYPTSETUP,
) -> Label:
    """Of a pool that the caller owns: the drive's label is durable before the list names it. Raises as
    :func:`add_drive`, OSError, and what ``check`` raises, before anything is written. ``is_wiped``: by
    :func:`wipe_new_drive`, just now. An encrypted pool's new drive is encrypted, too, and stays open."""
    listed, label, data = _plan_drive(layout, drives, size_bytes, data_path, overwrite_serial, luks)
    check(geometry_of(label))
    note = read_note(layout)
    if data_path is None:
        data.unlink(missing_ok=True)  # of an addition that was killed: no list names it
        create_data_file(data, size_bytes - size_bytes % LBA_BYTES)
    with lock_data(layout, data):
        if data_path is not None and not is_wiped:
            wipe(data, tell)
        if note is not None:
            (data,) = encrypt(layout, note.place, (data,), luks=luks)
        try:
            write_new_label(data, label)
            write_drive_list(layout.directory, listed.with_drive(listed_drive(label, data)))
        except BaseException:
            undo(layout, slices_at(layout, (data,), luks), luks)
            raise
    return label


def wipe_new_drive(
    layout: PoolLayout,
    drives: PoolDrives,
    size_bytes: int,
    data_path: Path,
    overwrite_serial: str | None,
    check: Callable[[SegmentGeometry], None],
    tell: Tell,
    luks: Luks = CRYPTSETUP,
) -> None:
    """What :func:`add_listed_drive` would do to it first, for who cannot wait inside that. Raises the same."""
    _, label, data = _plan_drive(layout, drives, size_bytes, data_path, overwrite_serial, luks)
    check(geometry_of(label))
    with lock_data(layout, data):
        wipe(data, tell)


def _plan_drive(
    layout: PoolLayout,
    drives: PoolDrives,
    size_bytes: int,
    data_path: Path | None,
    overwrite_serial: str | None,
    luks: Luks,
) -> tuple[DriveList, Label, Path]:
    """The list without it, its label and where it lies. Changes nothing."""
    listed = read_drive_list(layout.directory) or list_of_one(drives)
    number = listed.next_number
    if number > MAX_DRIVE_NUMBER:
        raise UnsupportedError(
            f"{layout.directory} has had {number} drives, and no number is used twice",
            next_step="create the pool anew on the drives that it has now",
        )
    for problem in size_problems(size_bytes, listed.segment_bytes):
        raise ConfigError(problem.problem, next_step=problem.fix)
    size_bytes -= size_bytes % LBA_BYTES
    note = read_note(layout)
    if note is not None:
        _check_encrypted(note.place, (data_path,), luks)
    data = own_file(layout.directory, number) if data_path is None else data_path.absolute()
    if data_path is not None:
        check_exists(data)
        for drive in drives.here:
            if data.samefile(drive.path):
                raise ConfigError(f"{data} is drive {drive.number} of this pool", next_step="name another drive")
        check_data_path(data, size_bytes, overwrite_serial)
    label = _new_label(drives.here[0].label.pool_uuid, number, size_bytes, listed.segment_bytes, data_path)
    return listed, label, data


def planned_geometry(drive_number: int, size_bytes: int, segment_bytes: int, data_path: Path | None) -> SegmentGeometry:
    """Of a drive that is to be made, of sizes that :func:`~meshfusion.dpu.pool_sizes.size_problems` has nothing
    against. Raises ConfigError where ``data_path`` is a device that wants segments of other sizes."""
    whole_bytes = size_bytes - size_bytes % LBA_BYTES
    return geometry_of(_new_label(bytes(range(16)), drive_number, whole_bytes, segment_bytes, data_path))


# ---- inside ------------------------------------------------------------------------------------------------------


def _check_place(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise ConfigError(
            f"{path} is a symbolic link to {os.readlink(path)}, which does not exist",
            next_step="make the directory that it points to, or remove the link",
        )
    if not path.parent.is_dir():
        raise ConfigError(f"the directory {path.parent} does not exist", next_step=f"mkdir -p {path.parent}")
    check_free(path)


def _check_encrypted(place: KeyPlace, data_paths: Sequence[Path | None], luks: Luks) -> None:
    devices = [data_path for data_path in data_paths if data_path is not None]
    if len(devices) < len(data_paths):
        raise ConfigError(
            "a file in the pool's directory cannot be encrypted, only a block device",
            next_step="name one for each drive with data_path (--data-path), or leave encryption to the filesystem "
            "that the directory lies on",
        )
    check_can_encrypt(place, devices, luks)


def _new_label(
    pool_uuid: bytes, drive_number: int, size_bytes: int, segment_bytes: int, data_path: Path | None
) -> Label:
    alignment = _alignment_bytes(data_path, segment_bytes)
    data_start_lba = -(-DATA_START_LBA * LBA_BYTES // alignment) * (alignment // LBA_BYTES)
    return Label(
        pool_uuid=pool_uuid,
        drive_uuid=uuid.uuid4().bytes,
        created_unix_s=int(time.time()),
        lba_bytes=LBA_BYTES,
        segment_lba_count=segment_bytes // LBA_BYTES,
        segment_count=(size_bytes - data_start_lba * LBA_BYTES) // segment_bytes,
        data_start_lba=data_start_lba,
        alignment_lba_count=alignment // LBA_BYTES,
        drive_number=drive_number,
        drive_name="" if data_path is None else drive_name(data_path),
    )


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
    layout: PoolLayout,
    labels: Sequence[Label],
    size_bytes: int,
    data_paths: Sequence[Path | None],
    overwrite_serial: str | None,
    left_by: bytes | None,
    tell: Tell,
    encrypting: Callable[[Sequence[Path]], tuple[Path, ...]] | None = None,
) -> None:
    """All parts; the index comes to its place last and at once, and without an index this is no pool. Before that no
    label is on a drive that the list does not name."""
    index = layout.directory / CREATING / "index"
    files = [own_file(layout.directory, i) if named is None else named.absolute() for i, named in enumerate(data_paths)]
    with contextlib.ExitStack() as held:
        for file, named in zip(files, data_paths, strict=True):
            if named is None:
                create_data_file(file, size_bytes)
            else:
                held.enter_context(lock_data(layout, file))  # whoever serves what is on it has it, too
                check_data_path(file, size_bytes, overwrite_serial, left_by)
        for named in filter(None, data_paths):  # once all are known to be usable
            wipe(named.absolute(), tell)
        if encrypting is not None:
            files = list(encrypting(files))
        if data_paths[0] is not None:
            write_durably(layout.directory / DATA_POINTER, str(files[0]))
        layout.holders.mkdir(mode=0o700)
        pool_uuid = str(uuid.UUID(bytes=labels[0].pool_uuid))
        geometries = [geometry_of(label) for label in labels]
        create_index(index, pool_uuid, sum(geometry.capacity_bytes for geometry in geometries))
        sync_directory(index)
        listed = tuple(listed_drive(label, file) for file, label in zip(files, labels, strict=True))
        write_drive_list(layout.directory, DriveList(pool_uuid, geometries[0].segment_bytes, len(listed), listed))
        labelled: list[Path] = []
        try:
            for file, label in zip(files, labels, strict=True):
                labelled.append(file)
                write_new_label(file, label)
            sync_directory(layout.directory)
            index.rename(layout.index)
        except BaseException:
            _remove_labels(labelled)
            raise
        sync_directory(layout.directory)


def _remove_labels(drives: Iterable[Path]) -> None:
    """As far as they let themselves: whoever creates the next pool on them is told of what is left."""
    for drive in drives:
        with contextlib.suppress(MeshFusionError):
            remove_new_label(drive)
