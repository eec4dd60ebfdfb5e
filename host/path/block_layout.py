"""Can the kernel move a layout's units straight between a file or block device and the engine's memory, and will it
give that memory back in time?"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from meshfusion.host.kv.group_layout import GroupLayout
from meshfusion.jbof.errors import UnsupportedError
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.media.direct import DirectAlignment
from meshfusion.jbof.media.fabrics import FabricsLink, longest_wait_s
from meshfusion.jbof.media.faults import DataFileError
from meshfusion.jbof.media.file import open_data_file

MOST_WAIT_S: Final = 30
"""A lost connection may keep an engine's blocks that long (rule 8); the kernel's own default is ten minutes."""
LEAST_LENGTH_BYTES: Final = 512
"""No drive has smaller logical blocks, and no piece of a direct transfer may be shorter (Linux: block/bio.c)."""

_MOST_PLACE_BYTES: Final = 1 << 20
_ANOTHER_BLOCK_SIZE: Final = (
    "Use the staged path, or an engine block size (tokens) that makes the runs a multiple of it."
)


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

    @property
    def fabrics(self) -> tuple[FabricsLink, ...]: ...


@dataclass(frozen=True, slots=True)
class DataSight:
    """What an opened file said of itself: see :class:`~meshfusion.jbof.media.file.DataFile`."""

    path: Path
    direct: bool
    direct_reason: str
    alignment: DirectAlignment | None
    fabrics: tuple[FabricsLink, ...] = ()


@dataclass(frozen=True, slots=True)
class Runs:
    """The pieces of memory that a layout's units are made of: ``run_bytes`` each, all of them at multiples of
    ``place_bytes``, a power of two and at most 1 MiB."""

    run_bytes: int
    place_bytes: int

    @classmethod
    def of(cls, memory_address: int, layouts: Sequence[GroupLayout]) -> Runs:
        """What all KV groups' runs keep. ``memory_address``: of the memory that the layouts' offsets count from.

        Where runs differ in length ``run_bytes`` is the largest piece that all are made of.
        """
        places = []
        for layout in layouts:
            places.append(layout.run_starts + memory_address)
            if layout.block_count > 1:
                places.append(layout.run_strides)
        bits = int(np.bitwise_or.reduce(np.concatenate([*places, [_MOST_PLACE_BYTES]])))
        return cls(math.gcd(*(layout.run_bytes for layout in layouts)), bits & -bits)


def look_at_data(path: Path) -> DataSight:
    """Opens a file or block device for reading. Raises :class:`~meshfusion.jbof.media.faults.DataFileError`."""
    with open_data_file(path, writable=False) as data:
        return DataSight(path, data.direct, data.direct_reason, data.alignment, data.fabrics)


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
    return DataSight(folder, seen.direct, seen.direct_reason, seen.alignment, seen.fabrics)


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


def check_patience(data: OpenedData) -> None:
    """A read that the kernel has under way keeps its blocks, so that it must end in time (rule 8).

    Raises :class:`~meshfusion.jbof.errors.UnsupportedError` when it would wait for a lost connection too long.
    """
    if not data.fabrics:
        return
    wait_s = longest_wait_s(data.fabrics)
    if wait_s is not None and wait_s <= MOST_WAIT_S:
        return
    how_long = "for ever" if wait_s is None else f"{wait_s} s"
    controllers = [link.controller for link in data.fabrics]
    raise UnsupportedError(
        f"{data.path} lies behind {', '.join(controllers)} (NVMe/{data.fabrics[0].transport}): when its connection is "
        f"lost, I/O waits {how_long}, and with it the blocks being loaded; {MOST_WAIT_S} s is the most",
        next_step="Use the staged path, or set a limit for each controller: "
        f"echo 5 > /sys/class/nvme/{controllers[0]}/fast_io_fail_tmo",
    )


def check_runs_at_all(runs: Runs) -> None:
    """Is there a device that could take these? Raises :class:`~meshfusion.jbof.errors.UnsupportedError` if not."""
    if runs.run_bytes % LEAST_LENGTH_BYTES:
        raise UnsupportedError(
            f"the KV layout has runs of {runs.run_bytes} bytes, not a multiple of the {LEAST_LENGTH_BYTES} that any "
            f"drive asks for: the block path cannot move them",
            next_step=_ANOTHER_BLOCK_SIZE,
        )


def check_runs(data: OpenedData, runs: Runs) -> None:
    """Raises :class:`~meshfusion.jbof.errors.UnsupportedError` when :func:`check_direct` does, or when the runs do not
    keep what it says, with the numbers."""
    alignment = check_direct(data)
    source = "the kernel says" if alignment.is_told else "assumed: this kernel does not tell"
    asked = f"{data.path} asks for ({source})"
    if runs.run_bytes % alignment.granule_bytes:
        raise UnsupportedError(
            f"the KV layout has runs of {runs.run_bytes} bytes, not a multiple of the {alignment.granule_bytes} that "
            f"{asked}",
            next_step=_ANOTHER_BLOCK_SIZE,
        )
    if runs.place_bytes % alignment.memory_bytes:
        raise UnsupportedError(
            f"KV memory has runs that begin at multiples of {runs.place_bytes} bytes, not of the "
            f"{alignment.memory_bytes} that {asked}",
            next_step="Use the staged path, or KV memory that begins at a page.",
        )


def check_block_layout(data: OpenedData, memory_address: int, layouts: Sequence[GroupLayout]) -> None:
    """As :func:`check_runs`. ``memory_address``: of the memory that the layouts' offsets count from."""
    check_runs(data, Runs.of(memory_address, layouts))
