"""Nothing of what a device or file held can be read through the pool that it becomes."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from meshfusion.dpu import pool_wipe
from meshfusion.dpu.api.drive_types import AddDriveRequest
from meshfusion.dpu.pool import Pool
from meshfusion.dpu.pool_create import add_drive, create_pool, create_pool_of_drives
from meshfusion.dpu.pool_wipe import wipe
from meshfusion.jbof.errors import FormatError, MediaError, PoolBusyError, ServiceUnavailableError
from meshfusion.jbof.media.file import DataFile, DirectMode, open_data_file
from tests.dpu.pool_cases import SEGMENT_BYTES, SIZE_BYTES, make_pool
from tests.jbof.loop_devices import loop_device_of

SECRET = b"of another tenant"
BEYOND_BYTES = 3 << 20  # what the device has behind the pool


def full(path: Path, *, blank_head: bool = True) -> Path:
    """Old data everywhere, but for the head, which is all that is looked at to tell what is blank."""
    size_bytes = SIZE_BYTES + BEYOND_BYTES
    head_bytes = 1 << 20 if blank_head else 0
    path.write_bytes(bytes(head_bytes) + (SECRET * (size_bytes // len(SECRET) + 1))[: size_bytes - head_bytes])
    return path


@contextlib.contextmanager
def device(kind: str, folder: Path, *, blank_head: bool = True) -> Iterator[Path]:
    backing = full(folder / "backing", blank_head=blank_head)
    if kind == "file":
        yield backing
    else:
        with loop_device_of(backing) as path:
            yield path


def holds_secret(path: Path) -> bool:
    return SECRET in path.read_bytes()


@pytest.mark.parametrize("kind", ["file", "loop device"])
def test_a_pool_on_what_was_anothers_shows_nothing_of_it(tmp_path: Path, kind: str) -> None:
    """Blank at its head, so that nobody had to allow it: the rest would be readable through the namespace."""
    with device(kind, tmp_path) as data:
        assert holds_secret(data)
        create_pool(tmp_path / "p", size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_path=data)
        assert not holds_secret(data), "also behind the pool's end"
        with Pool.open(tmp_path / "p"):
            pass


@pytest.mark.parametrize("kind", ["file", "loop device"])
def test_a_slice_given_to_another_tenant_by_force(tmp_path: Path, kind: str) -> None:
    with device(kind, tmp_path, blank_head=False) as data:
        create = partial(
            create_pool, tmp_path / "p", size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_path=data
        )
        with pytest.raises(FormatError, match="not blank"):
            create()
        assert holds_secret(data), "nothing is lost before it is allowed"
        create(overwrite_serial=data.name)
        assert not holds_secret(data)


def test_a_drive_that_is_added_at_rest_or_while_served(tmp_path: Path) -> None:
    make_pool(tmp_path / "p")
    first, second = full(tmp_path / "first"), full(tmp_path / "second")
    add_drive(tmp_path / "p", size_bytes=SIZE_BYTES, data_path=first)
    with Pool.open(tmp_path / "p") as pool:
        added = pool.drive_admin.add_drive(AddDriveRequest(SIZE_BYTES, str(second)), deadline_s=10)
        assert added.number == 2
    assert not holds_secret(first)
    assert not holds_secret(second)


def test_without_the_kernels_help_zeros_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = full(tmp_path / "data")
    os.truncate(data, SIZE_BYTES + 4096 + 100)  # whole blocks are all that can be written, and are exported
    monkeypatch.setattr(DataFile, "zero", lambda *_: False)
    wipe(data)
    assert not any(data.read_bytes()[: SIZE_BYTES + 4096])
    assert data.stat().st_size == SIZE_BYTES + 4096 + 100


def test_progress_is_told_and_can_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_wipe, "PIECE_BYTES", 1 << 20)
    data = full(tmp_path / "data")
    size_bytes = SIZE_BYTES + BEYOND_BYTES
    told: list[tuple[int, int]] = []
    wipe(data, lambda done, total: told.append((done, total)))
    assert told == [(done, size_bytes) for done in range(0, size_bytes + 1, 1 << 20)]

    full(data)

    def stop(done: int, total: int) -> None:
        if done:
            raise MediaError("enough", next_step="none")

    with pytest.raises(MediaError, match="enough"):
        wipe(data, stop)
    with pytest.raises(MediaError, match="enough"):
        create_pool(tmp_path / "p", size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_path=full(data), tell=stop)
    assert not (tmp_path / "p").exists(), "nothing half-made"
    create_pool(tmp_path / "p", size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_path=data)


def test_holes_of_a_file_stay_holes(tmp_path: Path) -> None:
    """What was never written needs no zeros: a large file that is mostly holes must not fill the disk."""
    data = tmp_path / "data"
    with data.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 39)
        file.write(SECRET)
    wipe(data)
    assert data.stat().st_blocks * 512 < 1 << 20
    with data.open("rb") as file:
        file.seek(1 << 39)
        assert not any(file.read(len(SECRET)))
    untouched = tmp_path / "untouched"
    untouched.touch()
    os.truncate(untouched, 1 << 40)
    wipe(untouched)
    assert untouched.stat().st_blocks == 0


@pytest.mark.parametrize("where", [0, 1 << 19, (1 << 20) - 4096])
def test_a_drive_that_says_it_is_zero_and_is_not_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: int
) -> None:
    data = tmp_path / "data"
    data.write_bytes(random.Random(7).randbytes(4096) * 256)
    monkeypatch.setattr(DataFile, "zero", lambda *_: True)
    with data.open("r+b") as file:
        file.write(bytes(1 << 20))
        file.seek(where)
        file.write(SECRET)
    with pytest.raises(MediaError, match=f"block {where // 4096} does not"):
        wipe(data)


def test_no_pool_is_made_on_such_a_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = full(tmp_path / "data")
    monkeypatch.setattr(DataFile, "zero", lambda *_: True)
    with pytest.raises(MediaError, match="was told to hold zeros"):
        create_pool(tmp_path / "p", size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_path=data)
    assert not (tmp_path / "p").exists()


def test_none_is_wiped_unless_all_can_be_used(tmp_path: Path) -> None:
    first, second = full(tmp_path / "first"), full(tmp_path / "second", blank_head=False)
    create = partial(create_pool_of_drives, size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES)
    with pytest.raises(FormatError, match="second is not blank"):
        create(tmp_path / "p", data_paths=[first, second])
    assert holds_secret(first)
    other = tmp_path / "other"
    create(other, data_paths=[full(tmp_path / "third")])
    with Pool.open(other), pytest.raises((PoolBusyError, FormatError)):
        create(tmp_path / "p", data_paths=[first, tmp_path / "third"])
    assert holds_secret(first)


def test_a_service_that_ends_does_not_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_pool(tmp_path / "p")
    data = full(tmp_path / "data")
    with Pool.open(tmp_path / "p") as pool:
        admin = pool.drive_admin
        real_zero = DataFile.zero

        def zero(self: DataFile, offset_bytes: int, length_bytes: int) -> bool:
            assert admin.close(1.0), "no change is under way meanwhile"
            return real_zero(self, offset_bytes, length_bytes)

        monkeypatch.setattr(DataFile, "zero", zero)
        with pytest.raises(ServiceUnavailableError, match="is ending"):
            admin.add_drive(AddDriveRequest(SIZE_BYTES, str(data)), deadline_s=10)
    with open_data_file(tmp_path / "p" / "data", writable=False, direct=DirectMode.OFF):
        pass
    Pool.open(tmp_path / "p").close()
