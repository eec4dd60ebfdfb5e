"""One owner per pool directory and per data; what proves that a holder is gone; a writer that outlives bugs."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshfusion.dpu import owner_lock
from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.liveness import create_liveness, forget_liveness, hold_liveness, take_liveness_away
from meshfusion.dpu.index import Index
from meshfusion.dpu.owner_lock import served_as, served_at
from meshfusion.dpu.pool import Pool, create_pool
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.jbof.errors import FormatError, MediaError, PoolBusyError, ServiceError

SIZE_BYTES = 16 << 20
SEGMENT_BYTES = 1 << 20


@pytest.fixture
def loop_device(tmp_path: Path) -> Iterator[Path]:
    backing = tmp_path / "disk"
    backing.write_bytes(b"")
    with backing.open("r+b") as file:
        file.truncate(SIZE_BYTES)
    made = subprocess.run(["losetup", "--find", "--show", backing], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"needs hardware: no loop device can be made here ({made.stderr.strip()})")
    device = Path(made.stdout.strip())
    yield device
    subprocess.run(["losetup", "--detach", device], check=True)


def test_two_directories_with_the_same_data_have_one_owner(tmp_path: Path) -> None:
    create_pool(tmp_path / "one", size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    data = PoolLayout(tmp_path / "one").data
    (tmp_path / "two" / "data").unlink()
    (tmp_path / "two" / "data.path").write_text(str(data))
    with Pool.open(tmp_path / "one"):
        with pytest.raises(PoolBusyError, match="in use by another pool directory"):
            Pool.open(tmp_path / "two")
        with pytest.raises(PoolBusyError, match="in use by process"):
            Pool.open(tmp_path / "one")
    with pytest.raises(FormatError, match="is an old copy"):  # what the other has done to the data, it does not know
        Pool.open(tmp_path / "two")


@pytest.fixture
def looked_at(tmp_path: Path) -> Iterator[int]:
    """The lock on a pool's data, held shared: udev does that with a block device while it probes it."""
    create_pool(tmp_path / "pool", size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES)
    descriptor = os.open(PoolLayout(tmp_path / "pool").data, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    yield descriptor
    os.close(descriptor)


def test_a_drive_that_is_only_looked_at_is_waited_for(tmp_path: Path, looked_at: int) -> None:
    looks_s = 0.5
    threading.Timer(looks_s, fcntl.flock, (looked_at, fcntl.LOCK_UN)).start()
    began_s = time.monotonic()
    with Pool.open(tmp_path / "pool"):
        assert time.monotonic() - began_s >= looks_s


def test_a_drive_that_is_looked_at_for_ever_is_not_had(
    tmp_path: Path, looked_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_lock, "_SHARED_PATIENCE_S", 0.3)
    with pytest.raises(PoolBusyError, match="in use by another pool directory"):
        Pool.open(tmp_path / "pool")
    fcntl.flock(looked_at, fcntl.LOCK_UN)
    with Pool.open(tmp_path / "pool"):
        pass


def test_who_finds_the_pool_in_use_learns_where_it_is_served(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    create_pool(path, size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES)
    with Pool.open(path) as pool:
        pool.announce_service("unix:///run/s")
        with pytest.raises(
            PoolBusyError, match=f"in use by process {os.getpid()}, the service at unix:///run/s"
        ) as caught:
            Pool.open(path)
        assert f"`service: unix:///run/s`, or stop it first: kill {os.getpid()}" in caught.value.next_step
    with Pool.open(path), pytest.raises(PoolBusyError) as caught:
        Pool.open(path)
    assert caught.value.message.endswith(f"in use by process {os.getpid()}"), "the address of an earlier owner is gone"
    assert "stop that one first" in caught.value.next_step


def test_a_pool_of_several_has_a_name_at_its_service(tmp_path: Path) -> None:
    create_pool(tmp_path / "pool", size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES)
    layout = PoolLayout(tmp_path / "pool")
    assert served_as(layout) == ""
    with Pool.open(tmp_path / "pool") as pool:
        assert (served_at(layout), served_as(layout)) == ("", "")
        pool.announce_service("unix:///run/s")
        assert (served_at(layout), served_as(layout)) == ("unix:///run/s", "")
        pool.announce_service(f"unix:///{'d' * 100}/s", "r" * 48)
        assert (served_at(layout), served_as(layout)) == (f"unix:///{'d' * 100}/s", "r" * 48)
    assert (served_at(layout), served_as(layout)) == ("", "")


def test_a_pool_on_a_block_device(tmp_path: Path, loop_device: Path) -> None:
    create_pool(tmp_path / "pool", size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_path=loop_device)
    with Pool.open(tmp_path / "pool") as pool:
        status = pool.status(deadline_s=1.0)
        assert (status.segment_count, status.capacity_bytes) == (15, 15 << 20)
    with pytest.raises(FormatError, match="not blank"):
        create_pool(tmp_path / "again", size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_path=loop_device)
    assert not (tmp_path / "again").exists()


def test_a_missing_liveness_file_means_unknown_and_a_taken_one_is_never_held_again(tmp_path: Path) -> None:
    path = tmp_path / "holder.alive"
    create_liveness(path)
    held = hold_liveness(path)
    assert not take_liveness_away(path), "a process holds it"
    path.rename(tmp_path / "moved")
    assert not take_liveness_away(path), "it is out of sight, its holder may be writing"
    (tmp_path / "moved").rename(path)
    os.close(held)
    assert take_liveness_away(path)
    assert take_liveness_away(path), "asked again before the fence is durable"
    with pytest.raises(MediaError, match="was fenced"):
        hold_liveness(path)
    forget_liveness(path)
    with pytest.raises(MediaError, match="was fenced"):
        hold_liveness(path)


def test_liveness_files_end_with_their_holders(tmp_path: Path) -> None:
    create_pool(tmp_path / "pool", size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES)
    holders = tmp_path / "pool" / "holders"
    with Pool.open(tmp_path / "pool") as pool:
        for incarnation in ("stays", "leaves"):
            request = api.AttachRequest(incarnation, "vllm", "0.32.0", "here", 1, b"I" * 32, 1)
            pool.attach(request, deadline_s=5.0)
        pool.detach(api.DetachRequest("leaves"), deadline_s=5.0)
        assert [path.name for path in holders.iterdir()] == ["stays.alive"]
    (holders / "nobody.alive").touch()
    with Pool.open(tmp_path / "pool") as pool:
        deadline_s = time.monotonic() + 10.0
        while pool.status(deadline_s=1.0).holders and time.monotonic() < deadline_s:
            time.sleep(0.05)
    assert not list(holders.iterdir())


def test_a_bug_in_one_transaction_does_not_end_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_pool(tmp_path / "pool", size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES)
    with Pool.open(tmp_path / "pool") as pool:
        with monkeypatch.context() as patch:
            patch.setattr(Index, "apply", lambda *_: 1 // 0)
            with pytest.raises(MediaError, match="ZeroDivisionError"):
                pool.attach(api.AttachRequest("a", "vllm", "0.32.0", "here", 1, b"I" * 32, 1), deadline_s=5.0)
        attachment = pool.attach(api.AttachRequest("b", "vllm", "0.32.0", "here", 1, b"I" * 32, 1), deadline_s=5.0)
        item = api.ReserveItem(b"k" * 32, 0, 0, 2**32, (api.ShardSize(0, 4096, 1),))
        with pytest.raises(ServiceError, match="token_count 4294967296"):
            pool.reserve(api.ReserveRequest("b", attachment.epoch, (item,)), deadline_s=5.0)
