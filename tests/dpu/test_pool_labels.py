"""The two copies of a pool's label, and what opening, checking and the next steps make of bad ones."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from meshfusion.dpu.pool import Pool, check_pool, inspect_pool
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.jbof.errors import FormatError
from meshfusion.jbof.format import LBA_BYTES
from tests.dpu.pool_cases import SIZE_BYTES, make_pool


def spoil(path: Path, offset: int, value: bytes) -> None:
    with PoolLayout(path).data.open("r+b") as data:
        data.seek(offset)
        data.write(value)


def flip(path: Path, offset: int) -> None:
    """A bit of what lies there: a byte of the pool's id may be any."""
    with PoolLayout(path).data.open("rb") as data:
        data.seek(offset)
        value = data.read(1)[0]
    spoil(path, offset, bytes([value ^ 0x10]))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make_pool(tmp_path / "pool")
    return tmp_path / "pool"


@pytest.mark.parametrize(
    ("offset", "value", "text"),
    [
        (0, bytes(LBA_BYTES), "the first copy of its label (byte 0) does not start with MESHFUSN"),
        (20, b"x" * 8, "the first copy of its label (byte 0) is damaged"),
        (LBA_BYTES + 20, b"x" * 8, "the second copy of its label (byte 4096) is damaged"),
    ],
)
def test_a_bad_copy_beside_a_good_one_is_told(
    path: Path, offset: int, value: bytes, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(path, offset, value)
    (problem,) = check_pool(path, lambda checked, total: None).label_problems
    assert text in problem
    with caplog.at_level(logging.WARNING), Pool.open(path):
        pass
    (record,) = caplog.records
    assert text in record.getMessage()


def test_good_copies_are_not_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert check_pool(path, lambda checked, total: None).label_problems == ()
    with caplog.at_level(logging.WARNING), Pool.open(path):
        pass
    assert not caplog.records


@pytest.mark.parametrize("offset", [8, LBA_BYTES + 8])
def test_a_copy_of_another_version_refuses_to_open(path: Path, offset: int) -> None:
    spoil(path, offset, b"\x09")
    for use in (Pool.open, inspect_pool):
        with pytest.raises(FormatError, match="format version 9"):
            use(path)


def test_the_way_out_of_lost_data_is_complete(path: Path) -> None:
    anew = f"rm -r {path}, then mfctl pool create {path} --size"
    os.truncate(path / "data", 1 << 20)
    with pytest.raises(FormatError, match="is truncated: 1048576 bytes of") as caught:
        inspect_pool(path)
    assert f"{anew} {SIZE_BYTES >> 20}MiB; only cached chunks are lost" in caught.value.next_step
    os.truncate(path / "data", 0)
    with pytest.raises(FormatError, match="is truncated: 0 bytes") as caught:
        inspect_pool(path)
    assert f"{anew} 4GiB; only cached chunks are lost" in caught.value.next_step
    (path / "data").unlink()
    with pytest.raises(FormatError, match="is missing") as caught:
        inspect_pool(path)
    assert f"{anew} 4GiB; only cached chunks are lost" in caught.value.next_step
    assert "attach" not in caught.value.next_step


def test_the_way_out_of_lost_data_elsewhere(tmp_path: Path) -> None:
    data, pool = tmp_path / "disk 1", tmp_path / "pool"
    data.touch()
    os.truncate(data, SIZE_BYTES)
    make_pool(pool, data_path=data)
    with data.open("r+b") as file:
        file.truncate(1 << 20)
    with pytest.raises(FormatError) as caught:
        inspect_pool(pool)
    step = caught.value.next_step
    assert f"dd if=/dev/zero of='{data}' bs=4096 count=2 conv=notrunc" in step
    assert f"--data-path '{data}'" in step
    data.unlink()
    with pytest.raises(FormatError) as caught:
        inspect_pool(pool)
    assert caught.value.next_step.startswith(f"plug it in again, or correct its path in {pool}/data.path; only if")


def test_two_damaged_copies_need_a_new_pool(path: Path) -> None:
    for offset in (20, LBA_BYTES + 20):
        flip(path, offset)
    with pytest.raises(FormatError, match="is damaged") as caught:
        inspect_pool(path)
    assert f"rm -r {path}" in caught.value.next_step
