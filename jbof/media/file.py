"""A regular file or a block device as one namespace, read and written at logical blocks.

Transfers are whole logical blocks from and to page-aligned memory
(:class:`~meshfusion.jbof.media.buffer.AlignedBuffer`), so that O_DIRECT can be used wherever it works; or many pieces
of other memory, by whoever has seen to their ``alignment``. ``os.preadv`` and ``os.pwritev`` carry their offset and
release the GIL: any number of threads may transfer at once, without locks.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import mmap
import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.media.deallocation import discard_device_range, zero_device_range, zero_file_range
from meshfusion.jbof.media.direct import ASSUMED_ALIGNMENT, DirectAlignment, direct_alignment
from meshfusion.jbof.media.fabrics import FabricsLink, fabrics_links
from meshfusion.jbof.media.faults import DataFileError, MediaFault
from meshfusion.jbof.media.vectors import MAX_VECTORS, length_of, rest_of

Buffer = memoryview | npt.NDArray[np.uint8]


class DirectMode(enum.Enum):
    """May the page cache be passed by? AUTO: where the filesystem allows it."""

    AUTO = "auto"
    REQUIRED = "required"
    OFF = "off"


class SpaceKind(enum.Enum):
    """How a new file's bytes exist."""

    RESERVED = "reserved"  # the filesystem has set the space aside
    SPARSE = "sparse"  # it cannot: a write may still find the disk full


class Place(NamedTuple):
    """What is open, as stat(2) tells it: equal while it is the same file or device."""

    device: int
    inode: int
    special_device: int

    @classmethod
    def of(cls, status: os.stat_result) -> Place:
        return cls(status.st_dev, status.st_ino, status.st_rdev)


class DataFile:
    """One open namespace; made by :func:`open_data_file`. Close it only after every transfer has returned.

    ``direct``: is O_DIRECT in use? ``direct_reason`` says why, or why not. ``alignment``: what it then asks of memory
    (None: the kernel takes the flag, but says that this file does no direct I/O). ``size_bytes``: when opened.
    ``fabrics``: the connections of the kernel's initiator that it lies behind; none: a failed write is over.
    ``is_device``: a block device, not a file; deallocated blocks of a file read as zeros, a device promises nothing.
    """

    def __init__(
        self,
        fd: int,
        path: Path,
        *,
        size_bytes: int,
        writable: bool,
        direct: bool,
        reason: str,
        alignment: DirectAlignment | None = ASSUMED_ALIGNMENT,
        fabrics: tuple[FabricsLink, ...] = (),
        is_device: bool = False,
    ) -> None:
        self._fd = fd
        self.path = path
        self.size_bytes = size_bytes
        self.writable = writable
        self.direct = direct
        self.direct_reason = reason
        self.alignment = alignment
        self.fabrics = fabrics
        self.is_device = is_device

    def __enter__(self) -> DataFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def lba_count(self) -> int:
        return self.size_bytes // LBA_BYTES

    @property
    def place(self) -> Place:
        assert self._fd >= 0, "used after close"
        return Place.of(os.fstat(self._fd))

    def check_place(self) -> None:
        """Raises :class:`DataFileError` when something else lies at :attr:`path` by now, or nothing: what is written
        here would be found by nobody."""
        try:
            found = Place.of(self.path.stat())
        except OSError as error:
            raise DataFileError.from_os_error(error, "it is gone from its place", self.path) from error
        if found != self.place:
            raise DataFileError(MediaFault.MISSING, "something else lies in its place", self.path)

    def read_into(self, lba: int, buffer: Buffer) -> None:
        """Fill ``buffer`` (whole blocks, page-aligned) from block ``lba`` on. Raises :class:`DataFileError`."""
        self._read([self._page_aligned(buffer)], lba)

    def read_vectors(self, lba: int, pieces: Sequence[memoryview]) -> None:
        """Fill ``pieces``, one after another, whole blocks in all, from block ``lba`` on.

        With O_DIRECT the caller sees to it that addresses and lengths keep ``alignment``: there may be thousands.
        Raises :class:`DataFileError`.
        """
        self._read(pieces, lba)

    def write_from(self, lba: int, buffer: Buffer) -> None:
        """Write ``buffer`` (whole blocks, page-aligned) at block ``lba``, never past the size the file had when opened.

        Durable only after :meth:`flush`. Raises :class:`DataFileError`; what then lies there is unknown.
        """
        self._write([self._page_aligned(buffer)], lba)

    def write_vectors(self, lba: int, pieces: Sequence[memoryview]) -> None:
        """The same from ``pieces``, one after another, as :meth:`read_vectors` takes them."""
        self._write(pieces, lba)

    def _read(self, pieces: Sequence[memoryview], lba: int) -> None:
        start, length = self._range(pieces, lba)
        at, end = start, start + length
        while at < end:
            try:
                count = self._whole(os.preadv(self._fd, pieces[:MAX_VECTORS], at))
            except OSError as error:
                raise self._failed(error, "reading", at, end - at) from error
            if count == 0:
                raise self._short(f"it ends at byte {at}, inside a read", start, length)
            pieces = rest_of(pieces, count)
            at += count

    def _write(self, pieces: Sequence[memoryview], lba: int) -> None:
        assert self.writable
        start, length = self._range(pieces, lba)
        at, end = start, start + length
        if end > self.size_bytes:
            raise self._short(f"it ends at byte {self.size_bytes}, inside a write", start, length)
        while at < end:
            try:
                count = self._whole(os.pwritev(self._fd, pieces[:MAX_VECTORS], at))
            except OSError as error:
                raise self._failed(error, "writing", at, end - at) from error
            if count == 0:
                what = f"no progress when writing {end - at} bytes at byte {at}"
                raise DataFileError(MediaFault.IO, what, self.path, offset_bytes=at)
            pieces = rest_of(pieces, count)
            at += count

    def _whole(self, count: int) -> int:
        """What counts as moved: after a short transfer O_DIRECT has to go on where it may begin."""
        if not self.direct:
            return count
        return count - count % (self.alignment.granule_bytes if self.alignment else LBA_BYTES)

    def flush(self) -> None:
        """Make every write that has returned durable (fdatasync). After an error they may all be lost."""
        assert self._fd >= 0, "used after close"
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise DataFileError.from_os_error(error, "flushing failed", self.path) from error

    def deallocate(self, lba: int, lba_count: int) -> bool:
        """These blocks hold nothing any more; a file's space stays its own. False when that is not supported here.

        Raises :class:`DataFileError`; what then lies there is unknown.
        """
        assert self._fd >= 0, "used after close"
        assert self.writable
        start, length = lba * LBA_BYTES, lba_count * LBA_BYTES
        assert 0 <= start < start + length <= self.size_bytes
        try:
            return (discard_device_range if self.is_device else zero_file_range)(self._fd, start, length)
        except OSError as error:
            raise self._failed(error, "deallocating", start, length) from error

    def zero(self, offset_bytes: int, length_bytes: int) -> bool:
        """Zeros are read here from now on, and nothing of what there was. May take as long as writing does. False when
        that is not supported here. Raises as :meth:`deallocate`."""
        assert self._fd >= 0, "used after close"
        assert self.writable
        assert 0 <= offset_bytes < offset_bytes + length_bytes <= self.size_bytes
        try:
            return (zero_device_range if self.is_device else zero_file_range)(self._fd, offset_bytes, length_bytes)
        except OSError as error:
            raise self._failed(error, "zeroing", offset_bytes, length_bytes) from error

    def next_data(self, offset_bytes: int) -> tuple[int, int] | None:
        """``(begin, end)`` in bytes of what lies there or behind and is no hole of a file, which reads as zeros
        (lseek(2), SEEK_DATA). None: nothing. Raises :class:`DataFileError`."""
        assert self._fd >= 0, "used after close"
        if offset_bytes >= self.size_bytes:
            return None
        if self.is_device:
            return offset_bytes, self.size_bytes
        try:
            begin = os.lseek(self._fd, offset_bytes, os.SEEK_DATA)
            return begin, min(os.lseek(self._fd, begin, os.SEEK_HOLE), self.size_bytes)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return None
            raise self._failed(error, "looking for data in", offset_bytes, self.size_bytes - offset_bytes) from error

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _page_aligned(self, buffer: Buffer) -> memoryview:
        view = (buffer if isinstance(buffer, memoryview) else buffer.data).cast("B")
        if self.direct:
            assert np.frombuffer(view, np.uint8).ctypes.data % LBA_BYTES == 0, "O_DIRECT needs page-aligned memory"
        return view

    def _range(self, pieces: Sequence[memoryview], lba: int) -> tuple[int, int]:
        """Where a transfer of ``pieces`` begins, and its length, in bytes."""
        assert self._fd >= 0, "used after close"
        assert lba >= 0
        length = length_of(pieces)
        assert length % LBA_BYTES == 0, f"{length} bytes are not whole blocks"
        return lba * LBA_BYTES, length

    def _failed(self, error: OSError, verb: str, offset_bytes: int, length_bytes: int) -> DataFileError:
        what = f"{verb} {length_bytes} bytes at byte {offset_bytes} failed"
        return DataFileError.from_os_error(error, what, self.path, offset_bytes=offset_bytes)

    def _short(self, what: str, offset_bytes: int, length_bytes: int) -> DataFileError:
        what = f"{what} of {length_bytes} bytes at byte {offset_bytes}"
        return DataFileError(MediaFault.SHORT, what, self.path, offset_bytes=offset_bytes)


def open_data_file(path: Path, *, writable: bool, direct: DirectMode = DirectMode.AUTO) -> DataFile:
    """Open an existing file or block device. Raises :class:`DataFileError`."""
    try:
        mode = path.stat().st_mode  # before opening, because opening a pipe would wait
        if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
            raise DataFileError(MediaFault.MISSING, "is neither a regular file nor a block device", path)
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    except OSError as error:
        verb = "opening for writing" if writable else "opening"
        raise DataFileError.from_os_error(error, f"{verb} failed", path) from error
    try:
        size_bytes = os.lseek(fd, 0, os.SEEK_END)
        works, reason = (False, "switched off by configuration") if direct is DirectMode.OFF else _try_direct(fd)
        if direct is DirectMode.REQUIRED and not works:
            raise DataFileError(MediaFault.UNSUPPORTED, f"O_DIRECT is required: {reason}", path)
        alignment = direct_alignment(fd)
        fabrics = fabrics_links(os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return DataFile(
        fd,
        path,
        size_bytes=size_bytes,
        writable=writable,
        direct=works,
        reason=reason,
        alignment=alignment,
        fabrics=fabrics,
        is_device=stat.S_ISBLK(mode),
    )


def create_data_file(path: Path, size_bytes: int) -> SpaceKind:
    """Create a file of ``size_bytes``, mode 0600, durably, with its space set aside where the filesystem can do that.

    A full disk is therefore an error now, not later. Raises :class:`DataFileError` (EXISTS, FULL, READ_ONLY, ...) and
    leaves nothing behind. (glibc reserves by writing where a filesystem has no fallocate: slow there, but real.)
    """
    assert size_bytes > 0
    assert size_bytes % LBA_BYTES == 0
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DataFileError.from_os_error(error, "creating failed", path) from error
    try:
        space = _reserve(fd, size_bytes)
        os.fsync(fd)
        _sync_directory(path.parent)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise DataFileError.from_os_error(error, f"reserving {size_bytes} bytes failed", path) from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return space


def probe_direct(directory: Path) -> tuple[bool, str]:
    """Does O_DIRECT work on files in ``directory``? Tried on a temporary file; with the reason, for people."""
    try:
        fd, name = tempfile.mkstemp(prefix=".meshfusion-probe-", dir=directory)
    except OSError as error:
        return False, f"no file can be created in {directory}: {error.strerror}"
    try:
        os.write(fd, bytes(LBA_BYTES))
        os.fsync(fd)
        return _try_direct(fd)
    except OSError as error:
        return False, f"a file in {directory} cannot be written: {error.strerror}"
    finally:
        os.close(fd)
        Path(name).unlink(missing_ok=True)


def _try_direct(fd: int) -> tuple[bool, str]:
    """Switch ``fd`` to O_DIRECT if a real read then works; else leave it as it was."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        with AlignedBuffer(max(LBA_BYTES, mmap.PAGESIZE)) as buffer:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.preadv(fd, [buffer.view[:LBA_BYTES]], 0)
    except OSError as error:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        code = errno.errorcode.get(error.errno or 0, str(error.errno))
        return False, f"O_DIRECT does not work on this filesystem or device ({code}): the page cache is used"
    return True, "a read with O_DIRECT worked"


def _reserve(fd: int, size_bytes: int) -> SpaceKind:
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
        os.ftruncate(fd, size_bytes)
        return SpaceKind.SPARSE
    return SpaceKind.RESERVED


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
