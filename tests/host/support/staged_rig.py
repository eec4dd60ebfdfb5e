"""A staged path over its own file and memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshfusion.host.path.data_path import DataPath
from meshfusion.host.path.load_job import LoadJob, LoadResult, UnitRead
from meshfusion.host.path.medium import Medium
from meshfusion.host.path.shards import ShardWrite, ShardWritten
from meshfusion.host.path.staged import staged_path
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.format import (
    LBA_BYTES,
    shard_lba_count,
)
from tests.host.support.data_files import UnrulyFile, open_new_file
from tests.host.support.kv_memory import KvMemory, layer_outermost
from tests.host.support.shard_writes import reads_of, shard_write

FIRST_LBA = 256
MAX_UNITS = 8


class Rig:
    """A path over its own file and memory."""

    def __init__(self, path: Path, kv: KvMemory, kernels: DigestKernels, **options: Any) -> None:
        self.kv = kv
        self.file: UnrulyFile = open_new_file(path, 16 << 20, kind=UnrulyFile)
        self.next_lba = FIRST_LBA
        self.path = self.open_path(kernels, options)

    @property
    def medium(self) -> Medium:
        return self.path._medium

    def open_path(self, kernels: DigestKernels, options: dict[str, Any]) -> DataPath:
        return staged_path(
            self.file,
            self.kv.memory,
            self.kv.layout,
            kernels,
            lba_bytes=LBA_BYTES,
            load_threads=options.pop("load_threads", 2),
            read_bytes=options.pop("read_bytes", 64 << 10),
            write_bytes=shard_lba_count(self.kv.layout.unit_bytes, MAX_UNITS) * LBA_BYTES,
            **options,
        )

    def shard_write(self, save_id: int, block_ids: list[int]) -> ShardWrite:
        write = shard_write(self.kv.layout.unit_bytes, block_ids, self.next_lba, save_id)
        self.next_lba += write.extent.lba_count
        return write

    def written(self, count: int) -> dict[int, ShardWritten]:
        results: dict[int, ShardWritten] = {}
        end_s = time.monotonic() + 10
        while len(results) < count:
            assert time.monotonic() < end_s, "saves did not end"
            for result in self.path.take_written():
                _, save_id = result.save_id
                assert save_id not in results
                results[save_id] = result
            time.sleep(0.001)
        return results

    def save(self, block_ids: list[int], save_id: int = 1) -> list[UnitRead]:
        """Saves and returns how to read the units back, for the same blocks."""
        write = self.shard_write(save_id, block_ids)
        self.path.save([write])
        digests = self.written(1)[save_id].unit_digests
        assert digests is not None
        return self.reads(write, digests)

    def reads(self, write: ShardWrite, digests: tuple[bytes, ...]) -> list[UnitRead]:
        return reads_of(write, digests)


def into(reads: list[UnitRead], block_ids: list[int]) -> list[UnitRead]:
    return [UnitRead(r.lba, r.unit_bytes, b, r.digest) for r, b in zip(reads, block_ids, strict=True)]


def wait(job: LoadJob, limit_s: float = 10.0) -> LoadResult:
    end_s = time.monotonic() + limit_s
    while (result := job.result(time.monotonic())) is None:
        assert time.monotonic() < end_s, "the load did not end"
        time.sleep(0.001)
    return result


@contextlib.contextmanager
def rig(tmp_path: Path, kernels: DigestKernels, kv: KvMemory | None = None, **options: Any) -> Iterator[Rig]:
    made = Rig(tmp_path / "data", kv or layer_outermost(), kernels, **options)
    made.kv.fill(3)
    try:
        yield made
    finally:
        made.file.may_read.set()
        made.file.may_write.set()
        assert made.path.close()
