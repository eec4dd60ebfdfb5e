"""On a machine with a CUDA device: what the stand-ins of the other tests take for granted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshfusion.host.memory.cuda_driver import CudaError, DmaBufMapping, in_context
from meshfusion.host.memory.cuda_facts import CudaFacts, CudaPlace, learn, locate, whole_pages
from meshfusion.host.memory.cuda_memory import CudaKvMemory
from meshfusion.host.memory.libcuda import LibCuda, load_cuda
from meshfusion.host.memory.opening import cuda_kv_memory
from meshfusion.jbof.digest import DigestKernels, load_kernels
from meshfusion.jbof.errors import UnsupportedError
from meshfusion.jbof.nvme.memory import RegisteredRegion
from meshfusion.jbof.nvme.registration import AddressRange, DmaBufRange, MemoryRange, deregister, register_range
from meshfusion.jbof.nvme.sgl import RemoteMemory
from meshfusion.jbof.nvme.verbs_names import Verbs, load_verbs
from tests.host.support.kv_memory import KvMemory, layer_outermost

pytestmark = pytest.mark.device

LEAD_BYTES = 516  # the memory begins inside of a page
MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Bench:
    driver: LibCuda
    kv: KvMemory  # what the device's memory holds, on the host
    tensor: torch.Tensor
    memory: CudaKvMemory

    @property
    def place(self) -> CudaPlace:
        return locate(self.driver, self.tensor.data_ptr(), self.tensor.numel())

    @property
    def facts(self) -> CudaFacts:
        return learn(self.driver, self.place)

    def expected(self, kernels: DigestKernels, block_ids: list[int]) -> list[bytes]:
        layout = self.kv.layout
        return [kernels.digest_runs(self.kv.memory, layout.run_offsets(b), layout.run_bytes) for b in block_ids]


@pytest.fixture(scope="module")
def kernels() -> DigestKernels:
    return load_kernels(MAX_BYTES)


@pytest.fixture
def bench(kernels: DigestKernels) -> Iterator[Bench]:
    driver = load_cuda()
    kv = layer_outermost(page_bytes=100_004)
    kv.fill(7)
    raw = torch.empty(LEAD_BYTES + kv.memory.size, dtype=torch.uint8, device="cuda")
    tensor = raw[LEAD_BYTES:]
    tensor.copy_(torch.from_numpy(kv.memory))
    torch.cuda.synchronize()
    memory = cuda_kv_memory(tensor, kernels, driver)
    yield Bench(driver, kv, tensor, memory)
    memory.close()


def test_digests_on_the_device_are_those_of_the_host(bench: Bench, kernels: DigestKernels) -> None:
    blocks = list(range(bench.kv.layout.block_count))
    assert bench.memory.digests(bench.kv.layout, blocks) == bench.expected(kernels, blocks)


def test_what_the_driver_says_of_memory_of_torch(bench: Bench) -> None:
    place = bench.place
    assert place.context != 0
    assert place.allocation.address <= bench.tensor.data_ptr()
    assert place.allocation.end >= bench.tensor.data_ptr() + bench.tensor.numel()
    assert (Path("/sys/bus/pci/devices") / place.pci_address).exists()


def test_a_dma_buf_has_the_size_of_its_pages(bench: Bench) -> None:
    if not bench.facts.takes_dma_buf:
        pytest.skip("needs hardware: a CUDA device with dma-buf support")
    pages = whole_pages(bench.tensor.data_ptr(), bench.tensor.numel(), bench.place.allocation)
    with in_context(bench.driver, bench.place.context):
        fd = bench.driver.export_dma_buf(pages.address, pages.length_bytes, DmaBufMapping.DEFAULT)
        assert os.lseek(fd, 0, os.SEEK_END) == pages.length_bytes
        bench.driver.close_dma_buf(fd)
        with pytest.raises(CudaError):
            bench.driver.export_dma_buf(pages.address + 1, pages.length_bytes, DmaBufMapping.DEFAULT)


def test_a_flush_is_taken(bench: Bench) -> None:
    bench.memory.arrived()


def test_a_point_in_the_work_is_reached_after_the_work_before_it(bench: Bench, kernels: DigestKernels) -> None:
    torch.cuda._sleep(500_000_000)  # clock cycles: some tenths of a second
    bench.kv.fill(8)
    bench.tensor.copy_(torch.from_numpy(bench.kv.memory).pin_memory(), non_blocking=True)
    produced = bench.memory.produced()
    end = torch.cuda.Event()
    end.record()
    assert not end.query(), "the work was done too soon for this test to tell anything"
    produced.wait(30)
    assert bench.memory.digests(bench.kv.layout, [0, 5]) == bench.expected(kernels, [0, 5])


def test_memory_of_the_host_is_refused(bench: Bench) -> None:
    pinned = torch.zeros(1 << 20, dtype=torch.uint8).pin_memory()
    with pytest.raises(UnsupportedError, match="not memory of a device"):
        locate(bench.driver, pinned.data_ptr(), pinned.numel())
    with pytest.raises(UnsupportedError):
        locate(bench.driver, np.zeros(4096, np.uint8).ctypes.data, 4096)


# ---- with an RDMA device ---------------------------------------------------------------------------------------------


class FirstDevice:
    """Registers with the first RDMA device there is; keeps :class:`~meshfusion.host.memory.kv_memory.Registrar`."""

    def __init__(self, verbs: Verbs, pd: Any, name: str) -> None:
        self._verbs, self._pd, self._name = verbs, pd, name

    def register_address(self, address: int, length_bytes: int, *, writable: bool, owner: object) -> RegisteredRegion:
        return self._register(AddressRange(address, length_bytes), writable, owner)

    def register_dma_buf(self, memory: DmaBufRange, *, writable: bool, owner: object) -> RegisteredRegion:
        return self._register(memory, writable, owner)

    def _register(self, memory: MemoryRange, writable: bool, owner: object) -> RegisteredRegion:
        made = register_range(self._verbs, self._pd, memory, writable=writable, device_name=self._name)
        remote = RemoteMemory(memory.first_iova, memory.length_bytes, made.rkey)
        return RegisteredRegion(remote, owner, lambda: deregister(self._verbs, made.mr))


@pytest.fixture
def first_device() -> Iterator[FirstDevice]:
    try:
        verbs = load_verbs()
    except UnsupportedError as error:
        pytest.skip(f"needs hardware: an RDMA device ({error.message})")
    from pyverbs.device import Context, get_device_list  # found by load_verbs

    names = [device.name.decode() for device in get_device_list()]
    if not names:
        pytest.skip("needs hardware: an RDMA device")
    with Context(name=names[0]) as context:
        pd = verbs.PD(context)
        yield FirstDevice(verbs, pd, names[0])
        pd.close()


def test_memory_of_the_device_is_registered(bench: Bench, first_device: FirstDevice) -> None:
    region = bench.memory.register(first_device)
    assert bench.memory.way is not None
    assert region.remote.rkey != 0
    assert region.remote.length_bytes == bench.tensor.numel()
    region.close()
