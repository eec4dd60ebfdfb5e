"""A block path over its own file and memory, and layouts that it can take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshfusion.host.path.block import block_path
from meshfusion.host.path.data_path import DataPath
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.media.file import create_data_file, open_data_file
from tests.host.support.kv_memory import KvMemory, block_outermost, layer_outermost
from tests.host.support.staged_rig import MAX_UNITS, Rig


class BlockRig(Rig):
    def open_path(self, kernels: DigestKernels, options: dict[str, Any]) -> DataPath:
        return block_path(
            self.file,
            self.kv.memory,
            (self.kv.layout,),
            kernels,
            lba_bytes=LBA_BYTES,
            load_threads=options.pop("load_threads", 2),
            read_bytes=options.pop("read_bytes", 64 << 10),
            max_units=MAX_UNITS,
            **options,
        )


def granule_or_skip(folder: Path) -> int:
    """What runs must be whole multiples of for O_DIRECT on files in ``folder``, in bytes."""
    path = folder / ".granule"
    create_data_file(path, LBA_BYTES)
    with open_data_file(path, writable=False) as data:
        path.unlink()
        if not data.direct or data.alignment is None:
            pytest.skip(f"needs hardware: a filesystem with O_DIRECT for temporary files: {data.direct_reason}")
        return data.alignment.granule_bytes


def layers_of(granule_bytes: int, *, blocks: int = 12, layers: int = 3, page_granules: int = 3) -> KvMemory:
    """As the tests of staging have it, but aligned: a gap behind every page, and one run per layer."""
    return layer_outermost(
        blocks=blocks,
        layers=layers,
        page_bytes=page_granules * granule_bytes,
        gap_bytes=granule_bytes,
        lead_bytes=granule_bytes,
        layer_gap_bytes=2 * granule_bytes,
    )


def blocks_of(granule_bytes: int, *, blocks: int = 12, layers: int = 3, page_granules: int = 3) -> KvMemory:
    """One run per block."""
    return block_outermost(blocks=blocks, layers=layers, page_bytes=page_granules * granule_bytes)


@contextlib.contextmanager
def block_rig(tmp_path: Path, kernels: DigestKernels, kv: KvMemory | None = None, **options: Any) -> Iterator[BlockRig]:
    made = BlockRig(tmp_path / "data", kv or layers_of(granule_or_skip(tmp_path)), kernels, **options)
    made.kv.fill(3)
    try:
        yield made
    finally:
        made.file.may_read.set()
        made.file.may_write.set()
        assert made.path.close()
