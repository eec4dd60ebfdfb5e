"""Moves units with the very copies that loads and saves use, for the start-up self-test (rule 6)."""

from __future__ import annotations

import mmap
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshfusion.host.kv.group_layout import I64
from meshfusion.host.memory.kv_memory import KvMemory
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.errors import UnsupportedError

U8 = NDArray[np.uint8]

_WAIT_S: Final = 30.0


class StagingMover:
    """A :class:`~meshfusion.host.kv.selftest.RunMover` over a staging of ``memory``, for units of ``unit_bytes``.

    Checks that the digests computed where the memory lies are those of the host, in both directions: chunks are read by
    others than who wrote them.
    """

    def __init__(self, memory: KvMemory, unit_bytes: int, kernels: DigestKernels) -> None:
        self._memory = memory
        self._kernels = kernels
        self._staging = memory.staging(-(-unit_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)

    def gather(self, offsets: I64, run_bytes: int, unit: U8) -> None:
        self._memory.produced().wait(_WAIT_S)
        (digest,) = self._staging.save(0, unit.size, offsets[None, :], run_bytes)
        unit[:] = self._staging.buffer.array[: unit.size]
        self._check(unit, digest)

    def scatter(self, offsets: I64, run_bytes: int, unit: U8) -> None:
        self._memory.produced().wait(_WAIT_S)
        self._staging.buffer.array[: unit.size] = unit
        self._staging.begin_load(unit.size, offsets[None, :], run_bytes)
        (digest,) = self._staging.end_load()
        self._check(unit, digest)

    def _check(self, unit: U8, digest: bytes) -> None:
        if self._kernels.digest_runs(unit, [0], unit.size) != digest:
            where = self._memory.place.device or "this machine's processors"
            raise UnsupportedError(
                f"digests computed on {where} are not those of the bytes that were moved",
                next_step="report the device or CPU model and the numba and torch versions; start without the "
                "connector meanwhile",
            )

    def close(self) -> None:
        self._staging.close()
