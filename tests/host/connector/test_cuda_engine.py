"""The connector's two halves over CUDA memory that is not there: saved by one engine, loaded by a fresh one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from meshfusion.dpu.pool import Pool
from meshfusion.host.connector.vllm.proven_memory import check_path, prove_memory
from meshfusion.host.memory.cuda_memory import CudaProduced
from meshfusion.host.memory.cuda_staging import CudaStaging
from meshfusion.host.memory.kv_memory import KvMemory as KvMemoryProtocol
from meshfusion.host.memory.kv_memory import MemoryPlace
from meshfusion.host.path.path_kind import PathKind
from meshfusion.host.path.probe import KvTarget
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.errors import UnsupportedError
from tests.host.kv.conftest import make_engine
from tests.host.support.cuda_rig import cuda_memory, cuda_memory_of, device_kv
from tests.host.support.engine_on_pool import committed, prompt, save_prompt
from tests.host.support.fake_cuda import FakeCuda
from tests.host.support.kv_memory import layer_outermost
from tests.host.support.mini_engine import KeepOpen, MiniEngine
from tests.host.support.mini_request import make_request

EngineOnDevice = Callable[..., AbstractContextManager[tuple[MiniEngine, FakeCuda]]]
TOKENS = prompt(16 * 8 + 5)


@pytest.fixture
def on_device(pool: Pool, kernels: DigestKernels) -> EngineOnDevice:
    @contextmanager
    def start(**config: Any) -> Iterator[tuple[MiniEngine, FakeCuda]]:
        gpu = FakeCuda()
        kv = device_kv(gpu, layer_outermost(blocks=64), lead_bytes=516)
        engine = MiniEngine(KeepOpen(pool), kv, kernels, memory=cuda_memory(gpu, kv), **config)
        try:
            yield engine, gpu
        finally:
            engine.close()
        gpu.assert_nothing_left()

    return start


def test_what_one_engine_saves_a_fresh_one_loads(pool: Pool, on_device: EngineOnDevice) -> None:
    with on_device() as (writer, gpu):
        save_prompt(writer, TOKENS)
        writer.run()
        assert gpu.copy_count > 0
    committed(pool, 4)
    with on_device() as (reader, gpu):
        reader.kvs[0].fill(9)
        request = reader.add(make_request("reader", TOKENS))
        reader.run()
        assert request.loaded_tokens == 16 * 8
        assert reader.is_right(request)
        assert gpu.copy_count > 0


def test_host_and_device_read_each_other_s_chunks(pool: Pool, on_device: EngineOnDevice, start: Any) -> None:
    with on_device() as (writer, _):
        save_prompt(writer, TOKENS)
        writer.run()
    committed(pool, 4)
    reader = start()
    request = reader.add(make_request("reader", TOKENS))
    reader.run()
    assert (request.loaded_tokens, reader.is_right(request)) == (16 * 8, True)


def test_an_engine_whose_copies_are_not_waited_for_recomputes(
    pool: Pool, on_device: EngineOnDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant: digests are computed before the copies have ended. Nothing wrong is served."""
    with on_device() as (writer, _):
        save_prompt(writer, TOKENS)
        writer.run()
    committed(pool, 4)
    with on_device() as (reader, gpu):
        reader.kvs[0].fill(9)
        gpu.lazy = True
        monkeypatch.setattr(CudaStaging, "_wait", lambda _: None)
        monkeypatch.setattr(CudaProduced, "wait", lambda *_: None)
        request = reader.add(make_request("reader", TOKENS))
        reader.step_until(lambda: request.stage not in ("waiting", "loading"))
        assert request.loaded_tokens == 0
        gpu.run_copies()
        gpu.lazy = False
        monkeypatch.undo()
        reader.run()


def test_block_on_a_device_is_refused_with_its_reason(on_device: EngineOnDevice, pool: Pool) -> None:
    with on_device(path="block") as (engine, _):
        request = engine.add(make_request("writer", TOKENS))
        engine.run()
        assert engine.is_right(request)
        assert engine.side.counters["chunks_committed"] == 0
    place = MemoryPlace(0x10000, 1 << 20, "cuda:0")
    with pytest.raises(UnsupportedError, match=r"block path is asked for .* lies on cuda:0") as caught:
        check_path(PathKind.BLOCK, KvTarget(place, (layer_outermost().layout,)))
    assert "staged" in caught.value.next_step


# ---- the proof at start ----------------------------------------------------------------------------------------------


class EngineOnGpu:
    """Tensors of real vLLM classes in device memory."""

    def __init__(self, **options: Any) -> None:
        made = make_engine(**options)
        self.gpu = FakeCuda()
        array = self.gpu.allocate(made.raw.numel())
        raw = torch.from_numpy(array).view(torch.int8)
        raw.copy_(made.raw)
        self.config, self.bytes = made.config, array
        self.caches = {name: _moved(view, raw) for name, view in made.caches.items()}

    def memory_of(self, memory: torch.Tensor, kernels: DigestKernels) -> KvMemoryProtocol:
        return cuda_memory_of(self.gpu, memory)


def _moved(view: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    """The same view of other memory."""
    storage = raw.untyped_storage()
    offset, shape, strides = view.storage_offset(), view.shape, view.stride()
    return torch.empty(0, dtype=view.dtype).set_(storage, offset, shape, strides)


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_the_layout_is_proven_through_the_device_s_copies_and_all_is_as_before(layout: str) -> None:
    engine = EngineOnGpu(layout=layout)
    before = engine.bytes.copy()
    proven = prove_memory(engine.config, engine.caches, None, memory_of=engine.memory_of)
    assert proven.reports[0].blocks
    assert proven.layouts[0].memory_bytes == engine.bytes.nbytes
    assert proven.memory.place.device == "cuda:3"
    assert engine.gpu.copy_count > 0
    assert (engine.bytes == before).all()
    proven.memory.close()
    engine.gpu.assert_nothing_left()


def test_copies_that_go_elsewhere_refuse_to_start_and_all_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineOnGpu()
    before = engine.bytes.copy()
    begin, end = engine.gpu.copy_to_device, engine.bytes.ctypes.data + engine.bytes.nbytes

    def elsewhere(to: int, source: int, length_bytes: int, stream: int) -> None:
        begin(min(to + 64, end - length_bytes), source, length_bytes, stream)

    monkeypatch.setattr(engine.gpu, "copy_to_device", elsewhere)
    with pytest.raises(UnsupportedError):
        prove_memory(engine.config, engine.caches, None, memory_of=engine.memory_of)
    engine.gpu.assert_nothing_left()
    assert (engine.bytes == before).all()
