"""One rank's part of a save order, and what the scheduler's half makes of the reports of all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfusion.dpu.api.types import Extent
from meshfusion.host.connector.vllm.messages import RunWritten, SaveOrder
from meshfusion.host.connector.vllm.run_writes import RunWrites
from meshfusion.host.connector.vllm.save_pipeline import withheld_of
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.kv.resume import GroupPlan, LastWindow, WholePrefix
from meshfusion.host.path.shards import ShardWritten, WriteFate
from meshfusion.host.pool_events import ALONE, GrantedRun

PLANS = (GroupPlan(0, WholePrefix(), 16, 32), GroupPlan(1, LastWindow(17), 16, 32))
FORM = ChunkForm(PLANS, (100, 60), 4, (1, 2))
POOL = b"p" * 16
DRIVE = 1 << 40
GROUPS, INDEXES = (1, 0, 1), (4, 5, 5)
EXTENTS = tuple(
    (3, lba // 10, lba, 9, 7) for lba in range(0, 80, 10)
)  # 2 of the first, 4 of the second, 2 of the third
GRANTED = GrantedRun(
    "h", 1, b"i" * 32, (0, 2, 3), (b"a" * 32, b"b" * 32, b"c" * 32), ("g1", "g2", "g3"), EXTENTS, (5, 6, 6)
)
ORDER = SaveOrder(7, GROUPS, INDEXES, ((9,), (1, 2), (8,)), GRANTED)
PLACES = {0: {0: 0, 1: 20, 2: 60}, 1: {1: 30}, 2: {0: 10, 1: 40, 2: 70}, 3: {1: 50}}
"""Where each rank writes of which granted chunk, counted by hand."""
FIRST_LBAS = (2 * DRIVE, 2 * DRIVE + 20, 2 * DRIVE + 60)
"""Where the first shard of each granted chunk goes, as a pool LBA of drive 2."""


def written(number: int, *, fate: WriteFate = WriteFate.DURABLE, reason: str = "") -> ShardWritten:
    digests = (bytes([number]) * 8,) if fate is WriteFate.DURABLE else None
    return ShardWritten((7, number), digests, reason, fate, descriptors=number + 1)


@pytest.mark.parametrize("rank", PLACES)
def test_each_rank_writes_its_shards_where_they_are_granted(rank: int) -> None:
    writes = RunWrites(ORDER, FORM, rank).shard_writes(POOL)
    assert {write.save_id[1]: write.extent.lba for write in writes} == PLACES[rank]
    for write in writes:
        number, header = write.save_id[1], write.header
        assert write.save_id[0] == 7
        assert write.extent == Extent(3, write.extent.lba // 10, write.extent.lba, 9, 7)
        assert (header.rank, header.group, header.key) == (rank, GROUPS[number], GRANTED.keys[number])
        assert (header.position_tokens, header.token_count) == (INDEXES[number] * 32, 32)
        assert (header.unit_bytes, write.block_ids) == ((100, 60)[GROUPS[number]], ORDER.block_ids[number])
        assert (header.segment, header.generation, header.lba) == (write.extent.segment, 7, write.extent.lba)
        assert (header.first_lba, header.first_generation) == (FIRST_LBAS[number], 7), "all ranks name the same"


def test_a_chunk_of_one_shard_names_no_write() -> None:
    form = ChunkForm(PLANS[:1], (100,))
    granted = GrantedRun("h", 1, b"i" * 32, (0,), (b"a" * 32,), ("g1",), EXTENTS[:1], (5,))
    (write,) = RunWrites(SaveOrder(7, (0,), (0,), ((1, 2),), granted), form, 0).shard_writes(POOL)
    assert (write.header.shard_count, write.header.first_lba, write.header.first_generation) == (1, 0, 0)


def test_a_report_comes_once_with_what_this_rank_wrote() -> None:
    run = RunWrites(ORDER, FORM, 2)
    assert run.written(written(2), "staged") is None
    assert run.written(written(0), "staged") is None
    report = run.written(written(1, fate=WriteFate.UNKNOWN, reason="no answer"), "staged")
    assert report == RunWritten(7, ((b"\0" * 8,), None, (b"\2" * 8,)), "no answer", (1,), "staged", 3 + 1 + 2, 2)
    with pytest.raises(AssertionError, match="twice"):
        run.written(written(0), "staged")


def test_what_others_write_is_not_reported_as_failed() -> None:
    run = RunWrites(ORDER, FORM, 3)
    failed = run.written(written(1, fate=WriteFate.FAILED, reason="full"), "staged")
    assert failed == RunWritten(7, ((), None, ()), "full", (), "staged", 2, 3)
    assert RunWrites(ORDER, FORM, 1).not_begun("no pool") == RunWritten(7, ((), None, ()), "no pool", rank=1)


def test_a_rank_with_nothing_to_write() -> None:
    form = ChunkForm(PLANS[:1], (100,), 2, (2,))
    order = SaveOrder(7, (0,), (0,), ((1, 2),), GRANTED._replace(indexes=(0,), extents=EXTENTS[:1]))
    run = RunWrites(order, form, 1)
    assert run.is_empty
    assert run.not_begun() == RunWritten(7, ((),), rank=1)
    assert not RunWrites(order, form, 0).is_empty


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(ALONE, 3), st.lists(st.sampled_from([None, (), (b"d" * 8,)]), min_size=3, max_size=3)),
        max_size=8,
    )
)
def test_a_chunk_is_visible_with_all_shards_of_its_whole_bundle_or_not_at_all(
    chunks: list[tuple[int, list[tuple[bytes, ...] | None]]],
) -> None:
    bundles = [bundle for bundle, _ in chunks]
    columns = [tuple(ranks[rank] for _, ranks in chunks) for rank in range(3)]
    withheld = withheld_of(bundles, columns)
    for i, (bundle, ranks) in enumerate(chunks):
        together = [other for b, other in chunks if b == bundle] if bundle else [ranks]
        assert (i in withheld) == any(None in other for other in together)
