"""The connector over tensors of torch: on the host everywhere, on a CUDA device where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshfusion.dpu.pool import Pool
from meshfusion.host.connector.vllm.proven_memory import prove_memory
from meshfusion.host.memory.opening import kv_memory_of
from meshfusion.host.path.staged import staged_path_to
from meshfusion.jbof.digest import DigestKernels, load_kernels
from meshfusion.jbof.format import LBA_BYTES, shard_lba_count
from meshfusion.jbof.media.file import DirectMode, create_data_file, open_data_file
from tests.host.kv.conftest import make_engine
from tests.host.support.engine_on_pool import committed, prompt, save_prompt
from tests.host.support.kv_memory import layer_outermost
from tests.host.support.mini_engine import KeepOpen, MiniEngine
from tests.host.support.mini_request import make_request
from tests.host.support.shard_writes import reads_of, shard_write
from tests.host.support.staged_rig import into, wait
from tests.host.support.torch_kv import torch_kv
from tests.host.support.waiting import until

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.device)]
TOKENS = prompt(16 * 8 + 5)


def engine_on(device: str, pool: Pool, kernels: DigestKernels) -> MiniEngine:
    kv = layer_outermost(blocks=64)
    tensor = torch.zeros(kv.memory.size, dtype=torch.uint8, device=device)
    return MiniEngine(KeepOpen(pool), torch_kv(kv, tensor), kernels, memory=kv_memory_of(tensor, kernels))


@pytest.mark.parametrize("device", DEVICES)
def test_what_one_engine_saves_a_fresh_one_loads(pool: Pool, kernels: DigestKernels, device: str) -> None:
    writer = engine_on(device, pool, kernels)
    save_prompt(writer, TOKENS)
    writer.run()
    writer.close()
    committed(pool, 4)
    reader = engine_on(device, pool, kernels)
    reader.kvs[0].fill(9)
    request = reader.add(make_request("reader", TOKENS))
    reader.run()
    assert (request.loaded_tokens, reader.is_right(request)) == (16 * 8, True)
    reader.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_the_layout_is_proven_and_all_is_as_before(device: str, layout: str) -> None:
    made = make_engine(layout)
    raw = made.raw.to(device)
    caches: dict[str, Any] = {
        name: torch.empty(0, dtype=view.dtype, device=device).set_(
            raw.untyped_storage(), view.storage_offset(), view.shape, view.stride()
        )
        for name, view in made.caches.items()
    }
    proven = prove_memory(made.config, caches, None)
    assert proven.reports[0].blocks
    assert bool(proven.memory.place.device) == (device == "cuda")
    assert torch.equal(raw.cpu(), made.raw)
    proven.memory.close()


@pytest.mark.parametrize("device", DEVICES)
def test_units_of_megabytes_come_back_bit_exact_beside_the_engine_s_work(tmp_path: Path, device: str) -> None:
    kv = layer_outermost(blocks=24, layers=5, page_bytes=200_004)
    kernels = load_kernels(kv.layout.unit_bytes)
    tensor = torch.zeros(kv.memory.size, dtype=torch.uint8, device=device)
    memory = kv_memory_of(tensor, kernels)
    kv = torch_kv(kv, tensor)
    kv.fill(3)
    create_data_file(tmp_path / "data", 32 << 20)
    path = staged_path_to(
        memory,
        open_data_file(tmp_path / "data", writable=True, direct=DirectMode.AUTO),
        (kv.layout,),
        lba_bytes=LBA_BYTES,
        load_threads=3,
        read_bytes=6 << 20,
        write_bytes=shard_lba_count(kv.layout.unit_bytes, 8) * LBA_BYTES,
    )
    sources, targets = list(range(8)), list(range(8, 16))
    expected = [kv.unit(block) for block in sources]
    write = shard_write(kv.layout.unit_bytes, sources, 256)
    path.save([write])
    (result,) = until(path.take_written, what="for a save")
    assert result.unit_digests is not None, result.reason
    for block in targets:
        kv.memory[kv.byte_places[block]] = kv.memory[kv.byte_places[0]]  # the engine's work with the blocks, before
    reads = reads_of(write, result.unit_digests)
    assert wait(path.load(into(reads, targets), abandon_after_s=30), 30.0).failures == ()
    assert [kv.unit(block) for block in targets] == expected
    assert path.close()
    memory.close()
