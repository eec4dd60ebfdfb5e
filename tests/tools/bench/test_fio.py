"""What fio is asked for. It is not run here."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshfusion.jbof.errors import UnsupportedError
from meshfusion.tools.bench.fio import FioJob, check_fio


def test_writes_are_flushed_and_reads_are_shared_among_threads() -> None:
    write = FioJob(Path("/data"), 1 << 20, 256 << 20, 4096, flush_blocks=64).command()
    assert {"--rw=write", "--fdatasync=64", "--end_fsync=1", "--bs=1048576", "--offset=4096"} <= set(write)
    assert f"--size={256 << 20}" in write
    read = FioJob(Path("/data"), 6 << 20, 256 << 20, 0, threads=2).command()
    assert {"--rw=read", "--direct=1", "--numjobs=2", f"--size={126 << 20}", f"--offset_increment={126 << 20}"} <= set(
        read
    ), "each thread whole blocks of its own"
    assert not any("sync" in argument for argument in read if argument != "--ioengine=psync")


def test_without_fio_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshfusion.tools.bench.fio.shutil.which", lambda name: None)
    with pytest.raises(UnsupportedError) as raised:
        check_fio()
    assert raised.value.next_step == "apt install fio"
