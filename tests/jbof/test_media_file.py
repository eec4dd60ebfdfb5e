"""DataFile on real filesystems: the disk the tests run on, tmpfs, a full one, a read-only one, a loop device."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.media.faults import DataFileError, MediaFault
from meshfusion.jbof.media.file import (
    DirectMode,
    SpaceKind,
    create_data_file,
    open_data_file,
    probe_direct,
)
from tests.jbof.loop_devices import loop_device_of, privileged

LBA = 4096
MIB = 1 << 20


@pytest.fixture
def data_path(tmp_path: Path) -> Path:
    """A file of 4 MiB whose block n is filled with its own number."""
    path = tmp_path / "data"
    np.repeat(np.arange(1024, dtype="<u4"), LBA // 4).tofile(path)
    return path


@pytest.fixture
def tiny_mount(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB."""
    mount = tmp_path / "tiny"
    mount.mkdir()
    privileged("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount))
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.fixture
def loop_device(data_path: Path) -> Iterator[Path]:
    with loop_device_of(data_path) as device:
        yield device


def block_number(buffer: AlignedBuffer, block: int = 0) -> int:
    return int.from_bytes(buffer.view[block * LBA : block * LBA + 4], "little")


@pytest.mark.parametrize("direct", list(DirectMode))
def test_read_write_flush(data_path: Path, direct: DirectMode) -> None:
    if direct is DirectMode.REQUIRED and not probe_direct(data_path.parent)[0]:
        pytest.skip(f"needs hardware: {probe_direct(data_path.parent)[1]}")
    with open_data_file(data_path, writable=True, direct=direct) as data, AlignedBuffer(3 * LBA) as buffer:
        assert (data.size_bytes, data.lba_count) == (4 * MIB, 1024)
        assert data.direct or direct is not DirectMode.REQUIRED
        assert not (data.direct and direct is DirectMode.OFF)
        assert data.direct_reason
        data.read_into(7, buffer.view)
        assert [block_number(buffer, n) for n in range(3)] == [7, 8, 9]
        data.read_into(1021, buffer.array)
        assert block_number(buffer, 2) == 1023
        buffer.array[:] = 0xEE
        data.write_from(100, buffer.view[:LBA])
        data.write_from(1023, buffer.array[LBA : 2 * LBA])
        data.flush()
    content = data_path.read_bytes()
    assert content[100 * LBA : 101 * LBA] == content[1023 * LBA :] == b"\xee" * LBA
    assert content[99 * LBA : 99 * LBA + 4] == (99).to_bytes(4, "little")
    assert content[101 * LBA : 101 * LBA + 4] == (101).to_bytes(4, "little")


def test_direct_really_is_direct(data_path: Path) -> None:
    """A flag in the kernel's own table says so."""
    works, reason = probe_direct(data_path.parent)
    assert reason
    with open_data_file(data_path, writable=False) as data:
        info = Path(f"/proc/self/fdinfo/{data._fd}").read_text()
        flags = int(info.split("flags:")[1].split()[0], 8)
        assert bool(flags & os.O_DIRECT) == data.direct == works


def test_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    probe_direct(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert probe_direct(tmp_path / "none") == (
        False,
        f"no file can be created in {tmp_path / 'none'}: No such file or directory",
    )


def test_a_filesystem_without_direct(data_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def refusing(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refusing)
    with open_data_file(data_path, writable=False) as data, AlignedBuffer(LBA) as buffer:
        assert not data.direct
        assert "EINVAL" in data.direct_reason
        data.read_into(5, buffer.view)
        assert block_number(buffer) == 5
    with pytest.raises(DataFileError, match="O_DIRECT is required") as caught:
        open_data_file(data_path, writable=False, direct=DirectMode.REQUIRED)
    assert caught.value.fault is MediaFault.UNSUPPORTED


def test_tmpfs(tiny_mount: Path) -> None:
    """Whatever this kernel's tmpfs says to O_DIRECT, bytes come back."""
    path = tiny_mount / "data"
    assert create_data_file(path, 512 << 10) is SpaceKind.RESERVED
    with open_data_file(path, writable=True) as data, AlignedBuffer(LBA) as buffer:
        assert data.direct == probe_direct(tiny_mount)[0]
        buffer.array[:] = 9
        data.write_from(127, buffer.view)
        buffer.array[:] = 0
        data.flush()
        data.read_into(127, buffer.view)
        assert set(buffer.view) == {9}


def test_a_block_device_and_its_io_error(loop_device: Path, data_path: Path) -> None:
    with open_data_file(loop_device, writable=True) as data, AlignedBuffer(LBA) as buffer:
        assert data.size_bytes == 4 * MIB
        data.read_into(1000, buffer.view)
        assert block_number(buffer) == 1000
        os.truncate(data_path, 2 * MIB)  # the device still claims 4 MiB and cannot serve them
        with pytest.raises(DataFileError, match="byte 4096000 failed") as caught:
            data.read_into(1000, buffer.view)
        assert caught.value.fault is MediaFault.IO
        assert caught.value.errno == errno.EIO
        assert caught.value.offset_bytes == 1000 * LBA


@pytest.mark.parametrize("direct", [DirectMode.AUTO, DirectMode.OFF])
@pytest.mark.parametrize("left_bytes", [0, LBA, 9 * LBA, 10 * LBA - 512, 10 * LBA + 100, 11 * LBA])
def test_a_truncated_file(data_path: Path, direct: DirectMode, left_bytes: int) -> None:
    with open_data_file(data_path, writable=True, direct=direct) as data, AlignedBuffer(4 * LBA) as buffer:
        os.truncate(data_path, left_bytes)
        with pytest.raises(DataFileError, match="truncated") as caught:
            data.read_into(8, buffer.view)
        assert caught.value.fault is MediaFault.SHORT
        assert caught.value.path == data_path
    with open_data_file(data_path, writable=True, direct=direct) as data, AlignedBuffer(4 * LBA) as buffer:
        with pytest.raises(DataFileError) as caught:
            data.write_from(8, buffer.view)
        assert caught.value.fault is MediaFault.SHORT
    assert data_path.stat().st_size == left_bytes, "a write must never grow the file"


def test_missing_foreign_and_unusable_paths(tmp_path: Path, data_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (tmp_path / "none", tmp_path, fifo, Path("/dev/null"), data_path / "below", tmp_path / ("x" * 300)):
        with pytest.raises(DataFileError) as caught:
            open_data_file(path, writable=True)
        assert caught.value.fault is MediaFault.MISSING
        assert str(path) in str(caught.value)
        assert "next step" in str(caught.value)


@pytest.fixture
def ordinary_user() -> Iterator[None]:
    """Root may open anything, so root becomes nobody for a while."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    yield
    if is_root:
        os.seteuid(0)


def test_a_file_without_permission(ordinary_user: None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data"
        path.write_bytes(bytes(LBA))
        path.chmod(0o400)
        with open_data_file(path, writable=False):
            pass
        with pytest.raises(DataFileError, match="EACCES") as caught:
            open_data_file(path, writable=True)
        assert caught.value.fault is MediaFault.READ_ONLY


def test_a_read_only_filesystem(tiny_mount: Path) -> None:
    path = tiny_mount / "data"
    create_data_file(path, LBA)
    privileged("mount", "-o", "remount,ro", str(tiny_mount))
    with pytest.raises(DataFileError, match="EROFS") as caught:
        open_data_file(path, writable=True)
    assert caught.value.fault is MediaFault.READ_ONLY
    with pytest.raises(DataFileError) as caught:
        create_data_file(tiny_mount / "other", LBA)
    assert caught.value.fault is MediaFault.READ_ONLY
    assert "Read-only" in probe_direct(tiny_mount)[1]
    with open_data_file(path, writable=False) as data, AlignedBuffer(LBA) as buffer:
        data.read_into(0, buffer.view)


def test_create(tmp_path: Path) -> None:
    path = tmp_path / "new"
    assert create_data_file(path, 3 * MIB) is SpaceKind.RESERVED
    info = path.stat()
    assert (info.st_size, stat.S_IMODE(info.st_mode)) == (3 * MIB, 0o600)
    assert info.st_blocks * 512 >= 3 * MIB
    with pytest.raises(DataFileError) as caught:
        create_data_file(path, LBA)
    assert caught.value.fault is MediaFault.EXISTS
    assert path.stat().st_size == 3 * MIB


def test_create_on_a_full_filesystem(tiny_mount: Path) -> None:
    path = tiny_mount / "new"
    with pytest.raises(DataFileError, match="ENOSPC") as caught:
        create_data_file(path, 2 * MIB)
    assert caught.value.fault is MediaFault.FULL
    assert not path.exists()


def test_writing_to_a_full_filesystem(tiny_mount: Path) -> None:
    path = tiny_mount / "sparse"
    with path.open("wb") as sparse:
        sparse.truncate(2 * MIB)
    with open_data_file(path, writable=True) as data, AlignedBuffer(2 * MIB) as buffer:
        buffer.array[:] = 1
        with pytest.raises(DataFileError) as caught:
            data.write_from(0, buffer.view)
        assert caught.value.fault is MediaFault.FULL


def test_create_where_space_cannot_be_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    assert create_data_file(tmp_path / "new", MIB) is SpaceKind.SPARSE
    assert (tmp_path / "new").stat().st_size == MIB


def test_create_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(fd: int, offset: int, length: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "posix_fallocate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        create_data_file(tmp_path / "new", MIB)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("direct", [DirectMode.AUTO, DirectMode.OFF])
def test_short_transfers_are_continued(data_path: Path, monkeypatch: pytest.MonkeyPatch, direct: DirectMode) -> None:
    """A kernel may move less than asked, and not even whole blocks."""
    dice = random.Random(5)
    preadv, pwritev = os.preadv, os.pwritev

    def short_read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        moved = preadv(fd, [buffers[0][: dice.randrange(2 * LBA, 5 * LBA, LBA)]], offset)
        return moved - dice.choice([0, 512] if moved > LBA else [0])

    def short_write(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        moved = pwritev(fd, [buffers[0][: dice.randrange(2 * LBA, 5 * LBA, LBA)]], offset)
        return moved - dice.choice([0, 512] if moved > LBA else [0])

    with open_data_file(data_path, writable=True, direct=direct) as data, AlignedBuffer(64 * LBA) as buffer:
        monkeypatch.setattr(os, "pwritev", short_write)
        monkeypatch.setattr(os, "preadv", short_read)
        for _ in range(20):
            buffer.array[:] = np.frombuffer(dice.randbytes(buffer.size_bytes), dtype=np.uint8)
            expected = bytes(buffer.view)
            data.write_from(64, buffer.view)
            buffer.array[:] = 0
            data.read_into(64, buffer.view)
            assert bytes(buffer.view) == expected


@pytest.mark.parametrize(
    ("number", "fault"),
    [
        (errno.EIO, MediaFault.IO),
        (errno.ENOSPC, MediaFault.FULL),
        (errno.EDQUOT, MediaFault.FULL),
        (errno.EROFS, MediaFault.READ_ONLY),
        (errno.EPERM, MediaFault.READ_ONLY),
    ],
)
def test_errors_name_everything(
    data_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fault: MediaFault
) -> None:
    def failing(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with open_data_file(data_path, writable=True) as data, AlignedBuffer(2 * LBA) as buffer:
        monkeypatch.setattr(os, "pwritev", failing)
        monkeypatch.setattr(os, "fdatasync", failing)
        with pytest.raises(DataFileError) as caught:
            data.write_from(3, buffer.view)
        assert (caught.value.fault, caught.value.errno, caught.value.offset_bytes) == (fault, number, 3 * LBA)
        assert str(data_path) in caught.value.message
        assert "writing 8192 bytes at byte 12288 failed" in caught.value.message
        assert errno.errorcode[number] in caught.value.message
        with pytest.raises(DataFileError, match="flushing failed") as caught:
            data.flush()
        assert caught.value.fault is fault


def test_a_write_without_progress_ends(data_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with open_data_file(data_path, writable=True) as data, AlignedBuffer(LBA) as buffer:
        with pytest.raises(DataFileError, match="no progress") as caught:
            data.write_from(0, buffer.view)
        assert caught.value.fault is MediaFault.IO


def test_our_own_mistakes(data_path: Path) -> None:
    with open_data_file(data_path, writable=False) as data, AlignedBuffer(2 * LBA) as buffer:
        with pytest.raises(AssertionError):
            data.write_from(0, buffer.view)
        with pytest.raises(AssertionError):
            data.read_into(0, buffer.view[:100])
        with pytest.raises(AssertionError):
            data.read_into(-1, buffer.view)
        if data.direct:
            with pytest.raises(AssertionError):
                data.read_into(0, buffer.view[512 : 512 + LBA])
        data.close()
        data.close()
        with pytest.raises(AssertionError):
            data.read_into(0, buffer.view)
        with pytest.raises(AssertionError):
            data.flush()


def test_threads_share_one_file(data_path: Path) -> None:
    """Eight threads write and read their own blocks at once."""
    barrier = threading.Barrier(8)

    def work(worker: int) -> bool:
        with AlignedBuffer(LBA) as buffer:
            barrier.wait(timeout=10)
            for turn in range(50):
                lba = worker + 8 * turn
                buffer.array[:] = (worker * 31 + turn) % 256
                data.write_from(lba, buffer.view)
                buffer.array[:] = 0
                data.read_into(lba, buffer.view)
                if set(buffer.view) != {(worker * 31 + turn) % 256}:
                    return False
        return True

    with open_data_file(data_path, writable=True) as data, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


@pytest.mark.parametrize("huge_pages", [False, True])
def test_aligned_buffer(huge_pages: bool) -> None:
    buffer = AlignedBuffer(4 * MIB, huge_pages=huge_pages)
    assert buffer.array.shape == (4 * MIB,)
    assert buffer.array.ctypes.data % 4096 == 0
    buffer.array[5] = 77
    assert buffer.view[5] == 77
    kept = buffer.array[5:6]
    buffer.close()
    buffer.close()
    assert kept[0] == 77, "memory lives as long as someone looks at it"
    with pytest.raises(AssertionError):
        _ = buffer.array
    with pytest.raises(AssertionError):
        AlignedBuffer(100)


def test_a_closed_buffer_gives_its_memory_back() -> None:
    def mapped_kib() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmSize:")[1].split()[0])

    with AlignedBuffer(64 * MIB):
        during = mapped_kib()
    assert during - mapped_kib() >= 64 * 1024
