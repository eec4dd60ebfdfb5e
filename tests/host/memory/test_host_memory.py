"""Memory of the host, and which kind of memory a tensor is."""

from __future__ import annotations

import pytest
import torch

from meshfusion.host.memory.cuda_driver import PointerAttribute
from meshfusion.host.memory.host_memory import ALREADY_PRODUCED, HostKvMemory
from meshfusion.host.memory.kv_memory import MemoryPlace
from meshfusion.host.memory.opening import cuda_kv_memory, kv_memory_of
from meshfusion.jbof.digest import DigestKernels, load_kernels
from meshfusion.jbof.errors import UnsupportedError
from tests.host.support.fake_cuda import FakeCuda
from tests.host.support.kv_memory import layer_outermost
from tests.host.support.memory_namespace import MemoryNamespace


@pytest.fixture(scope="module")
def kernels() -> DigestKernels:
    return load_kernels(64 << 10)


def test_all_of_it_is_registered_where_it_lies_and_kept(kernels: DigestKernels) -> None:
    kv = layer_outermost()
    region = HostKvMemory(kv.memory, kernels).register(MemoryNamespace(0))
    assert (region.remote.address, region.remote.length_bytes) == (kv.memory.ctypes.data, kv.memory.nbytes)
    assert region._owner is kv.memory


def test_digests_are_of_what_the_blocks_hold(kernels: DigestKernels) -> None:
    kv = layer_outermost()
    kv.fill(1)
    memory = HostKvMemory(kv.memory, kernels)
    units = [torch.frombuffer(bytearray(kv.unit(block)), dtype=torch.uint8).numpy() for block in (4, 0)]
    assert memory.digests(kv.layout, [4, 0]) == [kernels.digest_runs(unit, [0], unit.size) for unit in units]
    assert memory.digests(kv.layout, []) == []


def test_there_is_nothing_to_wait_for(kernels: DigestKernels) -> None:
    memory = HostKvMemory(layer_outermost().memory, kernels)
    assert memory.produced() is ALREADY_PRODUCED
    memory.produced().wait(0)
    memory.arrived()
    memory.close()


def test_a_tensor_of_the_host_is_served_without_a_copy(kernels: DigestKernels) -> None:
    tensor = torch.zeros(4096, dtype=torch.uint8)
    region = kv_memory_of(tensor, kernels).register(MemoryNamespace(0))
    assert region.remote.address == tensor.data_ptr()


def test_another_device_is_refused_by_its_name(kernels: DigestKernels) -> None:
    with pytest.raises(UnsupportedError, match="KV memory on meta is not served"):
        kv_memory_of(torch.empty(4096, dtype=torch.uint8, device="meta"), kernels)


def test_cuda_memory_is_asked_about_at_its_address(kernels: DigestKernels) -> None:
    gpu = FakeCuda()
    array = gpu.allocate(8192)
    memory = cuda_kv_memory(torch.from_numpy(array), kernels, gpu)
    assert memory.place == MemoryPlace(array.ctypes.data, 8192, "cuda:3", "0000:3b:00.0")
    assert gpu.sync_memops == {array.ctypes.data}
    memory.close()
    with pytest.raises(UnsupportedError, match="CUDA_ERROR_INVALID_VALUE"):
        cuda_kv_memory(torch.zeros(8192, dtype=torch.uint8), kernels, gpu)


def test_cuda_memory_that_rdma_devices_cannot_reach_can_be_staged(kernels: DigestKernels) -> None:
    gpu = FakeCuda(pointer_attributes={PointerAttribute.IS_GPU_DIRECT_RDMA_CAPABLE: 0})
    memory = cuda_kv_memory(torch.from_numpy(gpu.allocate(8192)), kernels, gpu)
    with pytest.raises(UnsupportedError, match="not allocated for GPUDirect RDMA") as caught:
        memory.register(MemoryNamespace(0))
    assert "staged path" in caught.value.next_step
    memory.staging(4096).close()
    memory.close()
    gpu.assert_nothing_left()
