"""KV memory that the host's processors share: nothing to wait for, and digests by the compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from meshfusion.host.kv.group_layout import I64, GroupLayout
from meshfusion.host.memory.kv_memory import MemoryPlace, Produced, Registrar
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.nvme.memory import RegisteredRegion

Memory = np.ndarray[tuple[int], np.dtype[np.uint8]]


class AlreadyProduced:
    """Keeps :class:`~meshfusion.host.memory.kv_memory.Produced`: a processor's work is done when its thread says so."""

    def wait(self, timeout_s: float) -> None: ...


ALREADY_PRODUCED: Final = AlreadyProduced()


class HostKvMemory:
    """Keeps :class:`~meshfusion.host.memory.kv_memory.KvMemory`. ``memory``: uint8[bytes], the whole allocation.

    RDMA devices write it through the processors' caches, so a completion means that the bytes are there.
    """

    def __init__(self, memory: Memory, kernels: DigestKernels) -> None:
        self.array = memory
        self.kernels = kernels

    @property
    def place(self) -> MemoryPlace:
        return MemoryPlace(self.array.ctypes.data, self.array.nbytes)

    @property
    def load_depth(self) -> int:
        return 1

    def staging(self, size_bytes: int) -> HostStaging:
        return HostStaging(self, size_bytes)

    def register(self, registrar: Registrar) -> RegisteredRegion:
        return registrar.register_address(self.array.ctypes.data, self.array.nbytes, writable=True, owner=self.array)

    def produced(self) -> Produced:
        return ALREADY_PRODUCED

    def arrived(self) -> None: ...

    def digests(self, layout: GroupLayout, block_ids: Sequence[int]) -> list[bytes]:
        return [
            self.kernels.digest_runs(self.array, layout.run_offsets(block_id), layout.run_bytes)
            for block_id in block_ids
        ]

    def close(self) -> None:
        """Regions and stagings keep the memory themselves."""


class HostStaging:
    """Keeps :class:`~meshfusion.host.memory.kv_memory.Staging`: a copy has ended when it has begun.

    Many units are copied and digested in one pass without the GIL: a thread that needs the GIL after every unit waits
    for it every time, milliseconds while the engine's own thread is busy in Python.
    """

    def __init__(self, memory: HostKvMemory, size_bytes: int) -> None:
        self.buffer = AlignedBuffer(size_bytes, huge_pages=True)
        self._memory = memory
        self._digests: list[bytes] | None = None

    def begin_load(self, stride_bytes: int, run_offsets: I64, run_bytes: int) -> None:
        memory = self._memory
        self._digests = memory.kernels.scatter_and_digest_units(
            self.buffer.array, 0, stride_bytes, memory.array, run_offsets, run_bytes
        )

    def end_load(self) -> list[bytes]:
        digests, self._digests = self._digests, None
        assert digests is not None, "no load was begun"
        return digests

    def save(self, offset_bytes: int, stride_bytes: int, run_offsets: I64, run_bytes: int) -> list[bytes]:
        memory, staging = self._memory, self.buffer.array
        return [
            memory.kernels.gather_and_digest(memory.array, runs, run_bytes, staging, offset_bytes + i * stride_bytes)
            for i, runs in enumerate(run_offsets)
        ]

    def close(self) -> None:
        self.buffer.close()
