"""The engine's KV tensors as memory for paths, chosen by where they lie."""

from __future__ import annotations

import torch

from meshfusion.host.memory.cuda_driver import CudaDriver
from meshfusion.host.memory.cuda_facts import CudaFacts, learn, locate
from meshfusion.host.memory.cuda_memory import CudaKvMemory
from meshfusion.host.memory.host_memory import HostKvMemory
from meshfusion.host.memory.kv_memory import KvMemory
from meshfusion.host.memory.libcuda import load_cuda
from meshfusion.host.memory.torch_digest import TorchDigest
from meshfusion.jbof.digest import DigestKernels, KeyTable
from meshfusion.jbof.errors import UnsupportedError


def kv_memory_of(memory: torch.Tensor, kernels: DigestKernels) -> KvMemory:
    """``memory``: uint8[bytes], all of the allocation that a layout's offsets count in. ``kernels``: with keys for the
    longest unit.

    Raises :class:`~meshfusion.jbof.errors.UnsupportedError` for devices that are not served or not known to be right.
    """
    if memory.device.type == "cpu":
        return HostKvMemory(memory.numpy(), kernels)
    if memory.device.type == "cuda" and torch.version.cuda is not None:  # ROCm's devices have the same name
        return cuda_kv_memory(memory, kernels, load_cuda())
    raise UnsupportedError(
        f"KV memory on {memory.device} is not served by this version",
        next_step="Run the engine on CUDA devices or on CPUs, or start it without this connector.",
    )


def cuda_kv_memory(memory: torch.Tensor, kernels: DigestKernels, driver: CudaDriver) -> CudaKvMemory:
    """``memory`` as in :func:`kv_memory_of`, on a CUDA device. It is kept allocated until the answer is closed."""
    device = memory.device
    place = locate(driver, memory.data_ptr(), memory.numel())
    facts: CudaFacts | UnsupportedError
    try:
        facts = learn(driver, place)
    except UnsupportedError as error:  # of RDMA only: such memory can be staged
        facts = error
    return CudaKvMemory(
        driver,
        place,
        facts,
        owner=memory,
        digests=TorchDigest(memory, KeyTable.for_bytes(kernels.max_bytes)),
        kernels=kernels,
        current_stream=lambda: int(torch.cuda.current_stream(device).cuda_stream),
    )
