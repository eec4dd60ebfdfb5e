"""The paths over files and block devices, as values that a test is given: what holds of one holds of the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshfusion.jbof.digest import DigestKernels
from tests.host.support.block_rig import BlockRig, blocks_of, granule_or_skip, layers_of
from tests.host.support.kv_memory import KvMemory, block_outermost, layer_outermost
from tests.host.support.staged_rig import Rig

LARGE_UNIT_BYTES = 64 << 10  # what the kernels of these tests have keys for


@dataclass(frozen=True, slots=True)
class LocalPath:
    """``layers``, ``blocks``: layouts that it can take, of one run per layer and of one per block; given how many
    blocks there are. ``large``: units of :data:`LARGE_UNIT_BYTES` or little less, one run each. ``any_of``: of a size
    that is drawn."""

    name: str
    rig_type: type[Rig]
    layers: Callable[..., KvMemory]
    blocks: Callable[..., KvMemory]
    large: Callable[[int], KvMemory]
    any_of: Callable[[np.random.Generator, int, bool], KvMemory]

    def made(self, folder: Path, kernels: DigestKernels, kv: KvMemory | None = None, **options: Any) -> Rig:
        """The caller closes its path."""
        return self.rig_type(folder / "data", kv or self.layers(), kernels, **options)

    @contextlib.contextmanager
    def rig(self, folder: Path, kernels: DigestKernels, kv: KvMemory | None = None, **options: Any) -> Iterator[Rig]:
        made = self.made(folder, kernels, kv, **options)
        made.kv.fill(3)
        try:
            yield made
        finally:
            made.file.may_read.set()
            made.file.may_write.set()
            assert made.path.close()


def staged() -> LocalPath:
    """It takes runs of any length, at any address."""

    def any_of(rng: np.random.Generator, blocks: int, is_block_outermost: bool) -> KvMemory:
        make = block_outermost if is_block_outermost else layer_outermost
        return make(blocks=blocks, layers=int(rng.integers(1, 5)), page_bytes=4 * int(rng.integers(10, 2500)))

    return LocalPath(
        "staged",
        Rig,
        layer_outermost,
        block_outermost,
        lambda blocks: block_outermost(blocks=blocks, layers=4, page_bytes=16_000),
        any_of,
    )


def block(folder: Path) -> LocalPath:
    """Skips the test where files in ``folder`` have no O_DIRECT."""
    granule = granule_or_skip(folder)

    def any_of(rng: np.random.Generator, blocks: int, is_block_outermost: bool) -> KvMemory:
        make = blocks_of if is_block_outermost else layers_of
        page_granules = int(rng.integers(1, 1 + (16 << 10) // granule))
        return make(granule, blocks=blocks, layers=int(rng.integers(1, 5)), page_granules=page_granules)

    return LocalPath(
        "block",
        BlockRig,
        lambda **options: layers_of(granule, **options),
        lambda **options: blocks_of(granule, **options),
        lambda blocks: blocks_of(granule, blocks=blocks, layers=1, page_granules=LARGE_UNIT_BYTES // granule),
        any_of,
    )
