"""The staged path to a device's memory: copies are waited for, proven where they went, and never outlived."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshfusion.host.memory.cuda_driver import CudaError
from meshfusion.host.memory.cuda_memory import LOAD_DEPTH, CudaProduced
from meshfusion.host.memory.cuda_staging import CudaStaging
from meshfusion.host.path.shards import WriteFate
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.nvme.memory import MemoryInUseError
from tests.host.support.cuda_rig import cuda_memory, device_kv
from tests.host.support.cuda_staged_rig import CudaStagedRig, cuda_staged_rig
from tests.host.support.data_files import media_error
from tests.host.support.fake_cuda import STREAM, FakeCuda
from tests.host.support.kv_memory import block_outermost, layer_outermost
from tests.host.support.staged_rig import into, rig, wait
from tests.host.support.waiting import until


@pytest.mark.parametrize("make_kv", [layer_outermost, block_outermost])
@pytest.mark.parametrize("read_bytes", [LBA_BYTES, 64 << 10])
def test_saved_units_come_back_bit_exact_in_other_blocks(
    tmp_path: Path, kernels: DigestKernels, make_kv: Any, read_bytes: int
) -> None:
    with cuda_staged_rig(tmp_path, kernels, kv=make_kv(blocks=20), read_bytes=read_bytes) as r:
        sources, targets = [11, 2, 7, 19, 0, 5, 13, 4], [1, 3, 6, 8, 9, 10, 12, 14]
        expected = [r.kv.unit(block) for block in sources]
        reads = r.save(sources)
        r.kv.fill(4)
        before = r.kv.memory.copy()
        assert wait(r.path.load(into(reads, targets), abandon_after_s=10)).failures == ()
        assert [r.kv.unit(block) for block in targets] == expected
        assert r.kv.untouched_except(before, targets)


def test_the_medium_holds_what_the_host_s_path_writes(tmp_path: Path, kernels: DigestKernels) -> None:
    (tmp_path / "host").mkdir()
    with cuda_staged_rig(tmp_path, kernels) as device, rig(tmp_path / "host", kernels) as host:
        assert device.save([3, 1, 4]) == host.save([3, 1, 4])
        assert (tmp_path / "data").read_bytes() == (tmp_path / "host/data").read_bytes()


def test_the_next_part_is_read_while_the_former_is_copied(tmp_path: Path, kernels: DigestKernels) -> None:
    with cuda_staged_rig(tmp_path, kernels, load_threads=1, read_bytes=LOAD_DEPTH * LBA_BYTES) as r:
        reads = r.save([1, 2, 3])
        r.file.reads.clear()
        r.gpu.lazy = True
        job = r.path.load(into(reads, [7, 8, 9]), abandon_after_s=10)
        until(lambda: len(r.file.reads) == LOAD_DEPTH, what="for reads beside a copy that does not end")
        assert job.result(time.monotonic()) is None
        r.gpu.lazy = False
        assert wait(job).failures == ()


def test_other_bytes_on_the_medium_fail_their_unit_only(tmp_path: Path, kernels: DigestKernels) -> None:
    with cuda_staged_rig(tmp_path, kernels) as r:
        reads = r.save([1, 2, 3])
        raw = bytearray((tmp_path / "data").read_bytes())
        raw[reads[1].lba * LBA_BYTES + 5] ^= 1
        (tmp_path / "data").write_bytes(raw)
        (failure,) = wait(r.path.load(into(reads, [5, 6, 7]), abandon_after_s=10)).failures
        assert (failure.index, failure.is_mismatch) == (1, True)


def test_a_read_that_fails_fails_its_part(tmp_path: Path, kernels: DigestKernels) -> None:
    with cuda_staged_rig(tmp_path, kernels) as r:
        reads = r.save([1, 2])
        before = r.kv.memory.copy()
        r.file.read_error = media_error("unrecovered read error")
        failures = wait(r.path.load(into(reads, [5, 6]), abandon_after_s=10)).failures
        assert [(f.index, f.is_mismatch, f.reason) for f in failures] == [
            (i, False, "unrecovered read error") for i in range(2)
        ]
        assert r.kv.untouched_except(before, [])


# ---- abandoned loads -------------------------------------------------------------------------------------------------


def test_before_its_copy_begins_a_load_is_given_up_at_once(tmp_path: Path, kernels: DigestKernels) -> None:
    with cuda_staged_rig(tmp_path, kernels, load_threads=1) as r:
        reads = r.save([1])
        copies, before = r.gpu.copy_count, r.kv.memory.copy()
        r.file.may_read.clear()
        job = r.path.load(into(reads, [7]), abandon_after_s=60)
        assert r.file.waiting_readers.acquire(timeout=5)
        job.abandon("preempted")
        result = job.result(time.monotonic())
        assert result is not None
        assert [f.reason for f in result.failures] == ["preempted"]
        r.file.may_read.set()
        assert r.path.close()
        assert (r.gpu.copy_count, r.kv.untouched_except(before, [])) == (copies, True)


def test_once_its_copy_has_begun_blocks_are_kept_until_it_ended(tmp_path: Path, kernels: DigestKernels) -> None:
    with cuda_staged_rig(tmp_path, kernels, load_threads=1) as r:
        reads = r.save([1])
        copies = r.gpu.copy_count
        r.gpu.lazy = True
        job = r.path.load(into(reads, [7]), abandon_after_s=60)
        until(lambda: r.gpu.copy_count == copies + r.kv.layout.run_count, what="for the copies")
        job.abandon("preempted")
        time.sleep(0.05)
        assert job.result(time.monotonic()) is None, "the device may still write the block"
        assert not r.path.close(deadline_s=0.05), "nor does closing free anything under a copy"
        with pytest.raises(MemoryInUseError, match="stagings"):
            r.memory.close()
        r.gpu.run_copies()
        assert wait(job) is not None


def test_a_load_waits_for_what_the_engine_still_does_with_its_blocks(tmp_path: Path, kernels: DigestKernels) -> None:
    """Else work that was issued before would write over what was loaded, or read it in place of its own."""
    with cuda_staged_rig(tmp_path, kernels) as r:
        reads = r.save([1])
        expected, copies = r.kv.unit(1), r.gpu.copy_count
        r.gpu.lazy = True
        r.gpu.launch(r.address_of(7), b"of a former request")
        job = r.path.load(into(reads, [7]), abandon_after_s=10)
        time.sleep(0.05)
        assert r.gpu.copy_count == copies
        r.gpu.lazy = False
        assert wait(job).failures == ()
        assert r.kv.unit(7) == expected


# ---- a driver that fails ---------------------------------------------------------------------------------------------


def raising(error: Exception) -> Any:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def test_a_copy_that_does_not_begin_fails_its_part_when_those_before_it_ended(
    tmp_path: Path, kernels: DigestKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cuda_staged_rig(tmp_path, kernels, load_threads=1) as r:
        reads = r.save([1])
        begin, calls = r.gpu.copy_to_device, []

        def fails_second(*arguments: int) -> None:
            calls.append(arguments)
            if len(calls) == 2:
                raise CudaError("cuMemcpyHtoDAsync", "CUDA_ERROR_UNKNOWN")
            begin(*arguments)

        monkeypatch.setattr(r.gpu, "copy_to_device", fails_second)
        (failure,) = wait(r.path.load(into(reads, [7]), abandon_after_s=10)).failures
        assert not failure.is_mismatch
        assert "cuMemcpyHtoDAsync failed with CUDA_ERROR_UNKNOWN" in failure.reason
        assert not any(r.gpu._left_of(stream) for stream in r.gpu.streams), "what had begun was waited for"
        assert wait(r.path.load(into(reads, [8]), abandon_after_s=10)).failures == ()


def test_copies_whose_end_is_not_known_keep_their_blocks_and_their_staging(
    tmp_path: Path, kernels: DigestKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeCuda()
    made = CudaStagedRig(
        tmp_path / "data", gpu, device_kv(gpu, layer_outermost()), kernels, load_threads=1, read_bytes=LBA_BYTES
    )
    made.kv.fill(3)
    reads = made.save([1])
    monkeypatch.setattr(gpu, "is_event_done", raising(CudaError("cuEventQuery", "CUDA_ERROR_ILLEGAL_ADDRESS")))
    monkeypatch.setattr(CudaProduced, "wait", lambda *_: None)
    job = made.path.load(into(reads, [7]), abandon_after_s=0.05)
    time.sleep(0.2)
    assert job.result(time.monotonic()) is None, "the block may be written at any time"
    assert made.path.close()
    assert len(gpu.pinned) == 1, "and the staging be read"
    with pytest.raises(MemoryInUseError):
        made.memory.close()


def test_a_device_that_cannot_pin_memory_answers_all_the_same(
    tmp_path: Path, kernels: DigestKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeCuda, "pin_host", raising(CudaError("cuMemHostRegister", "CUDA_ERROR_OUT_OF_MEMORY")))
    with cuda_staged_rig(tmp_path, kernels) as r:
        write = r.shard_write(1, [1])
        r.path.save([write])
        result = r.written(1)[1]
        assert (result.fate, "CUDA_ERROR_OUT_OF_MEMORY" in result.reason) == (WriteFate.FAILED, True)
        (failure,) = wait(r.path.load(r.reads(write, (b"d" * 8,)), abandon_after_s=10)).failures
        assert "CUDA_ERROR_OUT_OF_MEMORY" in failure.reason


# ---- saves -----------------------------------------------------------------------------------------------------------


def test_a_save_takes_what_the_work_before_it_produces(tmp_path: Path, kernels: DigestKernels) -> None:
    with cuda_staged_rig(tmp_path, kernels) as r:
        r.gpu.launch(r.address_of(2), b"new bytes")
        reads = r.save([2])
        assert (tmp_path / "data").read_bytes()[reads[0].lba * LBA_BYTES :][:9] == b"new bytes"
        assert wait(r.path.load(into(reads, [7]), abandon_after_s=10)).failures == ()


def test_a_save_whose_staging_holds_other_bytes_fails(
    tmp_path: Path, kernels: DigestKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cuda_staged_rig(tmp_path, kernels) as r:
        begin = r.gpu.copy_from_device
        monkeypatch.setattr(r.gpu, "copy_from_device", lambda to, source, n, s: begin(to, source + 4, n, s))
        r.path.save([r.shard_write(1, [1])])
        result = r.written(1)[1]
        assert (result.fate, "not what it holds" in result.reason) == (WriteFate.FAILED, True)


# ---- mutants: what would be wrong is noticed -------------------------------------------------------------------------


def test_a_save_that_does_not_wait_for_the_work_is_noticed(
    tmp_path: Path, kernels: DigestKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cuda_staged_rig(tmp_path, kernels) as r:
        monkeypatch.setattr(CudaProduced, "wait", lambda *_: None)
        # Only the copies' streams go on by themselves.
        monkeypatch.setattr(r.gpu, "run", lambda stream=STREAM, count=1: _run_but_engine(r.gpu, stream, count))
        r.gpu.launch(r.address_of(1), b"late")
        r.path.save([r.shard_write(1, [1])])
        result = r.written(1)[1]
        assert result.fate is WriteFate.FAILED
        assert "before the work that fills it was done" in result.reason
        monkeypatch.undo()
        r.gpu.run()
        r.gpu.run_copies()


def _run_but_engine(gpu: FakeCuda, stream: int, count: int) -> None:
    if stream != STREAM:
        FakeCuda.run(gpu, stream, count)


def test_digests_before_the_copy_ended_are_noticed(
    tmp_path: Path, kernels: DigestKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cuda_staged_rig(tmp_path, kernels) as r:
        reads = r.save([1])
        r.gpu.lazy = True
        monkeypatch.setattr(CudaStaging, "_wait", lambda _: None)
        (failure,) = wait(r.path.load(into(reads, [7]), abandon_after_s=10)).failures
        assert failure.is_mismatch
        r.gpu.run_copies()


def test_the_stand_in_minds_where_copies_go_and_come_from() -> None:
    gpu = FakeCuda(lazy=True)
    kv = device_kv(gpu, layer_outermost())
    memory = cuda_memory(gpu, kv)
    staging = memory.staging(4096)
    source = staging.buffer.array.ctypes.data
    unpinned = np.zeros(8192, np.uint8)
    gpu.push_context(0xC0DE)
    stream = gpu.create_stream()
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        gpu.copy_to_device(kv.memory.ctypes.data, unpinned.ctypes.data, 64, stream)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        gpu.copy_from_device(source, source, 64, stream)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        gpu.copy_to_device(kv.memory.ctypes.data, source + 4090, 64, stream)
    kv.memory[:4] = 1
    staging.buffer.array[:4] = 2
    gpu.copy_to_device(kv.memory.ctypes.data, source, 4, stream)
    assert kv.memory[0] == 1, "not before it is done"
    staging.buffer.array[:4] = 3
    with pytest.raises(AssertionError, match="freed under a copy"):
        gpu.unpin_host(source)
    with pytest.raises(AssertionError, match="freed under a copy"):
        gpu.free(kv.memory)
    with pytest.raises(AssertionError, match="before its work was done"):
        gpu.destroy_stream(stream)
    gpu.run_copies()
    assert kv.memory[0] == 3, "what the staging held when it was copied"
    gpu.destroy_stream(stream)
    gpu.pop_context()
    staging.close()
    memory.close()
    gpu.assert_nothing_left()


def test_an_error_of_the_proof_is_no_mismatch(
    tmp_path: Path, kernels: DigestKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cuda_staged_rig(tmp_path, kernels) as r:
        reads = r.save([1])
        monkeypatch.setattr(r.memory._digests, "digest_units", raising(MediaError("no room", next_step="none")))
        (failure,) = wait(r.path.load(into(reads, [7]), abandon_after_s=10)).failures
        assert (failure.is_mismatch, failure.reason) == (False, "no room")
