"""The staged and the block path on a pool of two drives: each unit from its own, flushed where it was written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshfusion.host.path.data_path import DataPath
from meshfusion.host.path.load_job import UnitRead
from meshfusion.host.path.pool_data import PoolData
from meshfusion.host.path.shards import ShardWrite, WriteFate
from meshfusion.host.path.spans import spans_of
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.pool_addresses import pool_lba
from tests.host.support.data_files import UnrulyFile, flip_bit, media_error, open_new_file
from tests.host.support.local_paths import LocalPath
from tests.host.support.staged_rig import FIRST_LBA, Rig, into, wait

SECOND = 3  # the namespace of the other drive; that of drive 1 is not open


class TwoDrives:
    """A rig of a local path whose writes name either drive, at the same LBAs."""

    def __init__(self, local: LocalPath, folder: Path, kernels: DigestKernels) -> None:
        second: UnrulyFile = open_new_file(folder / "second", 16 << 20, kind=UnrulyFile)

        rig_type: Any = local.rig_type

        class OnBoth(rig_type):
            def open_path(self, kernels: DigestKernels, options: dict[str, Any]) -> DataPath:
                first: Any = self.__dict__["file"]
                self.__dict__["file"] = PoolData({1: first, SECOND: second})
                opened: DataPath = super().open_path(kernels, options)
                self.__dict__["file"] = first
                return opened

        self.rig: Rig = OnBoth(folder / "first", local.layers(), kernels)
        self.rig.kv.fill(3)
        self.files: dict[int, UnrulyFile] = {1: self.rig.file, SECOND: second}

    def write(self, namespace: int, save_id: int, block_ids: list[int]) -> ShardWrite:
        self.rig.next_lba = FIRST_LBA
        write = self.rig.shard_write(save_id, block_ids)
        return replace(write, extent=replace(write.extent, namespace=namespace))

    def reads(self, write: ShardWrite, digests: tuple[bytes, ...]) -> list[UnitRead]:
        reads = self.rig.reads(write, digests)
        return [read._replace(lba=pool_lba(write.extent.namespace, read.lba)) for read in reads]

    def save(self, namespace: int, save_id: int, block_ids: list[int]) -> list[UnitRead]:
        write = self.write(namespace, save_id, block_ids)
        self.rig.path.save([write])
        digests = self.rig.written(1)[save_id].unit_digests
        assert digests is not None
        return self.reads(write, digests)


@pytest.fixture
def two(tmp_path: Path, kernels: DigestKernels, local: LocalPath) -> Iterator[TwoDrives]:
    made = TwoDrives(local, tmp_path, kernels)
    try:
        yield made
    finally:
        assert made.rig.path.close()


def test_units_of_both_drives_come_back_in_one_load(two: TwoDrives, tmp_path: Path) -> None:
    first, second = two.save(1, 1, [1, 2]), two.save(SECOND, 2, [3, 4])
    assert [read.lba for read in first] == [read.lba - (2 << 40) for read in second], "the same places on two drives"
    expected = [two.rig.kv.unit(block) for block in (1, 3, 2, 4)]
    mixed = [first[0], second[0], first[1], second[1]]
    assert wait(two.rig.path.load(into(mixed, [7, 8, 9, 10]), abandon_after_s=10)).failures == ()
    assert [two.rig.kv.unit(block) for block in (7, 8, 9, 10)] == expected
    raw = (tmp_path / "second").read_bytes()
    at = (second[0].lba & (1 << 40) - 1) * LBA_BYTES
    assert raw[at : at + second[0].unit_bytes] == expected[1]


def test_each_drive_is_flushed_when_it_was_written_to(two: TwoDrives) -> None:
    two.save(1, 1, [1])
    assert [file.flush_count for file in two.files.values()] == [1, 0]
    two.rig.path.save([two.write(1, 2, [2]), two.write(SECOND, 3, [3])])
    assert all(result.fate is WriteFate.DURABLE for result in two.rig.written(2).values())
    assert [file.flush_count for file in two.files.values()] == [2, 1]


def test_a_drive_that_cannot_be_flushed_makes_its_batch_fail_and_is_flushed_later(two: TwoDrives) -> None:
    two.files[SECOND].flush_error = media_error("flush")
    two.rig.path.save([two.write(1, 1, [1]), two.write(SECOND, 2, [2])])
    assert {result.fate for result in two.rig.written(2).values()} == {WriteFate.FAILED}
    two.files[SECOND].flush_error = None
    count = two.files[SECOND].flush_count
    two.save(1, 3, [3])
    assert two.files[SECOND].flush_count == count + 1


def test_damage_on_one_drive_fails_its_units_only(two: TwoDrives, tmp_path: Path) -> None:
    first, second = two.save(1, 1, [1]), two.save(SECOND, 2, [2])
    flip_bit(tmp_path / "second", (second[0].lba & (1 << 40) - 1) * LBA_BYTES)
    (failure,) = wait(two.rig.path.load(into([*first, *second], [7, 8]), abandon_after_s=10)).failures
    assert (failure.index, failure.is_mismatch) == (1, True)
    two.files[SECOND].read_error = media_error("gone")
    (failure,) = wait(two.rig.path.load(into([*first, *second], [7, 8]), abandon_after_s=10)).failures
    assert (failure.index, failure.is_mismatch) == (1, False)


def test_a_drive_that_is_not_open_fails_what_lies_there(two: TwoDrives) -> None:
    (read,) = two.save(1, 1, [1])
    there = read._replace(lba=pool_lba(2, read.lba))
    result = wait(two.rig.path.load(into([read, there], [7, 8]), abandon_after_s=10))
    (failure,) = result.failures
    assert (failure.index, failure.is_mismatch) == (1, False)
    assert "drive 1 of the pool is not open here" in failure.reason
    two.rig.path.save([two.write(2, 5, [1])])
    written = two.rig.written(1)[5]
    assert (written.fate, "not open here" in written.reason) == (WriteFate.FAILED, True)


def test_no_span_crosses_drives() -> None:
    end, start = pool_lba(1, (1 << 40) - 2), pool_lba(2, 256)
    spans = spans_of([end, end + 1, start, start + 1], unit_lbas=1, read_lbas=100)
    assert [(span.lba, span.unit_count) for span in spans] == [(end, 2), (start, 2)]


def test_all_files_are_closed_though_one_fails() -> None:
    class Failing(UnrulyFile):
        def __init__(self) -> None:
            self.is_closed = False

        def close(self) -> None:
            self.is_closed = True
            raise MediaError("closing failed", next_step="none")

    files = {1: Failing(), 2: Failing()}
    with pytest.raises(MediaError):
        PoolData(files).close()
    assert all(file.is_closed for file in files.values())
