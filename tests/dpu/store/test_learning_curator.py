"""Between the store and its policy: what the policy is told, and what becomes of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.store.curator import Offer, Scarcity
from meshfusion.dpu.store.learned_groups import GROUPS_MAX
from meshfusion.dpu.store.learning_curator import JUDGED_CHAINS_MAX, LEARNED_AT_ONCE, LearningCurator
from meshfusion.dpu.store.tidying import Move
from meshfusion.jbof.policy.chain import Chain, Floats, Indexes, Keys, Mask
from meshfusion.jbof.policy.density_policy import DensityPolicy
from meshfusion.jbof.policy.medium_policy import Admissions, Refusal, SegmentStats
from meshfusion.jbof.segments import UNVALUED, SegmentGeometry, SegmentTable

IDENTITY = b"i" * 32
TOKENS = 16
SIZES = (api.ShardSize(0, 4096, 2),)
GEOMETRY = SegmentGeometry(lba_bytes=4096, data_start_lba=256, segment_lba_count=64, segment_count=4)


def key(number: int, group: int = 0) -> bytes:
    return (number + 1).to_bytes(8, "little") + bytes([group]) * 24


def short(number: int) -> int:
    """As the policy sees it."""
    return int(np.frombuffer(key(number)[:8], np.uint64)[0])


class Scripted:
    """Refuses the chunks in ``refused``; a chunk's density is ``worth`` of it."""

    def __init__(self) -> None:
        self.matched: list[list[int]] = []
        self.computed: list[list[int]] = []
        self.stored: set[int] = set()
        self.victims: list[SegmentStats] = []
        self.refused: set[int] = set()
        self.worth: dict[int, float] = {}
        self.levels: list[float] = []
        self.price = 0.0
        self.skipped: list[int] = []

    def on_match(self, chain: Chain, now_s: float) -> None:
        self.matched.append(chain.keys.tolist())
        self.skipped.append(chain.skipped)

    def on_computed(self, chain: Chain, now_s: float) -> None:
        self.computed.append(chain.keys.tolist())

    def on_found(self, group: int, keys: Keys, chunk_tokens: int, chunk_bytes: int, age_s: float, now_s: float) -> None:
        self.stored |= set(keys.tolist())

    def admit(
        self, chain: Chain, offered: Indexes, now_s: float, budget_level: float, room_density: float = 0.0
    ) -> Admissions:
        assert (np.diff(offered) > 0).all(), "ascending, each once"
        self.levels.append(budget_level)
        keys = chain.keys[offered].tolist()
        refusals = [Refusal.GAIN if one in self.refused else Refusal.NONE for one in keys]
        return Admissions(np.array(refusals, np.int8), np.ones(len(keys), np.int8))

    def on_stored(self, group: int, keys: Keys) -> None:
        self.stored |= set(keys.tolist())

    def on_dropped(self, group: int, keys: Keys) -> None:
        self.stored -= set(keys.tolist())

    def is_held(self, group: int, keys: Keys) -> Mask:
        return np.array([one in self.stored for one in keys.tolist()], np.bool_)

    def densities(self, group: int, keys: Keys, positions: Indexes, now_s: float) -> Floats:
        return np.array([self.worth.get(one, 1.0) for one in keys.tolist()])

    def victim(self, candidates: Sequence[SegmentStats]) -> SegmentStats:
        self.victims += candidates
        return candidates[0]

    def keep(self, densities: Floats, budget_chunks: int) -> Mask:
        best = np.argsort(-densities, kind="stable")[:budget_chunks]
        return (densities > self.price) & np.isin(np.arange(len(densities)), best)

    def refresh_if_due(self, now_s: float) -> None:
        pass


def offer(number: int, request_id: str = "r", group: int = 0, *, is_wanted: bool = True) -> Offer:
    item = api.ReserveItem(key(number, group), group, number * TOKENS, TOKENS, SIZES, request_id=request_id)
    return Offer(item, is_wanted)


def request(count: int, request_id: str = "r", needed_from: int = 0) -> api.MatchRequest:
    first_needed = tuple(max(0, i + 1 - needed_from) if needed_from else 0 for i in range(count))
    keys = api.GroupKeys(0, tuple(key(i) for i in range(count)), first_needed)
    return api.MatchRequest("h", request_id, TOKENS, (keys,))


def record(number: int, segment: int, identity: bytes = IDENTITY) -> api.ChunkRecord:
    extent = api.Extent(1, segment, 0, 3, 1)
    shard = api.Shard(0, extent, 1, 1, 4096, (bytes(8), bytes(8)))
    return api.ChunkRecord(key(number), identity, "default", 0, number * TOKENS, TOKENS, (shard,))


@pytest.fixture
def policy() -> Scripted:
    return Scripted()


@pytest.fixture
def segments() -> SegmentTable:
    return SegmentTable(GEOMETRY)


@pytest.fixture
def curator(policy: Scripted, segments: SegmentTable) -> LearningCurator:
    return LearningCurator(policy, segments)


def admit(curator: LearningCurator, *offers: Offer, level: float = 1.0) -> list[int | None]:
    return curator.admit(1.0, "h", IDENTITY, offers, Scarcity(level, 0.0))


def test_a_request_is_observed_once_with_all_that_it_asked_for(curator: LearningCurator, policy: Scripted) -> None:
    curator.asked(0.0, "h", IDENTITY, request(4), 0)
    curator.asked(0.5, "h", IDENTITY, request(4), 0)
    assert policy.matched == [], "a lookup does not wait for the policy"
    assert admit(curator, offer(2), offer(3), level=0.4) == [1, 1]
    assert policy.matched == [[short(i) for i in range(4)]]
    assert policy.levels == [0.4]
    admit(curator, offer(3))
    curator.asked(2.0, "h", IDENTITY, request(4), 0)
    curator.tend(3.0, 0)
    assert len(policy.matched) == 1
    curator.asked(2.0, "h", IDENTITY, request(4, "another"), 0)
    curator.tend(3.0, 0)
    assert len(policy.matched) == 2, "of a known model it is told without anything to write"


def test_what_is_computed_later_continues_the_request(curator: LearningCurator, policy: Scripted) -> None:
    curator.asked(0.0, "h", IDENTITY, request(2), 0)
    admit(curator, offer(1))
    admit(curator, offer(2))
    admit(curator, offer(3))
    assert policy.computed[-1] == [short(i) for i in range(4)]


def test_nothing_is_written_behind_a_refused_chunk(curator: LearningCurator, policy: Scripted) -> None:
    curator.asked(0.0, "h", IDENTITY, request(4), 0)
    policy.refused = {short(1)}
    assert admit(curator, offer(0), offer(1)) == [1, None]
    policy.refused = set()
    assert admit(curator, offer(2), offer(3)) == [None, None]
    assert curator.counters == {"declined_gain": 1, "declined_ancestor": 2}
    assert admit(curator, offer(2, "another")) == [1], "which is another request's affair"


def test_a_refusal_says_nothing_of_another_request_without_a_name(curator: LearningCurator, policy: Scripted) -> None:
    policy.refused = {short(1)}
    assert admit(curator, offer(1, ""), offer(2, "")) == [None, None]
    assert admit(curator, offer(12, "")) == [1]
    assert policy.matched[-1] == [short(12)]


def test_what_is_offered_for_very_many_requests_is_not_all_judged(curator: LearningCurator, policy: Scripted) -> None:
    offers = [offer(number, f"r{number}") for number in range(JUDGED_CHAINS_MAX + 2)]
    policy.refused = {short(number) for number in range(len(offers))}
    assert admit(curator, *offers) == [None] * JUDGED_CHAINS_MAX + [0, 0]


def test_a_boundary_is_written_in_all_groups_or_in_none(curator: LearningCurator, policy: Scripted) -> None:
    other = api.ReserveItem(bytes([9]) * 32, 1, TOKENS, TOKENS, SIZES, request_id="r")
    policy.refused = {int(np.frombuffer(bytes([9]) * 8, np.uint64)[0])}
    assert admit(curator, offer(0), offer(1), Offer(other, True)) == [1, None, None]


def test_what_others_have_stored_is_not_judged(curator: LearningCurator, policy: Scripted) -> None:
    policy.refused = {short(0)}
    assert admit(curator, offer(0, is_wanted=False), offer(1)) == [0, 1]


def test_an_item_offered_twice_is_judged_once(curator: LearningCurator) -> None:
    assert len(admit(curator, offer(0), offer(0), offer(1))) == 3


def test_what_a_group_does_not_need_any_more_is_not_used(curator: LearningCurator, policy: Scripted) -> None:
    """Local attention: to resume after six chunks the last two are needed."""
    curator.asked(0.0, "h", IDENTITY, request(8, needed_from=2), 6)
    admit(curator, offer(7))
    assert policy.matched == [[short(i) for i in (4, 5, 6, 7)]]
    assert policy.skipped == [4]


def test_a_segment_is_worth_what_it_holds_for_each_byte(
    curator: LearningCurator, policy: Scripted, segments: SegmentTable
) -> None:
    policy.worth = {short(0): 3.0, short(1): 4.0, short(2): 100.0}
    curator.stored([record(0, 2), record(1, 2), record(2, 2)])
    curator.dropped(record(2, 2))
    opened = open_all(segments)
    curator.tend(1.0, 0)
    chunk_bytes = 2 * 4096
    assert segments.worth(2) == pytest.approx((3.0 + 4.0) * chunk_bytes / GEOMETRY.segment_bytes)
    assert segments.worth(opened[-1]) == UNVALUED
    curator.emptied(2)
    assert policy.stored == set()
    assert policy.victims[0].density_sum == pytest.approx((3.0 + 4.0) * chunk_bytes / GEOMETRY.segment_bytes)
    curator.emptied(2)
    assert len(policy.victims) == 1


def test_a_segment_is_worth_what_is_lost_for_the_room_that_is_gained(
    curator: LearningCurator, policy: Scripted, segments: SegmentTable
) -> None:
    policy.worth = {short(i): float(i) for i in range(6)}
    policy.price = 2.5
    curator.stored(record(i, 2) for i in range(6))
    chunk_bytes = 2 * 4096
    open_all(segments)
    for allowed, kept in ((0, set[int]()), (2 * chunk_bytes, {4, 5}), (100 * chunk_bytes, {3, 4, 5})):
        curator.tend(1.0, allowed)
        room_bytes = GEOMETRY.segment_bytes - len(kept) * chunk_bytes
        lost = sum(i for i in range(6) if i not in kept) * chunk_bytes
        assert segments.worth(2) == pytest.approx(lost / room_bytes)
        chosen = curator.worth_keeping(1.0, [record(i, 2) for i in range(6)], allowed)
        assert [chunk.key for chunk in chosen] == [key(i) for i in sorted(kept, reverse=True)]


def test_shards_that_lie_elsewhere_take_no_room(
    curator: LearningCurator, policy: Scripted, segments: SegmentTable
) -> None:
    """Of four ranks, one in each segment: twenty chunks fill a segment, and together have four times its bytes."""
    policy.price = 0.5

    def of_four(number: int) -> api.ChunkRecord:
        one = record(number, 0)
        shards = tuple(
            replace(one.shards[0], rank=rank, extent=replace(one.shards[0].extent, segment=rank)) for rank in range(4)
        )
        return replace(one, shards=shards)

    curator.stored(of_four(number) for number in range(20))
    open_all(segments)
    chunk_bytes = 4 * 2 * 4096
    assert 20 * chunk_bytes > 2 * GEOMETRY.segment_bytes
    curator.tend(1.0, 100 * chunk_bytes)
    room_bytes = GEOMETRY.segment_bytes / 2  # half of them are written again
    assert [segments.worth(i) for i in range(4)] == [pytest.approx(10 * chunk_bytes / room_bytes)] * 4


def test_chunks_that_were_moved_count_where_they_lie(
    curator: LearningCurator, policy: Scripted, segments: SegmentTable
) -> None:
    opened = open_all(segments)
    curator.stored([record(0, opened[0]), record(1, opened[0])])
    curator.moved([Move(record(1, opened[0]), record(1, opened[1]))])
    curator.tend(1.0, 0)
    one = 2 * 4096 / GEOMETRY.segment_bytes
    assert [segments.worth(segment) for segment in opened[:2]] == [pytest.approx(one)] * 2
    curator.emptied(opened[0])
    assert policy.stored == {short(1)}


def test_an_empty_segment_is_worth_nothing(curator: LearningCurator, segments: SegmentTable) -> None:
    opened = open_all(segments)
    curator.emptied(opened[0])
    curator.adopted(0.0, opened[1], [])
    curator.adopted(0.0, opened[2], [record(0, opened[2])])
    curator.tend(1.0, 0)
    assert [segments.worth(segment) for segment in opened[:2]] == [0.0, 0.0]
    assert 0.0 < segments.worth(opened[2]) < UNVALUED
    assert segments.worth(opened[3]) == UNVALUED


def test_the_least_worth_is_reclaimed(curator: LearningCurator, policy: Scripted, segments: SegmentTable) -> None:
    opened = open_all(segments)
    policy.worth = {short(0): 3.0, short(1): 0.5, short(2): 2.0}
    for number, segment in enumerate(opened[:3]):
        curator.stored([record(number, segment)])
        segments.used(segment, 100.0 - number)
    curator.tend(1.0, 0)
    reopened = segments.open_next(2.0, lambda _: True)
    assert reopened is not None
    assert reopened.segment == opened[1]


def test_what_has_left_the_pool_is_worth_nothing_to_anybody(
    curator: LearningCurator, policy: Scripted, segments: SegmentTable
) -> None:
    opened = open_all(segments)
    policy.worth = {short(0): 3.0, short(1): 4.0}
    curator.stored([record(0, opened[0]), record(1, opened[1])])
    curator.tend(1.0, 0)
    least = curator.least_worth()
    curator.left(lambda segment: segment == opened[0])
    curator.tend(2.0, 0)
    assert policy.stored == {short(1)}
    assert curator.least_worth() == pytest.approx(least * 4 / 3)


def test_used_segments_are_valued_first(curator: LearningCurator, policy: Scripted, segments: SegmentTable) -> None:
    open_all(segments)
    curator.stored(record(number, number % 3) for number in range(60_000))
    curator.tend(1.0, 0)  # as much as is done at once
    assert [segments.worth(i) == UNVALUED for i in range(3)] == [False, True, True]
    curator.used([2])
    curator.tend(1.0, 0)
    assert [segments.worth(i) == UNVALUED for i in range(3)] == [False, True, False]
    curator.tend(1.0, 0)
    assert segments.worth(1) != UNVALUED


def test_of_very_many_segments_some_are_valued_at_once(policy: Scripted) -> None:
    """Empty ones and those of few chunks, too: lookups wait meanwhile."""
    count = 150
    segments = SegmentTable(replace(GEOMETRY, segment_count=count))
    curator = LearningCurator(policy, segments)
    for segment in range(count):
        curator.adopted(0.0, segment, [record(segment, segment)] if segment % 2 else [])
    valued = []
    for _ in range(3):
        curator.tend(1.0, 0)
        valued.append(sum(segments.worth(segment) != UNVALUED for segment in range(count)))
    assert valued == [64, 128, count]


def test_of_too_many_models_all_is_written(curator: LearningCurator, policy: Scripted) -> None:
    for number in range(GROUPS_MAX):
        curator.stored([record(0, 0, bytes([number]) * 32)])
    policy.refused = {short(5)}
    assert curator.admit(0.0, "h", b"z" * 32, [offer(5)], Scarcity(1.0, 0.0)) == [0]
    assert curator.admit(0.0, "h", bytes(32), [offer(5)], Scarcity(1.0, 0.0)) == [None]
    curator.stored([record(7, 1, b"z" * 32)])
    curator.tend(0.0, 0)
    curator.emptied(1)


def test_with_the_real_policy_a_chunk_that_comes_again_and_again_outlives_others(segments: SegmentTable) -> None:
    curator = LearningCurator(DensityPolicy(), segments)
    opened = open_all(segments)
    for now_s in range(0, 300, 10):
        numbers = range(1000 + now_s * 8, 1008 + now_s * 8)
        for name, asked in ((f"hot{now_s}", range(8)), (f"cold{now_s}", numbers)):
            keys = api.GroupKeys(0, tuple(map(key, asked)), (0,) * 8)
            curator.asked(float(now_s), "h", IDENTITY, api.MatchRequest("h", name, TOKENS, (keys,)), 0)
            offers = [
                Offer(api.ReserveItem(key(n), 0, i * TOKENS, TOKENS, SIZES, request_id=name), is_wanted=True)
                for i, n in enumerate(asked)
            ]
            assert len(curator.admit(float(now_s), "h", IDENTITY, offers, Scarcity(1.0, 0.0))) == 8
        curator.tend(float(now_s), 0)
    curator.stored([record(number, opened[0]) for number in range(8)])
    curator.stored([record(number, opened[1]) for number in range(1000, 1008)])
    curator.tend(300.0, 0)
    assert segments.worth(opened[0]) > 10 * segments.worth(opened[1])


def open_all(segments: SegmentTable) -> list[int]:
    opened = []
    for _ in range(GEOMETRY.segment_count):
        found = segments.open_next(0.0, lambda _: True)
        assert found is not None
        segments.opened(found)
        opened.append(found.segment)
    return opened


def test_room_is_worth_what_the_least_of_the_sealed_segments_is(
    curator: LearningCurator, policy: Scripted, segments: SegmentTable
) -> None:
    assert curator.least_worth() == 0.0
    opened = open_all(segments)
    policy.worth = {short(0): 3.0, short(1): 2.0, short(2): 0.5}
    curator.stored([record(0, opened[0]), record(1, opened[1]), record(2, opened[3])])
    curator.tend(1.0, 0)
    assert curator.least_worth() == segments.worth(opened[1]), "the last one is open: it does not go next"
    curator.emptied(opened[1])
    assert curator.least_worth() == segments.worth(opened[0])


def test_many_lookups_are_learned_from_a_few_at_a_time(curator: LearningCurator, policy: Scripted) -> None:
    admit(curator, offer(0))
    for i in range(2 * LEARNED_AT_ONCE + 1):
        curator.asked(0.0, "h", IDENTITY, request(2, f"r{i}"), 0)
    before = len(policy.matched)
    assert [curator.tend(1.0, 0) for _ in range(3)] == [True, True, False]
    assert len(policy.matched) - before == 2 * LEARNED_AT_ONCE + 1
