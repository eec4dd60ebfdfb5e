"""Where and how a pool can be made: sizes, directories made ready by others, rivals and killed creations."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu import pool_create, pool_dir
from meshfusion.dpu.config_pool import NewPool, room_problem
from meshfusion.dpu.drive_list import read_drive_list
from meshfusion.dpu.pool import Pool, create_pool, inspect_pool
from meshfusion.dpu.pool_create import create_pool_of_drives
from meshfusion.dpu.pool_dir import PoolLayout, note_exported
from meshfusion.dpu.pool_drives import WrongDriveError
from meshfusion.dpu.pool_place import is_free
from meshfusion.dpu.pool_sizes import size_problems, usual_segment_bytes
from meshfusion.jbof.errors import ConfigError, FormatError, MediaError, MeshFusionError, PoolBusyError
from meshfusion.jbof.label import Label
from meshfusion.jbof.media.faults import DataFileError, MediaFault
from meshfusion.jbof.sizes import format_size, parse_size_bytes
from tests.dpu.pool_cases import SEGMENT_BYTES, SEGMENT_COUNT, SIZE_BYTES, Holder, make_pool

ROOT = Path(__file__).parents[2]


def assert_works(path: Path) -> None:
    with Pool.open(path):
        pass
    assert not (path / ".creating").exists()


def test_a_size_is_rounded_down_to_whole_blocks(tmp_path: Path) -> None:
    create_pool(tmp_path / "p", size_bytes=10_000_000, segment_bytes=1 << 20)
    assert (tmp_path / "p" / "data").stat().st_size == 10_000_000 // 4096 * 4096
    assert inspect_pool(tmp_path / "p").segment_count == 8


@pytest.mark.parametrize("text", ["1MiB", "257MiB", "64MiB", "3GiB", "4100KiB", "4097"])
def test_sizes_are_shown_as_they_are_written(text: str) -> None:
    assert format_size(parse_size_bytes(text)) == text


def test_too_small_names_the_smallest_that_works() -> None:
    (problem,) = size_problems((257 << 20) - 1, 64 << 20)
    assert problem.field == "size"
    assert "need 257MiB" in problem.problem
    assert size_problems(257 << 20, 64 << 20) == []


def test_more_segments_than_a_label_can_count() -> None:
    (problem,) = size_problems(2**63 - 1, 1 << 20)
    assert problem.field == "segment_size"


def test_a_directory_made_ready_is_kept(tmp_path: Path) -> None:
    (tmp_path / "p" / "lost+found").mkdir(parents=True)
    inode = (tmp_path / "p").stat().st_ino
    make_pool(tmp_path / "p")
    assert (tmp_path / "p").stat().st_ino == inode
    assert_works(tmp_path / "p")


def test_a_link_to_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "p").symlink_to("there")
    make_pool(tmp_path / "p")
    assert (tmp_path / "p").is_symlink()
    assert_works(tmp_path / "there")


def test_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "p").symlink_to("there")
    with pytest.raises(ConfigError, match="symbolic link to there, which does not exist"):
        make_pool(tmp_path / "p")


def test_a_mount_point(tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs hardware: a machine where this user may mount a tmpfs")
    try:
        make_pool(tmp_path)
        assert_works(tmp_path)
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_failure_in_a_directory_made_ready_leaves_it_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(pool_create, "write_new_label", fail)
    with pytest.raises(MediaError, match="broken"):
        make_pool(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(MediaError, match="broken"):
        make_pool(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_creation_is_taken_over(tmp_path: Path) -> None:
    """Killed at its last step, when the most lies about."""
    code = f"""
import os, pathlib, signal, sys
from meshfusion.dpu import pool_create
from tests.dpu.pool_cases import make_pool
write = pool_create.write_drive_list
def write_and_end(directory, drives):
    write(directory, drives)
    (directory / ".drives.new").touch()
    os.kill(os.getpid(), signal.SIGKILL)
pool_create.write_drive_list = write_and_end
make_pool(pathlib.Path({str(tmp_path / "p")!r}))
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == -signal.SIGKILL
    left = {".creating", "data", "holders", "drives", ".drives.new"}
    assert {entry.name for entry in (tmp_path / "p").iterdir()} == left
    assert is_free(tmp_path / "p")
    with pytest.raises(FormatError, match="is not a MeshFusion pool"):
        inspect_pool(tmp_path / "p")
    make_pool(tmp_path / "p")
    assert_works(tmp_path / "p")


def test_what_lies_beside_a_killed_creation_is_kept(tmp_path: Path) -> None:
    (tmp_path / ".creating").mkdir()
    (tmp_path / "mine").touch()
    with pytest.raises(ConfigError, match="not empty"):
        make_pool(tmp_path)
    assert (tmp_path / "mine").exists()


def test_what_is_there_already_is_told_apart(tmp_path: Path) -> None:
    make_pool(tmp_path / "p")
    with pytest.raises(ConfigError, match=r"there is a pool in .*/p already") as told:
        make_pool(tmp_path / "p", data_path=tmp_path / "none")
    assert f"mfctl pool status {tmp_path}/p" in told.value.next_step
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="exists and is no directory"):
        make_pool(tmp_path / "file")
    assert_works(tmp_path / "p")


def blank(path: Path) -> Path:
    path.touch()
    os.truncate(path, SIZE_BYTES)
    return path


def test_what_tells_of_the_data_is_durable_before_the_pool_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without its content, after the power has failed, would be a damaged pool."""
    synced: set[int] = set()
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", noted)
    make_pool(tmp_path / "p", blank(tmp_path / "outside"))
    layout = PoolLayout(tmp_path / "p")
    note_exported(layout, "nvmet")
    for file in ("data.path", "drives", "exported"):
        assert (tmp_path / "p" / file).stat().st_ino in synced, file
    assert layout.data == tmp_path / "outside"


def test_of_several_drives_all_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one fails, after all that is done before its label."""
    outside = blank(tmp_path / "outside")
    write = pool_dir.write_new_label

    def fail_at_last(path: Path, label: Label) -> None:
        if label.drive_number == 2:
            raise DataFileError(MediaFault.IO, "writing failed", path, errno_=errno.EIO)
        write(path, label)

    monkeypatch.setattr(pool_create, "write_new_label", fail_at_last)
    kwargs: dict[str, Any] = {"size_bytes": SIZE_BYTES, "segment_bytes": SEGMENT_BYTES}
    with pytest.raises(DataFileError, match="writing failed"):
        create_pool_of_drives(tmp_path / "p", data_paths=[None, outside, None], **kwargs)
    assert not (tmp_path / "p").exists()
    monkeypatch.undo()
    labels = create_pool_of_drives(tmp_path / "p", data_paths=[None, outside, None], **kwargs)
    assert [label.drive_number for label in labels] == [0, 1, 2]
    assert len({label.drive_uuid for label in labels}) == 3
    assert inspect_pool(tmp_path / "p").segment_count == 3 * SEGMENT_COUNT
    listed = read_drive_list(tmp_path / "p")
    assert listed is not None
    assert listed.next_number == 3
    assert [drive.path for drive in listed.drives] == [tmp_path / "p/data", outside, tmp_path / "p/data.2"]


def test_a_killed_creation_of_several_drives_is_taken_over(tmp_path: Path) -> None:
    code = f"""
import os, pathlib, signal
from meshfusion.dpu import pool_create
pool_create.sync_directory = lambda path: path.name == "index" or os.kill(os.getpid(), signal.SIGKILL)
pool_create.create_pool_of_drives(
    pathlib.Path({str(tmp_path / "p")!r}), size_bytes={SIZE_BYTES}, segment_bytes={SEGMENT_BYTES}, data_paths=[None] * 3
)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == -signal.SIGKILL
    left = {entry.name for entry in (tmp_path / "p").iterdir()}
    assert left == {".creating", "data", "data.1", "data.2", "drives", "holders"}
    make_pool(tmp_path / "p")
    assert_works(tmp_path / "p")
    assert {e.name for e in (tmp_path / "p").iterdir()} >= {"data", "index"}
    assert not {"data.1", "data.2"} & {entry.name for entry in (tmp_path / "p").iterdir()}


KILLED_WITH_LABELS = """
import os, pathlib, signal
from meshfusion.dpu import pool_create
write = pool_create.write_new_label
def write_and_die(path, label):
    write(path, label)
    label.drive_number == 1 and os.kill(os.getpid(), signal.SIGKILL)
pool_create.write_new_label = write_and_die
"""


def test_drives_that_a_killed_creation_has_labelled_are_taken_by_the_next(tmp_path: Path) -> None:
    """Which of several drives may be overwritten cannot be said, and a service makes its pool by itself."""
    kwargs: dict[str, Any] = {"size_bytes": SIZE_BYTES, "segment_bytes": SEGMENT_BYTES}
    drives = [blank(tmp_path / "a"), blank(tmp_path / "b"), blank(tmp_path / "c")]
    create = f"""
pool_create.create_pool_of_drives(
    pathlib.Path({str(tmp_path / "p")!r}), size_bytes={SIZE_BYTES}, segment_bytes={SEGMENT_BYTES},
    data_paths=[pathlib.Path(path) for path in {list(map(str, drives))!r}]
)
"""
    code = KILLED_WITH_LABELS + create
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == -signal.SIGKILL
    of_another = blank(tmp_path / "d")
    make_pool(tmp_path / "other", of_another)
    for named in ([drives[0], of_another], [of_another, drives[0]]):
        assert room_problem(NewPool(tmp_path / "p", SIZE_BYTES, SEGMENT_BYTES, tuple(named))) is not None
        with pytest.raises(FormatError, match="is not blank: it is drive 0 of pool"):
            create_pool_of_drives(tmp_path / "p", data_paths=named, **kwargs)
    with pytest.raises(FormatError, match="is not blank: it is drive 1 of pool"):
        create_pool_of_drives(tmp_path / "elsewhere", data_paths=[drives[1]], **kwargs)
    assert room_problem(NewPool(tmp_path / "p", SIZE_BYTES, SEGMENT_BYTES, tuple(drives))) is None
    create_pool_of_drives(tmp_path / "p", data_paths=drives, **kwargs)
    assert_works(tmp_path / "p")
    assert inspect_pool(tmp_path / "p").segment_count == 3 * SEGMENT_COUNT


def test_a_creation_in_progress_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".creating").mkdir()
    (tmp_path / "data").write_text("half made")
    with (tmp_path / ".creating" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(PoolBusyError, match="being created by another process"):
            make_pool(tmp_path)
        with pytest.raises(PoolBusyError, match="being created by another process"):
            Pool.open(tmp_path)
    assert (tmp_path / "data").read_text() == "half made"


def test_of_many_creators_one_wins(tmp_path: Path) -> None:
    """Threads stand for processes: each opens the lock anew, and flock knows only open files."""
    errors: list[MeshFusionError] = []
    start = threading.Barrier(6)

    def create() -> None:
        start.wait()
        try:
            make_pool(tmp_path / "p")
        except (PoolBusyError, ConfigError) as error:
            errors.append(error)

    threads = [threading.Thread(target=create) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 5
    assert_works(tmp_path / "p")


def test_a_filesystem_that_cannot_hold_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, size_bytes: int) -> None:
        raise DataFileError(MediaFault.IO, "reserving failed", path, errno_=errno.EFBIG)

    monkeypatch.setattr(pool_create, "create_data_file", refuse)
    with pytest.raises(MediaError, match=f"cannot hold a file of {format_size(SIZE_BYTES)}"):
        make_pool(tmp_path / "p")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe\x00", b"relative", b"/a\0b", b"/" + b"x" * 5000])
def test_a_damaged_pointer_to_the_data(tmp_path: Path, content: bytes) -> None:
    make_pool(tmp_path / "p")
    (tmp_path / "p" / "data.path").write_bytes(content)
    with pytest.raises(FormatError, match=r"data\.path is damaged"):
        _ = PoolLayout(tmp_path / "p").data
    with pytest.raises(FormatError, match=r"data\.path is damaged"):
        inspect_pool(tmp_path / "p")


def test_a_place_of_other_files_is_no_place_for_a_pool(tmp_path: Path) -> None:
    (tmp_path / "photo").touch()
    with pytest.raises(FormatError, match="is not a MeshFusion pool") as caught:
        inspect_pool(tmp_path)
    assert "create" not in caught.value.next_step
    with pytest.raises(FormatError) as caught:
        inspect_pool(tmp_path / "none")
    assert "mfctl pool create" in caught.value.next_step


def test_a_pool_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied")

    make_pool(tmp_path / "p")
    monkeypatch.setattr("meshfusion.dpu.pool_dir.os.listdir", refuse)
    with pytest.raises(MediaError, match="cannot be read: Permission denied"):
        inspect_pool(tmp_path / "p")
    with pytest.raises(MediaError, match=r"cannot be created: .*Permission denied"):
        make_pool(tmp_path / "p")


def test_what_is_on_a_drive_is_overwritten_only_by_its_name(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.touch()
    os.truncate(data, SIZE_BYTES)
    make_pool(tmp_path / "one", data)
    make = partial(create_pool, tmp_path / "two", size_bytes=SIZE_BYTES, segment_bytes=1 << 20, data_path=data)
    with pytest.raises(FormatError, match="not blank") as caught:
        make()
    assert "--force --serial data" in caught.value.next_step
    with pytest.raises(ConfigError, match="is 'data', not 'other': nothing was overwritten"):
        make(overwrite_serial="other")
    assert_works(tmp_path / "one")
    label = make(overwrite_serial="data")
    assert inspect_pool(tmp_path / "two").pool_uuid == str(uuid.UUID(bytes=label.pool_uuid))
    with pytest.raises(WrongDriveError, match="belongs to the pool"):
        Pool.open(tmp_path / "one")
    (tmp_path / "one" / "drives").unlink()  # as it is with pools of before
    with pytest.raises(FormatError, match="belongs to pool"):
        Pool.open(tmp_path / "one")


def test_segments_keep_to_the_drives_granules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    data.touch()
    os.truncate(data, 16 << 20)
    monkeypatch.setattr(pool_create, "alignment_bytes", lambda path, block_bytes: 3 << 20)
    with pytest.raises(ConfigError, match=r"segments of 2MiB do not fit the drive .* in pieces of 3MiB"):
        create_pool(tmp_path / "p", size_bytes=16 << 20, segment_bytes=2 << 20, data_path=data)
    label = create_pool(tmp_path / "p", size_bytes=16 << 20, segment_bytes=3 << 20, data_path=data)
    assert (label.data_start_lba, label.segment_count, label.alignment_lba_count) == (768, 4, 768)
    assert_works(tmp_path / "p")


def test_a_pool_on_another_drive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    data.touch()
    os.truncate(data, SIZE_BYTES)
    with monkeypatch.context() as patch:
        patch.setattr(pool_create, "drive_name", lambda path: "S1")
        patch.setattr(pool_dir, "drive_name", lambda path: "S1")
        make_pool(tmp_path / "p", data)
        assert_works(tmp_path / "p")
        patch.setattr(pool_create, "drive_name", lambda path: "S2")
        patch.setattr(pool_dir, "drive_name", lambda path: "S2")
        with pytest.raises(FormatError, match="is the drive 'S2'; this pool lies on 'S1'"):
            Pool.open(tmp_path / "p")


@pytest.mark.parametrize(
    ("size_bytes", "segment_bytes"),
    [
        (1 << 30, 64 << 20),
        (128 << 30, 64 << 20),
        ((128 << 30) + 1, 65 << 20),
        (7_680_000_000_000, 3577 << 20),  # 7.68 TB / 2048 = 3576.3 MiB
    ],
)
def test_usual_segments_are_a_2048th_of_a_large_drive(size_bytes: int, segment_bytes: int) -> None:
    assert usual_segment_bytes(size_bytes) == segment_bytes
    assert size_problems(size_bytes, segment_bytes) == []


def test_a_drive_that_a_service_has_is_not_overwritten(tmp_path: Path) -> None:
    """With the drive's own serial at that: whoever types it may not know that the drive is served."""
    data = tmp_path / "drive"
    data.touch()
    os.truncate(data, SIZE_BYTES)
    make_pool(tmp_path / "one", data)
    with Pool.open(tmp_path / "one") as pool, Holder(pool) as holder:
        assert holder.put(1)
        with pytest.raises(PoolBusyError, match="in use by another pool directory"):
            create_pool(
                tmp_path / "two", size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_path=data,
                overwrite_serial="drive",
            )  # fmt: skip
        assert not (tmp_path / "two").exists() or not any((tmp_path / "two").iterdir())
        assert holder.match_alone(1).chunk_count
    with pytest.raises(FormatError, match="is drive 0 of pool"):
        create_pool(tmp_path / "two", size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_path=data)


def test_what_lies_behind_the_first_blocks_is_not_overwritten_either(tmp_path: Path) -> None:
    """As btrfs has its superblock at 64 KiB, and nothing before it."""
    data = tmp_path / "drive"
    data.write_bytes(bytes(65600) + b"_BHRfS_M")
    os.truncate(data, SIZE_BYTES)
    with pytest.raises(FormatError, match="not blank"):
        make_pool(tmp_path / "pool", data)
    os.truncate(data, 0)
    os.truncate(data, SIZE_BYTES)
    make_pool(tmp_path / "pool", data)
