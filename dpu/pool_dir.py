"""A pool on disk: its directory and its label."""

from __future__ import annotations

import contextlib
import os
import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from meshfusion.dpu.pool_place import (
    DATA_POINTER,
    DRIVE_LIST,
    check_not_in_progress,
    is_free,
    write_durably,
)
from meshfusion.jbof.envelope import FormatFault, MediumFormatError
from meshfusion.jbof.errors import FormatError, MediaError
from meshfusion.jbof.format import FORMAT_VERSION, LABEL_LBAS, LBA_BYTES, OWNER_LBAS, RESERVATION_RECORD_LBA
from meshfusion.jbof.label import Label, encode_label, examine_label_copies
from meshfusion.jbof.media.drive_facts import drive_name
from meshfusion.jbof.media.file import DirectMode, open_data_file
from meshfusion.jbof.segments import SegmentGeometry
from meshfusion.jbof.sizes import format_size

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
    return SegmentGeometry(
        label.lba_bytes, label.data_start_lba, label.segment_lba_count, label.segment_count, label.drive_number
    )


def read_label(layout: PoolLayout) -> Label:
    """The pool's label, as :func:`read_label_copies` finds it."""
    return read_label_copies(layout)[0]


def read_label_copies(layout: PoolLayout) -> tuple[Label, tuple[str, ...]]:
    """The pool's label, checked against the size of its data, and what is wrong with a copy of it that is not needed.

    Raises :class:`FormatError` when this is no pool, of another version, damaged or truncated,
    :class:`~meshfusion.jbof.errors.PoolBusyError` while it is being created, and :class:`MediaError` when it cannot
    be read.
    """
    check_is_pool(layout)
    label, problems, _ = read_data_label(layout)
    return label, problems


def read_data_label(layout: PoolLayout) -> tuple[Label, tuple[str, ...], int]:
    """The same of a pool whose index may be gone, and the size of its data in bytes."""
    return read_only_label(layout, layout.data, DATA_POINTER, "the pool's data")


def read_only_label(layout: PoolLayout, data: Path, listed_in: str, what: str) -> tuple[Label, tuple[str, ...], int]:
    """The same of a pool's only drive, which is ``what`` and at ``data``, as the file ``listed_in`` of its directory
    says."""
    if not data.exists():
        step = step_without(layout, data, listed_in)
        raise FormatError(f"{what} is away: {data} is missing", next_step=step)
    next_step = partial(recreate_step, layout, data)
    label, problems, size_bytes = _read_copies(data, next_step)
    _check_drive(data, label, size_bytes, next_step)
    return label, problems, size_bytes


def read_label_at(path: Path, next_step: str) -> tuple[Label, tuple[str, ...]]:
    """The same of one of several drives. Raises FormatError, in most cases with ``next_step``, and MediaError."""
    if not path.exists():
        raise FormatError(f"{path} is missing", next_step=next_step)
    label, problems, size_bytes = _read_copies(path, lambda **_: next_step)
    _check_drive(path, label, size_bytes, lambda **_: next_step)
    return label, problems


def step_without(layout: PoolLayout, data: Path, listed_in: str, back: str = "plug it in again") -> str:
    """What to do where a pool's only drive is not at ``data``: what it holds may well be had again. ``back``: how, for
    one that is not a file of the pool's directory."""
    if data.parent == layout.directory:
        return f"put the file back; only if it is lost for good, {recreate_step(layout, data)}"
    path = shlex.quote(str(layout.directory))
    return (
        f"{back}, or correct its path in {layout.directory / listed_in}; only if it is lost for good, remove the "
        f"pool's directory and create it anew on another drive: rm -r {path}, then mfctl pool create {path} --size "
        f"SIZE --data-path DEVICE; {_ONLY_CACHED}"
    )


def recreate_step(layout: PoolLayout, data_path: Path, *, size_bytes: int = 4 << 30) -> str:
    """The commands that make the pool anew, empty, with its data at ``data_path``, as one sentence."""
    path, data = shlex.quote(str(layout.directory)), shlex.quote(str(data_path))
    create = f"mfctl pool create {path} --size {format_size(size_bytes)}"
    if data_path.parent == layout.directory:
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
        write_durably(layout.exported, f"{exported_as}\n")
    except OSError as error:
        raise MediaError(
            f"{layout.exported} cannot be written: {error}", next_step="check space and permissions there"
        ) from error


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


def check_is_pool(layout: PoolLayout) -> None:
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
    has_data = (path / DRIVE_LIST).exists() or layout.data.exists()
    if not free and has_data and layout.holders.is_dir():
        raise FormatError(
            f"the index of the pool {path} is missing",
            next_step=f"make it anew from what is on the medium: mfctl pool rebuild-index {shlex.quote(str(path))}",
        )
    raise _no_pool(path, is_free_place=free)


def check_was_pool(layout: PoolLayout) -> None:
    """Of a pool whose index may be gone: is anything there that only a pool has? What is told of its data else tells to
    remove a directory that may be anything. Raises FormatError."""
    parts = (layout.index, layout.holders, layout.directory / DATA_POINTER, layout.directory / DRIVE_LIST)
    if not any(map(os.path.lexists, parts)):
        raise _no_pool(layout.directory, is_free_place=not os.path.lexists(layout.directory))


def _no_pool(path: Path, *, is_free_place: bool) -> FormatError:
    create = f"mfctl pool create {shlex.quote(str(path))} --size 4GiB"
    other = "name a pool's directory: other files lie in this place"
    return FormatError(f"{path} is not a MeshFusion pool", next_step=create if is_free_place else other)


class _NextStep(Protocol):
    def __call__(self, *, size_bytes: int = ...) -> str: ...


def _check_drive(path: Path, label: Label, size_bytes: int, next_step: _NextStep) -> None:
    """Is ``path`` the drive of that label, and all of it there?"""
    found_name = drive_name(path)
    if label.drive_name and found_name != label.drive_name:
        raise FormatError(
            f"{path} is the drive {found_name or 'without a serial'!r}; this pool lies on {label.drive_name!r}",
            next_step="attach that drive; a copy of a pool cannot be used as one",
        )
    needed_bytes = label.data_start_lba * label.lba_bytes + geometry_of(label).capacity_bytes
    if size_bytes < needed_bytes:
        raise FormatError(
            f"{path} is truncated: {size_bytes} bytes of {needed_bytes}", next_step=next_step(size_bytes=needed_bytes)
        )


def _read_copies(path: Path, next_step: _NextStep) -> tuple[Label, tuple[str, ...], int]:
    """The label, what is wrong with a copy of it that is not needed, and the size of the data in bytes."""
    copies = []
    with contextlib.closing(open_data_file(path, writable=False, direct=DirectMode.OFF)) as data:
        if data.size_bytes < (max(LABEL_LBAS) + 1) * LBA_BYTES:
            raise FormatError(f"{path} is truncated: {data.size_bytes} bytes, not even a label", next_step=next_step())
        for lba in LABEL_LBAS:
            raw = bytearray(LBA_BYTES)
            data.read_into(lba, memoryview(raw))
            copies.append(bytes(raw))
        try:
            return *examine_label_copies(copies, where=str(path)), data.size_bytes
        except MediumFormatError as error:
            if error.fault is FormatFault.DAMAGED:  # nothing to be checked without a label
                raise FormatError(error.message, next_step=next_step()) from error
            raise


def write_new_label(data_path: Path, label: Label) -> None:
    """Of a drive that becomes a pool's: what an earlier life has left of its owners is gone before. Raises as
    :func:`write_label`."""
    with contextlib.closing(open_data_file(data_path, writable=True, direct=DirectMode.OFF)) as data:
        data.write_from(OWNER_LBAS[0], memoryview(bytes((RESERVATION_RECORD_LBA + 2 - OWNER_LBAS[0]) * LBA_BYTES)))
        data.flush()
    write_label(data_path, label)


def remove_new_label(data_path: Path) -> None:
    """Of a drive that has not become a pool's after all. Raises :class:`DataFileError`."""
    with contextlib.closing(open_data_file(data_path, writable=True, direct=DirectMode.OFF)) as data:
        for lba in LABEL_LBAS:
            data.write_from(lba, memoryview(bytes(LBA_BYTES)))
        data.flush()


def write_label(data_path: Path, label: Label) -> None:
    """Both copies, durably. Raises :class:`DataFileError`."""
    raw = encode_label(label)
    assert len(raw) == LBA_BYTES
    with contextlib.closing(open_data_file(data_path, writable=True, direct=DirectMode.OFF)) as data:
        for lba in LABEL_LBAS:
            data.write_from(lba, memoryview(raw))
        data.flush()


__all__ = [
    "FORMAT_VERSION",
    "LIVENESS_SUFFIX",
    "PoolLayout",
    "check_is_pool",
    "check_was_pool",
    "geometry_of",
    "note_exported",
    "read_data_label",
    "read_label",
    "read_label_at",
    "read_label_copies",
    "read_only_label",
    "recreate_step",
    "remove_new_label",
    "step_without",
    "write_label",
    "write_new_label",
]
