"""CUDA memory over a driver that enforces its rules: which way it is registered, in which order it is read, its end."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.host.memory.cuda_driver import Allocation, CudaError, DeviceAttribute, PointerAttribute, RdmaOrder
from meshfusion.host.memory.cuda_driver import DmaBufMapping as Mapping
from meshfusion.host.memory.cuda_facts import CudaFacts, has_peermem, learn, locate, whole_pages
from meshfusion.host.memory.cuda_memory import Way
from meshfusion.host.path.shards import WriteFate
from meshfusion.jbof.digest import load_kernels
from meshfusion.jbof.errors import MediaError, UnsupportedError
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.nvme.memory import MemoryInUseError
from tests.host.support.cuda_rig import CudaNamespace, cuda_memory, cuda_rig, device_kv
from tests.host.support.fake_cuda import OTHER_CONTEXT, FakeCuda
from tests.host.support.kv_memory import KvMemory, layer_outermost
from tests.host.support.staged_rig import into, wait

NO_DMA_BUFS = {"takes_dma_bufs": False, "facts": {"takes_peermem": True}}


@pytest.fixture
def peermem(tmp_path: Path) -> Path:
    (tmp_path / "nvidia_peermem").mkdir()
    return tmp_path


def facts_of(gpu: FakeCuda, address: int, length_bytes: int, **options: Any) -> CudaFacts:
    return learn(gpu, locate(gpu, address, length_bytes), **options)


def memory_of(gpu: FakeCuda, **facts: Any) -> tuple[KvMemory, Any]:
    kv = device_kv(gpu, layer_outermost(), lead_bytes=516)
    return kv, cuda_memory(gpu, kv, **facts)


# ---- the path over it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(RdmaOrder))
@pytest.mark.parametrize(
    ("gpu", "options", "way"),
    [
        ({}, {}, Way.DMA_BUF_PCIE),
        ({"mappings": frozenset({Mapping.DEFAULT})}, {}, Way.DMA_BUF),
        ({}, NO_DMA_BUFS, Way.PEERMEM),
    ],
)
def test_units_come_back_bit_exact_whatever_the_way(
    gpu: dict[str, Any], options: dict[str, Any], way: Way, order: RdmaOrder
) -> None:
    with cuda_rig(FakeCuda(order=order, **gpu), **options) as r:
        assert r.memory.way is way
        expected = [r.kv.unit(block) for block in (3, 1, 4)]
        reads = r.saved([3, 1, 4])
        kernels = load_kernels(64 << 10)
        offsets = [r.kv.layout.run_offsets(block) for block in (3, 1, 4)]
        assert [read.digest for read in reads] == [
            kernels.digest_runs(r.kv.memory, runs, r.kv.layout.run_bytes) for runs in offsets
        ]
        r.kv.fill(4)
        before = r.kv.memory.copy()
        assert wait(r.path.load(into(reads, [0, 2, 5]), abandon_after_s=10)).failures == ()
        assert [r.kv.unit(block) for block in (0, 2, 5)] == expected
        assert r.kv.untouched_except(before, [0, 2, 5])
        assert (r.gpu.flush_count > 0) == (order is RdmaOrder.NONE)


def test_other_bytes_on_the_medium_fail_their_unit() -> None:
    with cuda_rig() as r:
        reads = r.saved([1, 2, 3])
        r.namespace.medium[reads[1].lba * LBA_BYTES + 5] ^= 1
        (failure,) = wait(r.path.load(into(reads, [5, 6, 7]), abandon_after_s=10)).failures
        assert (failure.index, failure.is_mismatch) == (1, True)


def test_without_the_flush_a_load_is_not_taken_for_good() -> None:
    """A negative control of the stand-in: what a device does not order is not there yet."""
    with cuda_rig(facts={"needs_flush": False}) as r:
        reads = r.saved([1])
        (failure,) = wait(r.path.load(into(reads, [7]), abandon_after_s=10)).failures
        assert failure.is_mismatch
        r.gpu.land()


def test_what_a_failed_read_wrote_is_there_before_the_block_is_given_back() -> None:
    """Otherwise it would land in the block of its next owner."""
    with cuda_rig() as r:
        reads = r.saved([1])
        r.namespace.holds = True
        job = r.path.load(into(reads, [7]), abandon_after_s=10)
        assert r.namespace.waiting.acquire(timeout=5)
        (held,) = r.namespace.held
        held.land()
        held.pending.end(MediaError("half of it", next_step="none"))
        r.namespace.held.clear()
        (failure,) = wait(job).failures
        assert not failure.is_mismatch
        assert r.gpu.unflushed == []


def test_a_flush_that_fails_fails_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    with cuda_rig() as r:
        reads = r.saved([1])

        def fails() -> None:
            raise CudaError("cuFlushGPUDirectRDMAWrites", "CUDA_ERROR_UNKNOWN")

        monkeypatch.setattr(r.gpu, "flush_rdma_writes", fails)
        (failure,) = wait(r.path.load(into(reads, [7]), abandon_after_s=10)).failures
        assert not failure.is_mismatch
        assert "cuFlushGPUDirectRDMAWrites failed with CUDA_ERROR_UNKNOWN" in failure.reason
        monkeypatch.undo()
        r.gpu.land()


# ---- saves and the engine's work -------------------------------------------------------------------------------------


def test_a_save_reads_what_the_work_before_it_produces() -> None:
    with cuda_rig() as r:
        new = bytes(range(256)) * 4
        address = r.kv.memory.ctypes.data + int(r.kv.layout.run_starts[0]) + 2 * int(r.kv.layout.run_strides[0])
        r.gpu.launch(address, new)
        reads = r.saved([2])
        assert bytes(r.namespace.medium[reads[0].lba * LBA_BYTES :][: len(new)]) == new
        assert wait(r.path.load(into(reads, [7]), abandon_after_s=10)).failures == ()


def test_a_save_waits_for_work_before_it_and_not_for_work_after_it() -> None:
    gpu = FakeCuda(lazy=True)
    with cuda_rig(gpu) as r:
        first = r.kv.memory.ctypes.data + int(r.kv.layout.run_starts[0])
        gpu.launch(first, b"before")
        event = r.memory.produced()
        gpu.launch(first + int(r.kv.layout.run_strides[0]), b"after, into another block")
        with pytest.raises(MediaError, match=r"did not finish within 0\.01 s"):
            event.wait(0.01)
        gpu.run(count=1)
        event.wait(5)
        event.wait(5)  # again is no error, though the event is gone
        gpu.run()
        assert r.save([0]).fate is WriteFate.DURABLE


def test_a_load_waits_for_what_the_engine_still_does_with_its_blocks() -> None:
    """No order is kept between an RDMA device and work that was issued before."""
    with cuda_rig() as r:
        reads = r.saved([1])
        expected, asked = r.kv.unit(1), len(r.namespace.log)
        r.gpu.lazy = True
        runs = r.kv.layout.run_offsets(7)
        r.gpu.launch(r.kv.memory.ctypes.data + int(runs[0]), b"of a former request")
        job = r.path.load(into(reads, [7]), abandon_after_s=10)
        time.sleep(0.05)
        assert len(r.namespace.log) == asked
        r.gpu.run()
        assert wait(job).failures == ()
        assert r.kv.unit(7) == expected


def test_work_that_does_not_end_fails_the_load_at_its_deadline() -> None:
    with cuda_rig() as r:
        reads = r.saved([1])
        r.gpu.lazy = True
        r.gpu.launch(r.kv.memory.ctypes.data + int(r.kv.layout.run_offsets(7)[0]), b"never")
        job = r.path.load(into(reads, [7]), abandon_after_s=0.05)
        assert [f.is_mismatch for f in wait(job).failures] == [False]
        r.gpu.run()


def test_points_that_nobody_waits_for_do_not_pile_up() -> None:
    gpu = FakeCuda()
    _, memory = memory_of(gpu)
    for _ in range(500):
        memory.produced()
    assert len(gpu._events) <= 40
    memory.close()
    gpu.assert_nothing_left()


def test_a_batch_of_nothing_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with cuda_rig() as r:
        monkeypatch.setattr(r.memory, "produced", lambda: pytest.fail("it was asked"))
        r.path.save([])


def test_reading_before_the_work_is_done_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control of the stand-in."""
    gpu = FakeCuda(lazy=True)
    with cuda_rig(gpu) as r:
        monkeypatch.setattr("meshfusion.host.memory.cuda_memory.CudaProduced.wait", lambda *_: None)
        gpu.launch(r.kv.memory.ctypes.data + int(r.kv.layout.run_starts[0]), b"late")
        result = r.save([0])
        assert result.fate is WriteFate.FAILED
        assert "before the work that fills it was done" in result.reason
        gpu.run()


def test_an_event_that_cannot_be_recorded_fails_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    with cuda_rig() as r:

        def fails(event: int, stream: int) -> None:
            raise CudaError("cuEventRecord", "CUDA_ERROR_INVALID_HANDLE")

        monkeypatch.setattr(r.gpu, "record_event", fails)
        result = r.save([0])
        assert (result.fate, "CUDA_ERROR_INVALID_HANDLE" in result.reason) == (WriteFate.FAILED, True)


# ---- contexts --------------------------------------------------------------------------------------------------------


def test_threads_keep_the_context_that_they_have() -> None:
    gpu = FakeCuda()
    _, memory = memory_of(gpu)
    gpu.push_context(OTHER_CONTEXT)
    memory.arrived()
    memory.produced().wait(5)
    assert gpu.context_stacks.stack == [OTHER_CONTEXT]
    gpu.context_stacks.stack.clear()
    errors: list[BaseException] = []

    def without_any() -> None:
        try:
            memory.arrived()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=without_any)
    thread.start()
    thread.join()
    assert (errors, gpu.flush_count) == ([], 2)
    memory.close()
    gpu.assert_nothing_left()


def test_the_stand_in_minds_its_context() -> None:
    gpu = FakeCuda()
    for call in (gpu.flush_rdma_writes, gpu.create_event):
        with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_CONTEXT"):
            call()


# ---- registration ----------------------------------------------------------------------------------------------------


def test_synchronous_operations_on_the_memory_are_made_so() -> None:
    gpu = FakeCuda()
    kv, _ = memory_of(gpu)
    assert gpu.sync_memops == {kv.memory.ctypes.data - 516}


def test_a_dma_buf_is_exported_once_for_all_who_register_it_and_closed_at_the_end() -> None:
    gpu = FakeCuda()
    kv, memory = memory_of(gpu)
    one, other = (CudaNamespace(1 << 20, gpu=gpu) for _ in range(2))
    regions = [memory.register(one), memory.register(other)]
    assert gpu.export_count == 1
    assert [region.remote.address for region in regions] == [516, 516]
    assert [region.remote.length_bytes for region in regions] == [kv.memory.nbytes] * 2
    regions[0].close()
    with pytest.raises(MemoryInUseError, match="through 1 regions"):
        memory.close()
    assert gpu.exported
    other.close(timeout_s=0)  # revokes what is registered with it
    memory.close()
    memory.close()
    gpu.assert_nothing_left()
    with pytest.raises(AssertionError, match="after close"):
        memory.register(one)


def test_what_the_first_way_was_is_what_all_others_are() -> None:
    """Ways into a device may be separate ordering domains."""
    gpu = FakeCuda()
    _, memory = memory_of(gpu, takes_peermem=True)
    region = memory.register(CudaNamespace(1 << 20, gpu=gpu))
    with pytest.raises(UnsupportedError, match="cannot register dma-bufs"):
        memory.register(CudaNamespace(1 << 20, gpu=gpu, takes_dma_bufs=False))
    assert memory.way is Way.DMA_BUF_PCIE
    region.close()
    memory.close()


def test_no_way_is_refused_with_all_reasons_and_nothing_is_left() -> None:
    gpu = FakeCuda(mappings=frozenset({Mapping.DEFAULT}))
    _, memory = memory_of(gpu, takes_peermem=True)
    with pytest.raises(UnsupportedError) as caught:
        memory.register(CudaNamespace(1 << 20, gpu=gpu, takes_dma_bufs=False, takes_addresses=False))
    for part in (
        "dma-buf with PCIe mapping: the CUDA driver's cuMemGetHandleForAddressRange failed with CUDA_ERROR_NOT_SUPP",
        "dma-buf: mlx0 cannot register dma-bufs",
        "nvidia-peermem: Bad address",
    ):
        assert part in caught.value.message
    memory.close()
    gpu.assert_nothing_left()


def test_what_one_way_exported_is_not_used_for_the_next() -> None:
    """Each with its own mapping, and closed before the next."""
    gpu = FakeCuda()
    _, memory = memory_of(gpu, takes_peermem=True)
    region = memory.register(CudaNamespace(1 << 20, gpu=gpu, takes_dma_bufs=False))
    assert (memory.way, gpu.export_count, gpu.exported) == (Way.PEERMEM, 2, {})
    region.close()
    memory.close()
    gpu.assert_nothing_left()


def test_what_a_machine_lacks_is_named() -> None:
    gpu = FakeCuda(device_attributes={DeviceAttribute.DMA_BUF_SUPPORTED: 0})
    _, memory = memory_of(gpu)
    with pytest.raises(UnsupportedError, match=r"no dma-buf support.*nvidia-peermem: the kernel module is not loaded"):
        memory.register(CudaNamespace(1 << 20, gpu=gpu))
    memory.close()


def test_freeing_memory_that_is_registered_is_noticed() -> None:
    """A negative control of the stand-in."""
    gpu = FakeCuda()
    kv, memory = memory_of(gpu)
    region = memory.register(CudaNamespace(1 << 20, gpu=gpu))
    with pytest.raises(AssertionError, match="others may still reach"):
        gpu.free(kv.memory)
    region.close()
    memory.close()


def test_events_that_nobody_waited_for_go_with_the_memory() -> None:
    gpu = FakeCuda(lazy=True)
    _, memory = memory_of(gpu)
    memory.produced()
    memory.close()
    gpu.assert_nothing_left()


# ---- what is known of it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pointer", "device", "reason"),
    [
        ({PointerAttribute.MEMORY_TYPE: 1}, {}, "not memory of a device"),
        ({PointerAttribute.IS_MANAGED: 1}, {}, "managed memory"),
        ({PointerAttribute.IS_GPU_DIRECT_RDMA_CAPABLE: 0}, {}, "not allocated for GPUDirect RDMA"),
        ({PointerAttribute.CONTEXT: 0}, {}, "no context"),
        ({}, {DeviceAttribute.GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: 0}, "neither orders RDMA writes"),
        ({}, {DeviceAttribute.GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: 2}, "neither orders RDMA writes"),
    ],
)
def test_what_cannot_be_proven_is_refused(
    pointer: dict[PointerAttribute, int], device: dict[DeviceAttribute, int], reason: str
) -> None:
    gpu = FakeCuda(pointer_attributes=pointer, device_attributes=device)
    array = gpu.allocate(10_000)
    with pytest.raises(UnsupportedError, match=reason) as caught:
        facts_of(gpu, array.ctypes.data, 10_000)
    is_of_rdma = "RDMA" in reason
    assert ("cannot be given to RDMA devices" in caught.value.message) == is_of_rdma
    assert ("staged path" in caught.value.next_step) == is_of_rdma


def test_memory_of_several_allocations_or_of_none_is_refused() -> None:
    gpu = FakeCuda()
    array = gpu.allocate(8192)
    with pytest.raises(UnsupportedError, match=r"8193 bytes .* are not in one allocation"):
        facts_of(gpu, array.ctypes.data, 8193)
    with pytest.raises(UnsupportedError, match="CUDA_ERROR_INVALID_VALUE"):
        facts_of(gpu, 4096, 1)


def test_an_order_by_the_device_needs_no_flush(peermem: Path) -> None:
    for order in RdmaOrder:
        gpu = FakeCuda(order=order)
        facts = facts_of(gpu, gpu.allocate(10_000).ctypes.data, 10_000, sys_module=peermem)
        assert facts.needs_flush == (order is RdmaOrder.NONE)
        assert (facts.takes_dma_buf, facts.takes_peermem) == (True, True)


def test_peermem_needs_its_module_and_its_device(peermem: Path, tmp_path: Path) -> None:
    assert has_peermem(peermem)
    assert not has_peermem(tmp_path / "nowhere")
    gpu = FakeCuda(device_attributes={DeviceAttribute.GPU_DIRECT_RDMA_SUPPORTED: 0})
    assert not facts_of(gpu, gpu.allocate(64).ctypes.data, 64, sys_module=peermem).takes_peermem


@given(st.integers(0, 40_000), st.integers(1, 40_000), st.sampled_from([4096, 65536]))
def test_pages_hold_the_memory_and_no_page_more(lead: int, length: int, page_bytes: int) -> None:
    base = 7 << 21
    allocation = Allocation(base, 1 << 21)
    pages = whole_pages(base + lead, length, allocation, page_bytes=page_bytes)
    assert pages.address % page_bytes == pages.length_bytes % page_bytes == 0
    assert pages.address + pages.offset_bytes == base + lead
    assert pages.offset_bytes < page_bytes
    assert length <= pages.length_bytes - pages.offset_bytes < length + page_bytes


@pytest.mark.parametrize("allocation", [Allocation(0x1100, 0x1F00), Allocation(0x1000, 0x1F00)])
def test_pages_that_reach_out_of_the_allocation_are_refused(allocation: Allocation) -> None:
    with pytest.raises(UnsupportedError, match="reach out of its allocation"):
        whole_pages(0x1200, 0x1C00, allocation, page_bytes=4096)
    assert whole_pages(0x1200, 0x1C00, Allocation(0x1000, 0x2000), page_bytes=4096) == (0x1000, 0x2000, 0x200)


def test_a_wait_ends_at_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeCuda(lazy=True)
    kv, memory = memory_of(gpu)
    gpu.launch(kv.memory.ctypes.data, b"never")
    event = memory.produced()
    began = time.monotonic()
    with pytest.raises(MediaError, match="did not finish"):
        event.wait(0.05)
    assert 0.05 <= time.monotonic() - began < 2
    memory.close()
    gpu.assert_nothing_left()
