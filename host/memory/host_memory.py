"""KV memory that the host's processors share: nothing to wait for, and digests by the compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from meshfusion.host.kv.group_layout import GroupLayout
from meshfusion.host.memory.kv_memory import Produced, Registrar
from meshfusion.jbof.digest import DigestKernels
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
        self._memory = memory
        self._kernels = kernels

    def register(self, registrar: Registrar) -> RegisteredRegion:
        return registrar.register_address(
            self._memory.ctypes.data, self._memory.nbytes, writable=True, owner=self._memory
        )

    def produced(self) -> Produced:
        return ALREADY_PRODUCED

    def arrived(self) -> None: ...

    def digests(self, layout: GroupLayout, block_ids: Sequence[int]) -> list[bytes]:
        return [
            self._kernels.digest_runs(self._memory, layout.run_offsets(block_id), layout.run_bytes)
            for block_id in block_ids
        ]

    def close(self) -> None:
        """Regions keep the memory themselves."""
