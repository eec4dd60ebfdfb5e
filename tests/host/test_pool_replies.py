"""Answers for engines with several KV groups: what is promised is what was asked for, block by block, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfusion.dpu.api import types as api
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.kv.resume import GroupPlan, LastWindow, LocalChunk, StateAtBoundary, WholePrefix
from meshfusion.host.pool_events import ALONE, NOTHING_STORED, ReserveWish
from meshfusion.host.pool_replies import is_reserve_reply_sound, reserve_items, reserved, stored_boundary

IDENTITY = b"\x11" * 32
UNIT_LBAS = 3
RULES = st.one_of(
    st.just(WholePrefix()),
    st.builds(LastWindow, st.integers(1, 150)),
    st.builds(LocalChunk, st.sampled_from([16, 48, 64, 160])),
    st.just(StateAtBoundary()),
)
RANKS = 4
FORMS = st.lists(
    st.tuples(RULES, st.sampled_from([8, 16, 32]), st.sampled_from([1, 2, 4])), min_size=1, max_size=4
).map(
    lambda groups: ChunkForm(
        tuple(GroupPlan(i, rule, block, 64) for i, (rule, block, _) in enumerate(groups)),
        tuple(100 + i for i in range(len(groups))),
        RANKS,
        tuple(per_shard for _, _, per_shard in groups),
    )
)


def key(group: int, index: int) -> bytes:
    return group.to_bytes(16, "big") + index.to_bytes(16, "big")


def lba(group: int, index: int, rank: int = 0) -> int:
    return 100_000 * rank + 10_000 * group + 100 * index


def record(form: ChunkForm, group: int, index: int) -> api.ChunkRecord:
    """One shard for each set of ranks that hold the same, named by the first of them."""
    per_shard = form.ranks_per_shard[group] if form.ranks_per_shard else 1
    shards = tuple(shard(form, group, index, rank) for rank in range(0, form.rank_count, per_shard))
    return api.ChunkRecord(key(group, index), IDENTITY, "default", group, index * 64, 64, shards)


def shard(form: ChunkForm, group: int, index: int, rank: int) -> api.Shard:
    """Two blocks of header, then the units, whose digests name rank, group and block."""
    kept = form.plans[group].kept_blocks(index)
    extent = api.Extent(1, group, lba(group, index, rank), 2 + len(kept) * UNIT_LBAS, 7)
    digests = tuple(bytes([rank, group]) + block.to_bytes(6, "big") for block in kept)
    return api.Shard(rank, extent, 2, UNIT_LBAS, form.unit_bytes[group], digests)


def asked(form: ChunkForm, count: int) -> tuple[api.GroupKeys, ...]:
    return tuple(
        api.GroupKeys(
            plan.group,
            tuple(key(plan.group, i) if plan.kept_blocks(i) else b"" for i in range(count)),
            tuple(plan.first_needed_chunk(i + 1) for i in range(count)),
        )
        for plan in form.plans
    )


def right_reply(form: ChunkForm, boundary: int) -> api.MatchReply:
    chunks = [
        record(form, plan.group, index)
        for plan in form.plans
        for index in range(plan.first_needed_chunk(boundary), boundary)
    ]
    return api.MatchReply("L", boundary, tuple(chunks))


@settings(deadline=None)
@given(FORMS, st.integers(1, 6), st.integers(0, 3))
def test_every_needed_block_lies_where_its_chunk_says(form: ChunkForm, boundary: int, more: int) -> None:
    stored = stored_boundary(right_reply(form, boundary), asked(form, boundary + more), IDENTITY, form)
    assert stored.chunk_count == boundary
    for plan, group in zip(form.plans, stored.groups, strict=True):
        needed = plan.needed_blocks(boundary)
        assert group.first_block == needed.start
        ranks = range(0, RANKS, form.ranks_per_shard[plan.group])
        for rank, lbas, digests in zip(ranks, group.unit_lbas, group.unit_digests, strict=True):
            assert len(lbas) == len(digests) == len(needed)
            for i, block in enumerate(needed):
                index = block * plan.block_tokens // 64
                number = block - plan.kept_blocks(index).start
                assert lbas[i] == lba(plan.group, index, rank) + 2 + number * UNIT_LBAS
                assert digests[i] == bytes([rank, plan.group]) + block.to_bytes(6, "big")
        for block in needed:
            index = block * plan.block_tokens // 64
            assert group.keys[index - group.first_chunk] == key(plan.group, index)
            assert group.extents[index - group.first_chunk].lba == lba(plan.group, index)


FORM = ChunkForm((GroupPlan(0, WholePrefix(), 16, 64), GroupPlan(1, LastWindow(100), 32, 64)), (4096, 512))
GOOD = right_reply(FORM, 3)
TWO_RANKS = replace(FORM, rank_count=2)
LIES: dict[str, Callable[[api.ChunkRecord], api.ChunkRecord]] = {
    "key": lambda chunk: replace(chunk, key=b"k" * 32),
    "identity": lambda chunk: replace(chunk, identity=b"i" * 32),
    "group": lambda chunk: replace(chunk, group=1 - chunk.group),
    "position": lambda chunk: replace(chunk, position_tokens=chunk.position_tokens + 64),
    "tokens": lambda chunk: replace(chunk, token_count=32),
    "no shard": lambda chunk: replace(chunk, shards=()),
    "rank": lambda chunk: replace(chunk, shards=(replace(chunk.shards[0], rank=1),)),
    "unit size": lambda chunk: replace(chunk, shards=(replace(chunk.shards[0], unit_bytes=1),)),
    "unit count": lambda chunk: replace(
        chunk, shards=(replace(chunk.shards[0], unit_digests=chunk.shards[0].unit_digests[1:]),)
    ),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("at", range(len(GOOD.chunks)))
def test_one_wrong_chunk_and_nothing_is_believed(lie: str, at: int) -> None:
    chunks = list(GOOD.chunks)
    chunks[at] = LIES[lie](chunks[at])
    assert stored_boundary(replace(GOOD, chunks=tuple(chunks)), asked(FORM, 4), IDENTITY, FORM) == NOTHING_STORED


@pytest.mark.parametrize(
    "change",
    [
        lambda shards: shards[:1],
        lambda shards: shards[::-1],
        lambda shards: (*shards, replace(shards[1], rank=2)),
        lambda shards: (shards[0], shards[0]),
        lambda shards: (shards[0], replace(shards[1], unit_digests=shards[1].unit_digests[1:])),
    ],
)
@pytest.mark.parametrize("at", range(len(GOOD.chunks)))
def test_a_chunk_without_all_its_shards_is_not_believed(
    change: Callable[[tuple[api.Shard, ...]], tuple[api.Shard, ...]], at: int
) -> None:
    chunks = list(right_reply(TWO_RANKS, 3).chunks)
    whole = replace(GOOD, chunks=tuple(chunks))
    assert stored_boundary(whole, asked(FORM, 4), IDENTITY, TWO_RANKS).chunk_count == 3
    chunks[at] = replace(chunks[at], shards=change(chunks[at].shards))
    assert stored_boundary(replace(GOOD, chunks=tuple(chunks)), asked(FORM, 4), IDENTITY, TWO_RANKS) == NOTHING_STORED
    assert stored_boundary(whole, asked(FORM, 4), IDENTITY, FORM) == NOTHING_STORED, "one rank has one shard"


@pytest.mark.parametrize(
    "reply",
    [
        replace(GOOD, chunks=GOOD.chunks[:-1]),
        replace(GOOD, chunks=GOOD.chunks[1:]),
        replace(GOOD, chunks=(*GOOD.chunks, GOOD.chunks[-1])),
        replace(GOOD, chunks=GOOD.chunks[::-1]),
        replace(GOOD, chunk_count=2),
        replace(GOOD, chunk_count=5),
        replace(GOOD, chunk_count=-1),
        replace(GOOD, chunk_count=0),
        api.MatchReply("", 0, ()),
    ],
)
def test_another_number_of_chunks_than_the_boundary_needs(reply: api.MatchReply) -> None:
    assert stored_boundary(GOOD, asked(FORM, 4), IDENTITY, FORM).chunk_count == 3
    assert stored_boundary(reply, asked(FORM, 4), IDENTITY, FORM) == NOTHING_STORED


WISH = ReserveWish(9, "r", IDENTITY, (0, 1, 0, 1), (0, 0, 1, 1), lambda: None)
KEYS = tuple(key(group, index) for group, index in zip(WISH.groups, WISH.indexes, strict=True))


def place(number: int) -> api.ReserveResult:
    return api.ReserveResult(api.ReserveOutcome.GRANTED, f"g{number}", (api.Extent(1, 0, number, 9, 1),))


def test_places_are_asked_for_what_each_group_keeps() -> None:
    items = reserve_items(WISH, KEYS, FORM)
    assert [(item.group, item.position_tokens, item.token_count) for item in items] == [
        (0, 0, 64), (1, 0, 64), (0, 64, 64), (1, 64, 64),
    ]  # fmt: skip
    assert [item.shards for item in items] == [
        (api.ShardSize(0, 4096, 4),), (api.ShardSize(0, 512, 2),),
    ] * 2  # fmt: skip


def test_a_boundary_that_finds_no_space_in_one_group_is_given_up_in_all() -> None:
    results = [place(0), place(1), place(2), api.ReserveResult(api.ReserveOutcome.NO_SPACE)]
    run = reserved(WISH, KEYS, results, "h", 1, FORM)
    assert run.spare_grant_ids == ("g2",)
    assert run.answer.outcomes == {api.ReserveOutcome.GRANTED: 2, api.ReserveOutcome.NO_SPACE: 2}
    assert run.answer.not_now == (2, 3)
    assert run.answer.granted is not None
    assert run.answer.granted.indexes == (0, 1)
    first, second = run.answer.granted.bundles
    assert first == second != ALONE


def test_what_others_have_or_are_writing_gives_up_nothing() -> None:
    results = [
        place(0),
        api.ReserveResult(api.ReserveOutcome.EXISTS),
        api.ReserveResult(api.ReserveOutcome.BUSY),
        place(3),
    ]
    run = reserved(WISH, KEYS, results, "h", 1, FORM)
    assert run.spare_grant_ids == ()
    assert run.answer.not_now == ()
    assert run.answer.granted is not None
    assert run.answer.granted.indexes == (0, 3)
    assert len(set(run.answer.granted.bundles)) == 2


def test_places_of_all_ranks_lie_side_by_side() -> None:
    form = replace(FORM, rank_count=2, ranks_per_shard=(1, 2))
    assert [[shard.rank for shard in item.shards] for item in reserve_items(WISH, KEYS, form)] == [[0, 1], [0]] * 2
    extents = [api.Extent(1, 0, number, 9, 1) for number in range(6)]
    results = [
        api.ReserveResult(api.ReserveOutcome.GRANTED, f"g{i}", tuple(places))
        for i, places in enumerate((extents[:2], extents[2:3], extents[3:5], extents[5:]))
    ]
    assert is_reserve_reply_sound(api.ReserveReply(tuple(results)), reserve_items(WISH, KEYS, form))
    granted = reserved(WISH, KEYS, results, "h", 1, form).answer.granted
    assert granted is not None
    assert [fields[2] for fields in granted.extents] == list(range(6))
    assert not is_reserve_reply_sound(api.ReserveReply(tuple(results[::-1])), reserve_items(WISH, KEYS, form))
    assert not is_reserve_reply_sound(api.ReserveReply(tuple(results[:3])), reserve_items(WISH, KEYS, form))
