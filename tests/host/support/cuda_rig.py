"""The direct path over CUDA memory that is not there: a device, an RDMA device and a namespace in this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from meshfusion.host.memory.cuda_facts import learn, locate
from meshfusion.host.memory.cuda_memory import CudaKvMemory
from meshfusion.host.memory.torch_digest import TorchDigest
from meshfusion.host.path.load_job import UnitRead
from meshfusion.host.path.rdma import rdma_path
from meshfusion.host.path.shards import ShardWritten
from meshfusion.jbof.digest import KeyTable, load_kernels
from meshfusion.jbof.errors import MediaError, UnsupportedError
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.nvme.memory import RegisteredRegion
from meshfusion.jbof.nvme.registration import DmaBufRange, MemoryRange
from meshfusion.jbof.nvme.sgl import RemoteMemory
from tests.host.support.fake_cuda import STREAM, FakeCuda
from tests.host.support.kv_memory import KvMemory, layer_outermost
from tests.host.support.memory_namespace import NSID, MemoryNamespace
from tests.host.support.shard_writes import reads_of, shard_write
from tests.host.support.waiting import until

MAX_UNITS = 8
FIRST_LBA = 64
MAX_BYTES = 64 << 10


@dataclass
class CudaNamespace(MemoryNamespace):
    """Its RDMA device knows memory by key and IOVA, and reaches the device's through it only."""

    gpu: FakeCuda = field(default_factory=FakeCuda)
    takes_dma_bufs: bool = True
    takes_addresses: bool = True  # of device memory: nvidia-peermem

    def __post_init__(self) -> None:
        super().__post_init__()
        self._bases: dict[int, int] = {}  # of a key: the address of IOVA 0

    def register_address(self, address: int, length_bytes: int, *, writable: bool, owner: object) -> RegisteredRegion:
        if self.gpu.is_device_memory(address) and not self.takes_addresses:
            raise MediaError("Bad address", next_step="none")
        return super().register_address(address, length_bytes, writable=writable, owner=owner)

    def register_dma_buf(self, memory: DmaBufRange, *, writable: bool, owner: object) -> RegisteredRegion:
        if not self.takes_dma_bufs:
            raise UnsupportedError("mlx0 cannot register dma-bufs", next_step="none")
        pages = self.gpu.exported[memory.fd]
        assert memory.offset_bytes + memory.length_bytes <= pages.length_bytes
        return self.new_region(memory, owner)

    def new_region(self, memory: MemoryRange, owner: object) -> RegisteredRegion:
        self._next_key += 1
        key = self._next_key
        base = self.gpu.exported[memory.fd].address if isinstance(memory, DmaBufRange) else 0
        self._bases[key] = base
        address = base + memory.first_iova
        pin = self.gpu.pin(address, memory.length_bytes) if self.gpu.is_device_memory(address) else None
        remote = RemoteMemory(memory.first_iova, memory.length_bytes, key)
        self.regions.append(RegisteredRegion(remote, owner, partial(self._deregister, key, pin)))
        return self.regions[-1]

    def _deregister(self, key: int, pin: int | None) -> None:
        del self._bases[key]
        if pin is not None:
            self.gpu.unpin(pin)

    def rdma_write(self, remote: RemoteMemory, data: bytes) -> None:
        address = self._bases[remote.rkey] + remote.address
        if self.gpu.is_device_memory(address):
            self.gpu.rdma_write(address, data)
        else:
            super().rdma_write(remote._replace(address=address), data)

    def rdma_read(self, remote: RemoteMemory) -> bytes:
        address = self._bases[remote.rkey] + remote.address
        if self.gpu.is_device_memory(address):
            return self.gpu.rdma_read(address, remote.length_bytes)
        return super().rdma_read(remote._replace(address=address))


def device_kv(gpu: FakeCuda, kv: KvMemory, *, lead_bytes: int = 0) -> KvMemory:
    """The same layout in device memory, ``lead_bytes`` into its allocation."""
    array = gpu.allocate(lead_bytes + kv.memory.size)[lead_bytes:]
    return replace(kv, memory=array)


def cuda_memory(gpu: FakeCuda, kv: KvMemory, **options: Any) -> CudaKvMemory:
    return cuda_memory_of(gpu, torch.from_numpy(kv.memory), **options)


def cuda_memory_of(gpu: FakeCuda, memory: torch.Tensor, **options: Any) -> CudaKvMemory:
    """``options``: facts that are told instead of what is so."""
    place = locate(gpu, memory.data_ptr(), memory.numel())
    return CudaKvMemory(
        gpu,
        place,
        replace(learn(gpu, place), **options),
        owner=memory,
        digests=TorchDigest(memory, KeyTable.for_bytes(MAX_BYTES)),
        kernels=load_kernels(MAX_BYTES),
        current_stream=lambda: STREAM,
    )


class CudaRig:
    """``facts``: what the memory is told instead of what is so, to see that the stand-ins notice."""

    def __init__(self, gpu: FakeCuda, *, facts: dict[str, Any] | None = None, **namespace: Any) -> None:
        self.gpu = gpu
        self.kv = device_kv(gpu, layer_outermost(), lead_bytes=516)
        self.namespace = CudaNamespace(4 << 20, 16, gpu=gpu, **namespace)
        self.memory = cuda_memory(gpu, self.kv, **(facts or {}))
        self.path = rdma_path(
            self.namespace,
            {NSID},
            self.memory,
            (self.kv.layout,),
            lba_bytes=LBA_BYTES,
            load_threads=2,
            read_bytes=64 << 10,
            max_units=MAX_UNITS,
        )

    def save(self, block_ids: list[int]) -> ShardWritten:
        self.path.save([shard_write(self.kv.layout.unit_bytes, block_ids, FIRST_LBA)])
        (result,) = until(self.path.take_written, what="for a save")
        return result

    def saved(self, block_ids: list[int]) -> list[UnitRead]:
        digests = self.save(block_ids).unit_digests
        assert digests is not None
        return reads_of(shard_write(self.kv.layout.unit_bytes, block_ids, FIRST_LBA), digests)


@contextlib.contextmanager
def cuda_rig(gpu: FakeCuda | None = None, **options: Any) -> Iterator[CudaRig]:
    made = CudaRig(gpu or FakeCuda(), **options)
    made.kv.fill(3)
    try:
        yield made
    finally:
        assert made.path.close()
        made.memory.close()
    made.gpu.assert_nothing_left()
