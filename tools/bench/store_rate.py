"""How close does the store come to the medium? Saves and loads through service and path, with no network, against fio.

Both write the same file, emptied before each: blocks of the same size, and a flush after the same number of bytes;
fio one at a time, ours by a worker's savers, of which one prepares while another writes. Then both read them again
with the same number of threads. Ours are chunks of one unit: each is reserved in the pool (this process has it open),
digested, written with its header, flushed and committed, and the next batch waits while one is written, as an
engine's worker does it; then whole prompts are matched, read, and every unit is proven by its digest in KV memory.
fio's reads are once of the same size, and once of the size that a load reads at once.

Needs fio: ``apt install fio``.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import numpy as np

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.liveness import hold_liveness
from meshfusion.dpu.pool import Pool, PoolOptions
from meshfusion.dpu.pool_create import create_pool
from meshfusion.dpu.pool_tending import Policy
from meshfusion.host.path.data_path import DataPath
from meshfusion.host.path.load_job import UnitRead
from meshfusion.host.path.shards import ShardWrite
from meshfusion.jbof.digest import load_kernels
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.format import DATA_START_LBA, LBA_BYTES, ChunkHeader
from meshfusion.jbof.media.deallocation import zero_file_range
from meshfusion.jbof.media.file import create_data_file
from meshfusion.tools.bench.fio import FioJob, check_fio, fio_rate
from meshfusion.tools.bench.load_rate_data import READ_BYTES, Shape, opened_path
from meshfusion.tools.bench.report import Progress, Report, bench_options, run_bench

IDENTITY: Final = b"I" * 32
DEADLINE_S: Final = 60.0
RUNS: Final = 16  # layers, each a piece of memory of its own
BATCHES_UNDER_WAY: Final = 2


@dataclass(frozen=True, slots=True)
class Settings:
    """``flush_bytes``: of payload, in a batch. ``room_bytes``: of the file, more than the payload takes."""

    size_bytes: int
    flush_bytes: int
    threads: int

    @property
    def room_bytes(self) -> int:
        return DATA_START_LBA * LBA_BYTES + (self.size_bytes * 5 // 4 // (64 << 20) + 4) * (64 << 20)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@bench_options(rounds=5)
@click.option("--size-mib", default=1024, show_default=True, help="Payload of a round.")
@click.option("--flush-mib", default=64, show_default=True, help="Payload between two flushes.")
@click.option("--threads", default=2, show_default=True, type=click.IntRange(1, 64), help="That load.")
@click.option("--block-kib", "blocks", default=(64, 256, 1024, 4096), show_default=True, multiple=True, type=int)
def main(
    rounds: int,
    output_format: str,
    work: Path,
    size_mib: int,
    flush_mib: int,
    threads: int,
    blocks: tuple[int, ...],
) -> None:
    """GB/s of saves and of proven loads, without a network, against fio on the same file."""
    settings = Settings(size_mib << 20, flush_mib << 20, threads)

    def measure(report: Report, directory: Path, progress: Progress) -> None:
        report.details.append({"fio": check_fio()})
        data = directory / "data"
        create_data_file(data, settings.room_bytes)
        try:
            for block_kib in blocks:
                measure_size(report, directory, data, block_kib << 10, settings, rounds, progress)
        finally:
            data.unlink()

    told = {"rounds": rounds, "size_mib": size_mib, "flush_mib": flush_mib, "threads": threads}
    run_bench("store_rate", work, output_format, told, measure)


def measure_size(
    report: Report,
    directory: Path,
    data: Path,
    block_bytes: int,
    settings: Settings,
    rounds: int,
    progress: Progress,
) -> None:
    shape = Shape(f"{block_bytes >> 10} KiB", RUNS, block_bytes // RUNS)
    writes: dict[str, list[float]] = {"store": [], "fio": []}
    reads: dict[str, list[float]] = {"store": [], "fio": [], "fio, as loads read": []}
    engine = Engine(shape)
    for index in range(rounds):
        for who in ("fio", "store") if index % 2 else ("store", "fio"):
            empty(data)
            if who == "fio":
                write, read, read_large = fio_rates(data, block_bytes, settings)
                reads["fio, as loads read"].append(read_large)
            else:
                write, read = engine.rates(directory / "pool", data, settings)
            writes[who].append(write)
            reads[who].append(read)
        progress(
            f"{shape.name}, round {index + 1} of {rounds}: "
            f"write {writes['store'][-1]:.3f}, fio {writes['fio'][-1]:.3f}; "
            f"read {reads['store'][-1]:.3f}, fio {reads['fio'][-1]:.3f} GB/s"
        )
    for verb, samples in (("write", writes), ("read", reads)):
        found = {who: report.add(f"{shape.name}, {verb}, {who}", "GB/s", rates) for who, rates in samples.items()}
        ours = found.pop("store")
        for theirs in found.values():
            report.compare(ours, theirs)


def empty(data: Path) -> None:
    """As a new file is: its space is its own, and nothing was written to it."""
    descriptor = os.open(data, os.O_RDWR | os.O_CLOEXEC)
    try:
        assert zero_file_range(descriptor, 0, os.fstat(descriptor).st_size), "needs a filesystem that can zero a range"
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fio_rates(data: Path, block_bytes: int, settings: Settings) -> tuple[float, float, float]:
    """Writing, reading, and reading as much at once as a load does."""
    offset = DATA_START_LBA * LBA_BYTES
    flush_blocks = max(1, settings.flush_bytes // block_bytes)
    write = fio_rate(FioJob(data, block_bytes, settings.size_bytes, offset, flush_blocks=flush_blocks))
    reads = [
        fio_rate(FioJob(data, max(block_bytes, least), settings.size_bytes, offset, settings.threads))
        for least in (0, READ_BYTES)
    ]
    return write, reads[0], reads[1]


class Engine:
    """An engine's worker, its KV memory of random bytes."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._layout = shape.layout()
        self._kernels = load_kernels(shape.unit_bytes)
        self._memory = np.empty(self._layout.memory_bytes, dtype=np.uint8)
        words = self._memory.view(np.uint64)
        words[:] = np.random.default_rng(7).integers(1 << 63, size=words.size, dtype=np.uint64)

    def rates(self, path: Path, data: Path, settings: Settings) -> tuple[float, float]:
        """GB/s of payload saved and loaded, in a new pool on ``data``."""
        shutil.rmtree(path, ignore_errors=True)
        create_pool(path, size_bytes=data.stat().st_size, data_path=data, overwrite_serial=data.name)
        count = settings.size_bytes // self._shape.unit_bytes
        # A load of all there is; and nothing is declined.
        options = PoolOptions(max_pinned_fraction=1.0, policy=Policy.EVERYTHING)
        with Pool.open(path, options) as pool, attached(pool) as attachment:
            write_bytes = self._shape.unit_bytes + LBA_BYTES
            with opened_path(
                data, self._layout, self._kernels, self._memory, threads=settings.threads, write_bytes=write_bytes
            ) as way:
                began_s = time.perf_counter()
                saver = Saver(pool, attachment, way, self._shape, self._layout.block_count)
                saver.save(count, max(1, settings.flush_bytes // self._shape.unit_bytes))
                saved_s = time.perf_counter() - began_s
                began_s = time.perf_counter()
                self._load(pool, attachment, way, count)
                loaded_s = time.perf_counter() - began_s
        payload = count * self._shape.unit_bytes / 1e9
        return payload / saved_s, payload / loaded_s

    def _load(self, pool: Pool, attachment: api.Attachment, way: DataPath, count: int) -> None:
        keys = api.GroupKeys(0, tuple(map(key_of, range(count))), (0,) * count)
        request = api.MatchRequest(attachment.holder_id, "prompt", 1, (keys,))
        chunks = pool.match(request, deadline_s=DEADLINE_S).chunks
        if len(chunks) != count:
            raise MediaError(f"{len(chunks)} of {count} chunks are there", next_step="use a larger file")
        units = [
            UnitRead(
                chunk.shards[0].extent.lba + chunk.shards[0].payload_lba_offset,
                self._shape.unit_bytes,
                i % self._layout.block_count,
                chunk.shards[0].unit_digests[0],
            )
            for i, chunk in enumerate(chunks)
        ]
        job = way.load(units, abandon_after_s=600.0)
        while (result := job.result(time.monotonic())) is None:
            time.sleep(0.001)
        if result.failures:
            raise MediaError(f"a unit did not load: {result.failures[0].reason}", next_step="look at the drive")


class Saver:
    """Batches, each reserved while those before it are written, and committed when it is flushed."""

    def __init__(self, pool: Pool, attachment: api.Attachment, way: DataPath, shape: Shape, block_count: int) -> None:
        self._pool, self._attachment, self._way = pool, attachment, way
        self._shape, self._block_count = shape, block_count
        self._grants: dict[int, str] = {}
        self._digests: dict[int, tuple[bytes, ...]] = {}

    def save(self, count: int, batch_count: int) -> None:
        """Chunks 0 to ``count`` - 1, so many of them between two flushes."""
        under_way: deque[range] = deque()
        for first in range(0, count, batch_count):
            if len(under_way) == BATCHES_UNDER_WAY:
                self._commit(under_way.popleft())
            batch = range(first, min(first + batch_count, count))
            self._begin(batch)
            under_way.append(batch)
        while under_way:
            self._commit(under_way.popleft())

    def _begin(self, batch: range) -> None:
        size = api.ShardSize(0, self._shape.unit_bytes, 1)
        items = tuple(api.ReserveItem(key_of(i), 0, i, 1, (size,)) for i in batch)
        request = api.ReserveRequest(self._attachment.holder_id, self._attachment.epoch, items)
        results = self._pool.reserve(request, deadline_s=DEADLINE_S).results
        writes = []
        for i, result in zip(batch, results, strict=True):
            if result.outcome is not api.ReserveOutcome.GRANTED:
                raise MediaError(f"chunk {i}: {result.outcome.value}", next_step="use a larger file")
            extent = result.extents[0]
            self._grants[i] = result.grant_id
            writes.append(ShardWrite((0, i), extent, self._header(i, extent), (i % self._block_count,)))
        self._way.save(writes)

    def _commit(self, batch: range) -> None:
        while not all(i in self._digests for i in batch):
            for written in self._way.take_written():
                if written.unit_digests is None:
                    raise MediaError(f"a save failed: {written.reason}", next_step="look at the drive")
                self._digests[written.save_id[1]] = written.unit_digests
            time.sleep(0.0005)
        items = tuple(api.CommitItem(self._grants.pop(i), (self._digests.pop(i),)) for i in batch)
        request = api.CommitRequest(self._attachment.holder_id, self._attachment.epoch, items)
        assert all(self._pool.commit(request, deadline_s=DEADLINE_S).committed)

    def _header(self, i: int, extent: api.Extent) -> ChunkHeader:
        return ChunkHeader(
            pool_uuid=uuid.UUID(self._attachment.pool_uuid).bytes,
            identity=IDENTITY,
            key=key_of(i),
            tenant="default",
            group=0,
            rank=0,
            shard_count=1,
            position_tokens=i,
            token_count=1,
            segment=extent.segment,
            generation=extent.generation,
            lba=extent.lba,
            unit_bytes=self._shape.unit_bytes,
            unit_digests=(),
        )


@contextmanager
def attached(pool: Pool) -> Iterator[api.Attachment]:
    request = api.AttachRequest(uuid.uuid4().hex, "vllm", "1", "h", os.getpid(), IDENTITY, 1)
    attachment = pool.attach(request, deadline_s=DEADLINE_S)
    lock = hold_liveness(Path(attachment.liveness_path))
    try:
        yield attachment
    finally:
        os.close(lock)
        pool.detach(api.DetachRequest(attachment.holder_id), deadline_s=DEADLINE_S)


def key_of(i: int) -> bytes:
    return i.to_bytes(4, "big") * 8


if __name__ == "__main__":
    main()
