"""Moves units with the very kernels that loads and saves use, for the start-up self-test (rule 6)."""

from __future__ import annotations

from meshfusion.host.kv.group_layout import I64
from meshfusion.host.kv.layout import U8
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.errors import UnsupportedError


class KernelMover:
    """A ``RunMover`` over :class:`DigestKernels`; checks that both directions agree on the digest."""

    def __init__(self, kernels: DigestKernels) -> None:
        self._kernels = kernels

    def gather(self, memory: U8, offsets: I64, run_bytes: int, unit: U8) -> None:
        self._check(memory, offsets, run_bytes, self._kernels.gather_and_digest(memory, offsets, run_bytes, unit, 0))

    def scatter(self, memory: U8, offsets: I64, run_bytes: int, unit: U8) -> None:
        self._check(memory, offsets, run_bytes, self._kernels.scatter_and_digest(unit, 0, memory, offsets, run_bytes))

    def _check(self, memory: U8, offsets: I64, run_bytes: int, digest: bytes) -> None:
        if self._kernels.digest_runs(memory, offsets, run_bytes) != digest:
            raise UnsupportedError(
                "the digest kernels disagree about the same bytes on this machine",
                next_step="report the CPU model and the numba version; start without the connector meanwhile",
            )
