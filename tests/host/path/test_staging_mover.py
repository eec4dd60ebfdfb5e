"""The mover of the layout self-test: the same copies as loads and saves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshfusion.host.memory.host_memory import HostKvMemory
from meshfusion.host.memory.kv_memory import KvMemory as KvMemoryProtocol
from meshfusion.host.path.staging_mover import StagingMover
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.errors import UnsupportedError
from tests.host.support.cuda_rig import cuda_memory, device_kv
from tests.host.support.fake_cuda import FakeCuda
from tests.host.support.kv_memory import KvMemory, layer_outermost


@pytest.fixture(params=["host", "device"])
def place(request: pytest.FixtureRequest, kernels: DigestKernels) -> Any:
    """Memory, and what moves it."""
    if request.param == "host":
        kv = layer_outermost()
        kv.fill(8)
        yield kv, HostKvMemory(kv.memory, kernels), None
        return
    gpu = FakeCuda()
    kv = device_kv(gpu, layer_outermost(), lead_bytes=516)
    kv.fill(8)
    memory = cuda_memory(gpu, kv)
    yield kv, memory, gpu
    memory.close()
    gpu.assert_nothing_left()


def test_it_moves_what_loads_and_saves_move(
    place: tuple[KvMemory, KvMemoryProtocol, FakeCuda | None], kernels: DigestKernels
) -> None:
    kv, memory, gpu = place
    mover = StagingMover(memory, kv.layout.unit_bytes, kernels)
    expected, before = kv.unit(5), kv.memory.copy()
    unit = np.zeros(kv.layout.unit_bytes, dtype=np.uint8)
    mover.gather(kv.layout.run_offsets(5), kv.layout.run_bytes, unit)
    assert unit.tobytes() == expected
    assert np.array_equal(kv.memory, before)
    mover.scatter(kv.layout.run_offsets(6), kv.layout.run_bytes, unit)
    assert kv.unit(6) == expected
    assert kv.untouched_except(before, [6])
    mover.close()
    assert gpu is None or gpu.copy_count == 2 * kv.layout.run_count


def test_it_waits_for_what_the_engine_does_with_the_memory(kernels: DigestKernels) -> None:
    gpu = FakeCuda()
    kv = device_kv(gpu, layer_outermost())
    memory = cuda_memory(gpu, kv)
    mover = StagingMover(memory, kv.layout.unit_bytes, kernels)
    unit = np.zeros(kv.layout.unit_bytes, dtype=np.uint8)
    offsets = kv.layout.run_offsets(5)
    gpu.launch(kv.memory.ctypes.data + int(offsets[0]), b"new")
    mover.gather(offsets, kv.layout.run_bytes, unit)
    assert unit.tobytes()[:3] == b"new"
    gpu.launch(kv.memory.ctypes.data + int(offsets[0]), b"old")
    mover.scatter(offsets, kv.layout.run_bytes, unit)
    assert kv.unit(5)[:3] == b"new"
    mover.close()
    memory.close()


class _OtherKernels(DigestKernels):
    def digest_runs(self, *args: Any) -> bytes:
        return b"\0" * 8


def test_digests_that_are_not_the_host_s_refuse_to_start(kernels: DigestKernels) -> None:
    kv = layer_outermost()
    kv.fill(8)
    other = _OtherKernels(kernels._keys, kernels._kernels)
    mover = StagingMover(HostKvMemory(kv.memory, kernels), kv.layout.unit_bytes, other)
    unit = np.zeros(kv.layout.unit_bytes, dtype=np.uint8)
    for move in (mover.gather, mover.scatter):
        with pytest.raises(UnsupportedError, match="this machine's processors are not those"):
            move(kv.layout.run_offsets(5), kv.layout.run_bytes, unit)
