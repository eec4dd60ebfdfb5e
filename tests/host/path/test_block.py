"""What only the block path does: straight into KV memory, and never after that was said to be over.

What it has in common with the staged path is in ``test_local_loads`` and ``test_local_saves``.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from meshfusion.host.path.block import block_path
from meshfusion.host.path.block_layout import check_direct
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.errors import UnsupportedError
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.media.file import create_data_file, open_data_file
from meshfusion.jbof.media.vectors import MAX_VECTORS
from tests.host.support.block_rig import BlockRig, block_rig, granule_or_skip, layers_of
from tests.host.support.data_files import media_error
from tests.host.support.shard_writes import reads_of, shard_write
from tests.host.support.staged_rig import FIRST_LBA, MAX_UNITS, into, wait
from tests.host.support.waiting import until
from tests.jbof.loop_devices import loop_device_of


@pytest.fixture
def granule(tmp_path: Path) -> int:
    return granule_or_skip(tmp_path)


# ---- in one call ---------------------------------------------------------------------------------------------------


def test_neighbours_are_read_in_one_call_and_headers_to_nowhere(
    tmp_path: Path, kernels: DigestKernels, granule: int
) -> None:
    """Chunks of one unit each, one behind the other: between two units lies a header."""
    kv = layers_of(granule, page_granules=5 * LBA_BYTES // granule)  # units of 15 blocks: a header is a small gap
    with block_rig(tmp_path, kernels, kv, load_threads=1, read_bytes=1 << 20) as r:
        reads = [r.save([block], save_id=block)[0] for block in (1, 2, 3)]
        assert [b.lba - a.lba for a, b in itertools.pairwise(reads)] == [16, 16]
        expected = [r.kv.unit(block) for block in (1, 2, 3)]
        r.file.reads.clear()
        before = r.kv.memory.copy()
        assert wait(r.path.load(into(reads, [7, 9, 8]), abandon_after_s=10)).failures == ()
        assert r.file.reads == [(reads[0].lba, 47 * LBA_BYTES)]
        assert [r.kv.unit(block) for block in (7, 9, 8)] == expected
        assert r.kv.untouched_except(before, [7, 8, 9])


def test_more_runs_than_one_call_takes(
    tmp_path: Path, kernels: DigestKernels, granule: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    preadv = os.preadv

    def counting(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(len(buffers))
        return preadv(fd, buffers, offset)

    layers = 64 << 10 >> granule.bit_length() - 1  # units of 64 KiB, the most that the kernels have keys for
    kv = layers_of(granule, layers=layers, page_granules=1, blocks=20)
    with block_rig(tmp_path, kernels, kv, load_threads=1, read_bytes=1 << 20) as r:
        reads = r.save([0, 1, 2, 3, 4, 5, 6, 7], 1) + r.save([8, 9], 2)
        expected = [r.kv.unit(block) for block in range(8)]
        monkeypatch.setattr(os, "preadv", counting)
        targets = [19, 18, 17, 16, 15, 14, 13, 12]
        assert wait(r.path.load(into(reads[:8], targets), abandon_after_s=10)).failures == ()
        assert [r.kv.unit(block) for block in targets] == expected
        assert max(calls) <= MAX_VECTORS
        assert sum(calls) == 8 * layers


# ---- what fails ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_id", [99, -1])
def test_a_block_out_of_range_fails_the_load_before_anything_is_read(
    tmp_path: Path, kernels: DigestKernels, block_id: int
) -> None:
    with block_rig(tmp_path, kernels, load_threads=1) as r:
        reads = r.save([1, 2, 3])
        r.file.reads.clear()
        before = r.kv.memory.copy()
        result = wait(r.path.load(into(reads, [7, block_id, 8]), abandon_after_s=10))
        assert sorted(f.index for f in result.failures) == [0, 1, 2]
        assert r.kv.untouched_except(before, [])
        assert r.file.reads == []
        assert wait(r.path.load(into(reads, [7, 8, 9]), abandon_after_s=10)).failures == ()


def test_on_a_block_device_and_when_it_fails(tmp_path: Path, kernels: DigestKernels) -> None:
    """EIO from the kernel itself: the file below the device ends where the device does not."""
    below = tmp_path / "below"
    create_data_file(below, 4 << 20)
    with loop_device_of(below) as device:
        data = open_data_file(device, writable=True)
        try:
            alignment = check_direct(data)
        except UnsupportedError as error:
            data.close()
            pytest.skip(f"needs hardware: a loop device with O_DIRECT: {error.message}")
        kv = layers_of(alignment.granule_bytes)
        path = block_path(
            data,
            kv.memory,
            (kv.layout,),
            kernels,
            lba_bytes=LBA_BYTES,
            load_threads=1,
            read_bytes=LBA_BYTES,
            max_units=MAX_UNITS,
        )
        try:
            kv.fill(3)
            expected = kv.unit(2)
            write = shard_write(kv.layout.unit_bytes, [1, 2, 3], FIRST_LBA)
            path.save([write])
            (written,) = until(path.take_written)
            assert written.unit_digests is not None
            reads = reads_of(write, written.unit_digests)
            assert wait(path.load(into(reads, [7, 8, 9]), abandon_after_s=10)).failures == ()
            assert kv.unit(8) == expected
            os.truncate(below, reads[1].lba * LBA_BYTES)
            failures = wait(path.load(into(reads, [7, 8, 9]), abandon_after_s=10)).failures
            assert [(failure.index, failure.is_mismatch) for failure in failures] == [(1, False), (2, False)]
            assert all("EIO" in failure.reason for failure in failures)
        finally:
            assert path.close()


# ---- giving up -----------------------------------------------------------------------------------------------------


def test_memory_is_not_told_free_before_the_read_returned(tmp_path: Path, kernels: DigestKernels) -> None:
    with block_rig(tmp_path, kernels, load_threads=1) as r:
        reads = r.save([1, 2, 3])
        expected = [r.kv.unit(block) for block in (1, 2, 3)]
        r.file.may_read.clear()
        job = r.path.load(into(reads, [7, 8, 9]), abandon_after_s=60)
        assert r.file.waiting_readers.acquire(timeout=5)
        started_s = time.monotonic()
        job.abandon("preempted")
        assert time.monotonic() - started_s < 1.0, "abandoning waited for the medium"
        assert job.result(time.monotonic()) is None, "the kernel may still write there"
        assert job.result(job.deadline_s + 3600) is None, "and no time that passes makes it safe"
        r.file.may_read.set()
        result = wait(job)
        assert [(f.index, f.is_mismatch) for f in result.failures] in ([], [(i, False) for i in range(3)])
        after = r.kv.memory.copy()
        assert [r.kv.unit(block) for block in (7, 8, 9)] == expected, "it landed before the outcome was told"
        time.sleep(0.02)
        assert np.array_equal(r.kv.memory, after)
        assert wait(r.path.load(into(reads, [0, 4, 5]), abandon_after_s=10)).failures == ()  # the thread went on


def test_an_abandoned_load_whose_read_fails_is_told_when_it_did(tmp_path: Path, kernels: DigestKernels) -> None:
    with block_rig(tmp_path, kernels, load_threads=1) as r:
        reads = r.save([1])
        r.file.read_error = media_error("Input/output error (EIO)")
        r.file.may_read.clear()
        job = r.path.load(into(reads, [7]), abandon_after_s=60)
        assert r.file.waiting_readers.acquire(timeout=5)
        job.abandon("preempted")
        assert job.result(time.monotonic()) is None
        r.file.may_read.set()
        (failure,) = wait(job).failures
        assert failure.index == 0


def test_closing_waits_for_what_the_kernel_has_under_way(tmp_path: Path, kernels: DigestKernels) -> None:
    made = BlockRig(tmp_path / "data", layers_of(granule_or_skip(tmp_path)), kernels, load_threads=1)
    reads = made.save([1])
    made.file.may_read.clear()
    jobs = [made.path.load(into(reads, [block]), abandon_after_s=60) for block in (7, 8)]
    assert made.file.waiting_readers.acquire(timeout=5)
    assert made.path.close(deadline_s=0.05) is False
    assert not made.file.is_closed
    assert jobs[0].result(time.monotonic()) is None
    made.file.may_read.set()
    assert made.path.close() is True
    assert made.file.is_closed
    assert wait(jobs[0]).failures == ()
    assert wait(jobs[1]).failures[0].reason == "the engine is shutting down"
