"""Whatever the layout: the block path and the staged path write the same medium and fill the same memory."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfusion.host.path.load_job import UnitRead
from meshfusion.jbof.digest import DigestKernels
from tests.host.support.block_rig import BlockRig, granule_or_skip
from tests.host.support.kv_memory import KvMemory, block_outermost, layer_outermost
from tests.host.support.staged_rig import MAX_UNITS, Rig, into, wait

BLOCKS = 16
MAX_UNIT_BYTES = 64 << 10  # what the kernels have keys for


@dataclass(frozen=True, slots=True)
class Case:
    """``chunks``: the blocks that each is saved from; ``order``: in which their units are loaded, into ``targets``."""

    layers: int
    page_granules: int
    gap_granules: int  # None of it: one run a block
    is_block_outermost: bool
    chunks: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    targets: tuple[int, ...]
    read_kib: int

    def kv(self, granule_bytes: int) -> KvMemory:
        most_bytes = MAX_UNIT_BYTES // self.layers // granule_bytes * granule_bytes
        page_bytes = min(self.page_granules * granule_bytes, most_bytes)
        if self.is_block_outermost:
            return block_outermost(blocks=BLOCKS, layers=self.layers, page_bytes=page_bytes)
        return layer_outermost(
            blocks=BLOCKS,
            layers=self.layers,
            page_bytes=page_bytes,
            gap_bytes=self.gap_granules * granule_bytes,
            lead_bytes=self.gap_granules * granule_bytes,
            layer_gap_bytes=self.layers * granule_bytes,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    chunks = draw(
        st.lists(
            st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=MAX_UNITS, unique=True), min_size=1, max_size=4
        )
    )
    units = min(sum(map(len, chunks)), BLOCKS)
    order = draw(st.one_of(st.just(list(range(units))), st.permutations(range(units))))
    return Case(
        layers=draw(st.integers(1, 5)),
        page_granules=draw(st.integers(1, 20)),
        gap_granules=draw(st.integers(0, 3)),
        is_block_outermost=draw(st.booleans()),
        chunks=tuple(map(tuple, chunks)),
        order=tuple(order),
        targets=tuple(draw(st.permutations(range(BLOCKS)))[:units]),
        read_kib=draw(st.sampled_from([4, 16, 64, 512])),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("like-staged")


@pytest.fixture(scope="module")
def granule(folder: Path) -> int:
    return granule_or_skip(folder)


def save(rig: Rig, chunks: tuple[tuple[int, ...], ...]) -> list[UnitRead]:
    writes = [rig.shard_write(number, list(chunk)) for number, chunk in enumerate(chunks)]
    rig.path.save(writes)
    results = rig.written(len(writes))
    reads: list[UnitRead] = []
    for number, write in enumerate(writes):
        digests = results[number].unit_digests
        assert digests is not None, results[number].reason
        reads += rig.reads(write, digests)
    return reads


@settings(deadline=None, max_examples=40)
@given(case=cases())
def test_the_same_medium_and_the_same_memory(kernels: DigestKernels, folder: Path, granule: int, case: Case) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        rigs = [
            kind(Path(place) / kind.__name__, case.kv(granule), kernels, read_bytes=case.read_kib << 10)
            for kind in (Rig, BlockRig)
        ]
        try:
            for rig in rigs:
                rig.kv.fill(7)
            staged, block = (save(rig, case.chunks) for rig in rigs)
            expected = [rigs[0].kv.unit(read.block_id) for read in staged]
            assert staged == block, "places and digests"
            assert rigs[0].file.path.read_bytes() == rigs[1].file.path.read_bytes()
            for rig in rigs:
                rig.kv.fill(8)
                before = rig.kv.memory.copy()
                reads = into([staged[i] for i in case.order], list(case.targets))
                assert wait(rig.path.load(reads, abandon_after_s=30)).failures == ()
                assert [rig.kv.unit(b) for b in case.targets] == [expected[i] for i in case.order]
                assert rig.kv.untouched_except(before, list(case.targets))
            assert np.array_equal(rigs[0].kv.memory, rigs[1].kv.memory)
        finally:
            assert all([rig.path.close() for rig in rigs])
