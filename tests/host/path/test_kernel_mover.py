"""The mover of the layout self-test: the same kernels as loads and saves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshfusion.host.path.kernel_mover import KernelMover
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.errors import UnsupportedError
from tests.host.support.kv_memory import layer_outermost


def test_the_kernel_mover_moves_what_loads_and_saves_move(kernels: DigestKernels) -> None:
    kv, mover = layer_outermost(), KernelMover(kernels)
    kv.fill(8)
    expected, before = kv.unit(5), kv.memory.copy()
    unit = np.zeros(kv.layout.unit_bytes, dtype=np.uint8)
    mover.gather(kv.memory, kv.layout.run_offsets(5), kv.layout.run_bytes, unit)
    assert unit.tobytes() == expected
    assert np.array_equal(kv.memory, before)
    mover.scatter(kv.memory, kv.layout.run_offsets(6), kv.layout.run_bytes, unit)
    assert kv.unit(6) == expected
    assert kv.untouched_except(before, [6])


class _DisagreeingKernels(DigestKernels):
    def digest_runs(self, *args: Any) -> bytes:
        return b"\0" * 8


def test_kernels_that_disagree_refuse_to_start(kernels: DigestKernels) -> None:
    kv = layer_outermost()
    kv.fill(8)
    mover = KernelMover(_DisagreeingKernels(kernels._keys, kernels._kernels))
    unit = np.zeros(kv.layout.unit_bytes, dtype=np.uint8)
    with pytest.raises(UnsupportedError, match="disagree"):
        mover.gather(kv.memory, kv.layout.run_offsets(5), kv.layout.run_bytes, unit)
    with pytest.raises(UnsupportedError, match="disagree"):
        mover.scatter(kv.memory, kv.layout.run_offsets(5), kv.layout.run_bytes, unit)
