"""Can the kernel move a layout's units straight between a file or block device and the engine's memory?"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from meshfusion.host.kv.group_layout import GroupLayout
from meshfusion.jbof.errors import UnsupportedError
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.media.direct import DirectAlignment
from meshfusion.jbof.media.faults import DataFileError
from meshfusion.jbof.media.file import open_data_file


class OpenedData(Protocol):
    """What is asked of a :class:`~meshfusion.jbof.media.file.DataFile` here; there is no need for it to stay open."""

    @property
    def path(self) -> Path: ...

    @property
    def direct(self) -> bool: ...

    @property
    def direct_reason(self) -> str: ...

    @property
    def alignment(self) -> DirectAlignment | None: ...


@dataclass(frozen=True, slots=True)
class DataSight:
    """What an opened file said of itself: see :class:`~meshfusion.jbof.media.file.DataFile`."""

    path: Path
    direct: bool
    direct_reason: str
    alignment: DirectAlignment | None


def look_at_data(path: Path) -> DataSight:
    """Opens a file or block device for reading. Raises :class:`~meshfusion.jbof.media.faults.DataFileError`."""
    with open_data_file(path, writable=False) as data:
        return DataSight(path, data.direct, data.direct_reason, data.alignment)


def look_at_folder(folder: Path) -> DataSight:
    """What a file in ``folder`` would say, tried on one that is gone afterwards.

    Raises :class:`~meshfusion.jbof.media.faults.DataFileError`.
    """
    try:
        with tempfile.NamedTemporaryFile(prefix=".meshfusion-probe-", dir=folder) as tried:
            tried.write(bytes(LBA_BYTES))
            tried.flush()
            seen = look_at_data(Path(tried.name))
    except OSError as error:
        raise DataFileError.from_os_error(error, "trying a file there failed", folder) from error
    return DataSight(folder, seen.direct, seen.direct_reason, seen.alignment)


def check_direct(data: OpenedData) -> DirectAlignment:
    """What O_DIRECT on ``data`` asks of memory.

    Raises :class:`~meshfusion.jbof.errors.UnsupportedError` when the page cache is not passed by: every byte would then
    be copied by the kernel, which is what this path is there to avoid.
    """
    step = "Use the staged path, or put the pool on a block device or a filesystem with O_DIRECT (ext4, XFS)."
    if not data.direct:
        raise UnsupportedError(f"{data.path}: O_DIRECT is not in use: {data.direct_reason}", next_step=step)
    if data.alignment is None:
        raise UnsupportedError(
            f"{data.path}: the kernel takes the flag O_DIRECT, but says that this file does no direct I/O",
            next_step=step,
        )
    return data.alignment


def check_block_layout(data: OpenedData, memory_address: int, layout: GroupLayout) -> None:
    """``memory_address``: of the memory that the layout's offsets count from.

    Raises :class:`~meshfusion.jbof.errors.UnsupportedError` when :func:`check_direct` does, or when memory and layout
    do not keep what it says, with the numbers.
    """
    alignment = check_direct(data)
    source = "the kernel says" if alignment.is_told else "assumed: this kernel does not tell"
    asked = f"{data.path} asks for ({source})"
    if layout.run_bytes % alignment.granule_bytes:
        raise UnsupportedError(
            f"the KV layout has runs of {layout.run_bytes} bytes, not a multiple of the {alignment.granule_bytes} that "
            f"{asked}",
            next_step="Use the staged path, or an engine block size (tokens) that makes the runs a multiple of it.",
        )
    misplaced = _misplaced_bytes(memory_address, layout, alignment.memory_bytes)
    if misplaced:
        raise UnsupportedError(
            f"KV memory at {memory_address:#x} has runs that begin {misplaced} bytes behind a multiple of the "
            f"{alignment.memory_bytes} bytes that {asked}",
            next_step="Use the staged path, or KV memory that begins at a page.",
        )


def _misplaced_bytes(memory_address: int, layout: GroupLayout, alignment_bytes: int) -> int:
    """How far behind a multiple of ``alignment_bytes`` the first run is that is not at one. 0: all are."""
    first = (memory_address + layout.run_starts) % alignment_bytes
    second = (memory_address + layout.run_starts + layout.run_strides) % alignment_bytes
    for places in (first, second) if layout.block_count > 1 else (first,):
        if places.any():
            return int(places[places != 0][0])
    return 0
