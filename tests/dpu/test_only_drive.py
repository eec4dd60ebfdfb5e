"""A pool's only drive: it is listed, and who misses it is told which one, and how the pool is had again."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from meshfusion.dpu import drive_look, pool_create, pool_dir
from meshfusion.dpu.api.drive_types import AddDriveRequest, DrainDriveRequest
from meshfusion.dpu.drive_list import read_drive_list
from meshfusion.dpu.pool import Pool, check_pool, inspect_pool
from meshfusion.dpu.pool_create import add_drive
from meshfusion.dpu.pool_dir import PoolLayout, read_label
from meshfusion.dpu.pool_drives import WrongDriveError, find_drives
from meshfusion.dpu.pool_place import DRIVE_LIST
from meshfusion.dpu.pool_rebuild import rebuild_index
from meshfusion.dpu.pool_remove import remove_drive, set_draining
from meshfusion.jbof.errors import ConfigError, FormatError
from tests.dpu.pool_cases import SEGMENT_COUNT, SIZE_BYTES, Holder, make_pool

SERIAL = "S6XNNE0R101"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for a drive with a serial number."""
    file = tmp_path / "nvme1n1"
    file.touch()
    os.truncate(file, SIZE_BYTES)
    for module in (pool_create, pool_dir, drive_look):
        monkeypatch.setattr(module, "drive_name", lambda path: SERIAL if path.parent == tmp_path else "")
    return file


@pytest.fixture
def path(tmp_path: Path, data: Path) -> Path:
    """With chunk 1 in it."""
    make_pool(tmp_path / "pool", data)
    with Pool.open(tmp_path / "pool") as pool, Holder(pool) as holder:
        assert holder.put(1)
    return tmp_path / "pool"


def has_its_chunk(path: Path) -> bool:
    with Pool.open(path) as pool, Holder(pool) as holder:
        return len(holder.match_alone(1).chunks) == 1


def test_a_new_pool_lists_its_drive_as_earlier_versions_read_it(path: Path, data: Path) -> None:
    label = read_label(PoolLayout(path))
    content = json.loads((path / DRIVE_LIST).read_text())
    (drive,) = content.pop("drives")
    assert content == {
        "version": 1,
        "pool_uuid": str(find_drives(PoolLayout(path)).pool_uuid),
        "segment_bytes": 1 << 20,
        "next_number": 1,
    }
    assert drive == {
        "number": 0,
        "path": str(data),
        "uuid": label.drive_uuid.hex(),
        "segment_count": SEGMENT_COUNT,
        "is_draining": False,
        "is_unindexed": False,
        "name": SERIAL,
    }


def test_a_drive_that_is_away_is_named_and_how_it_is_had_again(path: Path, data: Path) -> None:
    data.rename(path / "elsewhere")
    (path / "index").rename(path / "kept")
    with pytest.raises(FormatError, match=SERIAL):
        rebuild_index(path)
    (path / "kept").rename(path / "index")
    for use in (Pool.open, inspect_pool, lambda path: check_pool(path, lambda done, total: None)):
        with pytest.raises(FormatError) as caught:
            use(path)
        assert caught.value.message == f"the pool's only drive, 0 ({SERIAL}), is away: {data} is missing"
        back, lost = caught.value.next_step.split("; only if it is lost for good, ")
        assert back == f"plug it in again, or correct its path in {path}/data.path"
        assert f"rm -r {path}" in lost
    (path / "elsewhere").rename(data)
    assert has_its_chunk(path)


def test_a_drive_that_has_another_path_now(path: Path, data: Path, tmp_path: Path) -> None:
    """As told: its path in the pointer counts, and what is listed later has it."""
    moved = data.rename(tmp_path / "nvme2n1")
    (path / "data.path").write_text(str(moved))
    assert has_its_chunk(path)
    add_drive(path, size_bytes=SIZE_BYTES)
    listed = read_drive_list(path)
    assert listed is not None
    assert [(drive.path, drive.name) for drive in listed.drives] == [(moved, SERIAL), (path / "data.1", "")]
    assert has_its_chunk(path)


@pytest.mark.parametrize("wrong", ["of another pool", "blank"])
def test_another_drive_in_its_place(path: Path, data: Path, tmp_path: Path, wrong: str) -> None:
    kept = data.rename(tmp_path / "kept")
    data.touch()
    os.truncate(data, SIZE_BYTES)
    if wrong != "blank":
        make_pool(tmp_path / "other", data)
    before = data.read_bytes()
    with pytest.raises(FormatError) as caught:
        Pool.open(path)
    if wrong != "blank":
        assert isinstance(caught.value, WrongDriveError)
        assert caught.value.next_step.startswith("put the pool's own drive in its place, or correct its path in ")
    assert data.read_bytes() == before
    kept.rename(data)
    assert has_its_chunk(path)


def test_a_pool_that_was_moved_or_copied_has_its_own_data(tmp_path: Path) -> None:
    make_pool(tmp_path / "pool")
    with Pool.open(tmp_path / "pool") as pool, Holder(pool) as holder:
        assert holder.put(1)
    shutil.copytree(tmp_path / "pool", tmp_path / "copy")
    (tmp_path / "pool").rename(tmp_path / "moved")
    assert has_its_chunk(tmp_path / "moved")
    assert [drive.path for drive in find_drives(PoolLayout(tmp_path / "copy")).here] == [tmp_path / "copy" / "data"]
    with Pool.open(tmp_path / "moved"):
        assert has_its_chunk(tmp_path / "copy"), "nobody else has it"


def test_a_pool_without_a_list_is_used_on(path: Path, tmp_path: Path) -> None:
    """Of an earlier version."""
    (path / DRIVE_LIST).unlink()
    assert has_its_chunk(path)
    rebuild_index(path)
    assert has_its_chunk(path)
    for go_without in (lambda: set_draining(path, 0, is_draining=True), lambda: remove_drive(path, 0)):
        with pytest.raises(ConfigError, match="has one drive"):
            go_without()
    assert not (path / DRIVE_LIST).exists()
    add_drive(path, size_bytes=SIZE_BYTES)
    listed = read_drive_list(path)
    assert listed is not None
    assert [drive.name for drive in listed.drives] == [SERIAL, ""]
    assert has_its_chunk(path)


@pytest.mark.parametrize("is_listed", [True, False])
def test_the_only_drive_cannot_be_drained(path: Path, *, is_listed: bool) -> None:
    """Nothing could be saved any more, and nothing would take what it holds."""
    if not is_listed:
        (path / DRIVE_LIST).unlink()
    with pytest.raises(ConfigError, match="has one drive"):
        set_draining(path, 0, is_draining=True)
    with Pool.open(path) as pool:
        with pytest.raises(ConfigError, match="has one drive"):
            pool.drive_admin.drain_drive(DrainDriveRequest(0), deadline_s=1)
        assert pool.drive_admin.drain_drive(DrainDriveRequest(0, is_ended=True), deadline_s=1).state == "online"
        pool.drive_admin.add_drive(AddDriveRequest(SIZE_BYTES), deadline_s=5)
        assert pool.drive_admin.drain_drive(DrainDriveRequest(0), deadline_s=1).state == "draining"


def test_the_last_of_several_is_the_only_one(path: Path) -> None:
    add_drive(path, size_bytes=SIZE_BYTES)
    remove_drive(path, 0)
    with Pool.open(path) as pool, Holder(pool) as holder:
        assert holder.put(2)
    (path / "data.1").rename(path / "elsewhere")
    with pytest.raises(FormatError, match=r"the pool's only drive, 1 \([0-9a-f]{32}\), is away: ") as caught:
        Pool.open(path)
    assert caught.value.next_step.startswith("put the file back; only if it is lost for good, ")
