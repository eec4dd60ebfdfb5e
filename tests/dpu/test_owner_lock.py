"""One owner per pool directory, and one per data, whichever directory names it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshfusion.dpu.pool import Pool, create_pool
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.jbof.errors import FormatError, PoolBusyError

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
    Pool.open(tmp_path / "two").close()


def test_a_pool_on_a_block_device(tmp_path: Path, loop_device: Path) -> None:
    create_pool(tmp_path / "pool", size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_path=loop_device)
    with Pool.open(tmp_path / "pool") as pool:
        status = pool.status(deadline_s=1.0)
        assert (status.segment_count, status.capacity_bytes) == (15, 15 << 20)
    with pytest.raises(FormatError, match="not blank"):
        create_pool(tmp_path / "again", size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_path=loop_device)
    assert not (tmp_path / "again").exists()
