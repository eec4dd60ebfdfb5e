"""The staged path between a real file and CUDA memory that is not there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshfusion.host.path.data_path import DataPath
from meshfusion.host.path.staged import staged_path_to
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.format import LBA_BYTES, shard_lba_count
from tests.host.support.cuda_rig import cuda_memory, device_kv
from tests.host.support.fake_cuda import FakeCuda
from tests.host.support.kv_memory import KvMemory, layer_outermost
from tests.host.support.staged_rig import MAX_UNITS, Rig


class CudaStagedRig(Rig):
    def __init__(self, path: Path, gpu: FakeCuda, kv: KvMemory, kernels: DigestKernels, **options: Any) -> None:
        self.gpu = gpu
        self.memory = cuda_memory(gpu, kv)
        super().__init__(path, kv, kernels, **options)

    def open_path(self, kernels: DigestKernels, options: dict[str, Any]) -> DataPath:
        return staged_path_to(
            self.memory,
            self.file,
            (self.kv.layout,),
            lba_bytes=LBA_BYTES,
            load_threads=options.pop("load_threads", 2),
            read_bytes=options.pop("read_bytes", 64 << 10),
            write_bytes=shard_lba_count(self.kv.layout.unit_bytes, MAX_UNITS) * LBA_BYTES,
            **options,
        )

    def address_of(self, block_id: int, run: int = 0) -> int:
        return self.kv.memory.ctypes.data + int(self.kv.layout.run_offsets(block_id)[run])


@contextlib.contextmanager
def cuda_staged_rig(
    tmp_path: Path, kernels: DigestKernels, gpu: FakeCuda | None = None, kv: KvMemory | None = None, **options: Any
) -> Iterator[CudaStagedRig]:
    gpu = gpu or FakeCuda()
    made = CudaStagedRig(
        tmp_path / "data", gpu, device_kv(gpu, kv or layer_outermost(), lead_bytes=516), kernels, **options
    )
    made.kv.fill(3)
    try:
        yield made
    finally:
        made.file.may_read.set()
        made.file.may_write.set()
        gpu.lazy = False
        assert made.path.close()
        made.memory.close()
    gpu.assert_nothing_left()
