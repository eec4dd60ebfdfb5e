"""The way of a request through the cache, by examples; in any order: ``test_lookups_any_order.py``."""

from __future__ import annotations

import pytest

from meshfusion.host.connector.lookups import LookupOptions, Lookups, ReleaseLease, StartAudit, StartLoad, StartMatch
from meshfusion.host.pool_events import NOTHING_STORED
from tests.host.support.chunk_records import UNIT_BYTES, unit_digest, unit_lba
from tests.host.support.lookup_words import BLOCK, CHUNK, FORM, OPTIONS, PER_CHUNK, always, never, part_of, stored


@pytest.fixture
def lookups() -> Lookups:
    return Lookups(OPTIONS, FORM)


def promise(lookups: Lookups, request_id: str = "a", chunks: int = 2, now_s: float = 0.0, lease: str = "L") -> None:
    (start,) = lookups.new_request(now_s, request_id)
    assert isinstance(start, StartMatch)
    assert lookups.matched(now_s, request_id, start.attempt, lease, stored(chunks)) == []


def test_a_hit_is_promised_loaded_and_given_back(lookups: Lookups) -> None:
    promise(lookups)
    assert lookups.query(0.001, "a", CHUNK // 2, always) == (2 * CHUNK - CHUNK // 2, [])
    (load,) = lookups.allocated("a", 2 * CHUNK - CHUNK // 2, [[100 + i for i in range(9)]])
    assert isinstance(load, StartLoad)
    # Blocks 2 to 7 of the request: units 2, 3 of chunk 0 and all four of chunk 1.
    assert part_of(load).first_block == 2
    assert part_of(load).block_ids == (102, 103, 104, 105, 106, 107)
    units = [(0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert part_of(load).lbas == (tuple(unit_lba(chunk, unit) for chunk, unit in units),)
    assert part_of(load).digests == (tuple(unit_digest(chunk, unit) for chunk, unit in units),)
    assert load.stored == stored(2)
    assert load.load_bytes == 6 * UNIT_BYTES
    assert lookups.live_lease_ids() == ("L",)
    assert lookups.load_finished("a", failed=False) == [ReleaseLease("L")]
    assert lookups.allocated("a", 0, []) == []  # the engine tells again once the load has ended
    assert lookups.finished("a") == []
    assert len(lookups) == 0


def test_trimmed_allocation_loads_only_what_was_taken(lookups: Lookups) -> None:
    promise(lookups)
    lookups.query(0.001, "a", 0, always)
    (load,) = lookups.allocated("a", 3 * BLOCK, [list(range(50, 60))])
    assert isinstance(load, StartLoad)
    assert part_of(load).block_ids == (50, 51, 52)
    assert len(part_of(load).lbas[0]) == len(part_of(load).digests[0]) == 3


def test_no_answer_before_the_deadline_then_a_miss_for_good(lookups: Lookups) -> None:
    (start,) = lookups.new_request(0.0, "a")
    assert isinstance(start, StartMatch)
    assert lookups.query(0.019, "a", 0, always) == (None, [])
    assert lookups.query(0.020, "a", 0, always) == (0, [])
    assert lookups.counters["lookups_timed_out"] == 1
    assert lookups.matched(0.021, "a", start.attempt, "late", stored(2)) == [ReleaseLease("late")]
    assert lookups.query(5.0, "a", 0, always) == (0, [])


def test_a_queue_that_moves_is_waited_for_but_not_for_ever() -> None:
    options = LookupOptions(deadline_s=0.02, patience_s=0.05)
    lookups = Lookups(options, FORM)
    starts = [start for i in range(4) for start in lookups.new_request(0.0, f"r{i}")]
    assert all(isinstance(start, StartMatch) for start in starts)
    assert lookups.matched(0.015, "r0", starts[0].attempt, "L0", stored(1)) == []  # type: ignore[union-attr]
    assert lookups.query(0.030, "r1", 0, always) == (None, [])  # the service answered 15 ms ago
    assert lookups.query(0.035, "r1", 0, always) == (0, [])  # and then nothing for 20 ms
    assert lookups.matched(0.036, "r2", starts[2].attempt, "L2", stored(1)) == []  # type: ignore[union-attr]
    assert lookups.query(0.049, "r3", 0, always) == (None, [])
    assert lookups.query(0.050, "r3", 0, always) == (0, []), "patience ends"


def test_lease_changes_are_told_once(lookups: Lookups) -> None:
    assert lookups.take_lease_change() is None
    promise(lookups)
    assert lookups.take_lease_change() == lookups.live_lease_ids()
    assert lookups.take_lease_change() is None
    lookups.finished("a")
    assert lookups.take_lease_change() == ()


def test_a_miss_and_an_empty_lease(lookups: Lookups) -> None:
    (start,) = lookups.new_request(0.0, "a")
    assert isinstance(start, StartMatch)
    assert lookups.matched(0.0, "a", start.attempt, "", NOTHING_STORED) == []
    assert lookups.query(0.0, "a", 0, always) == (0, [])
    (start,) = lookups.new_request(0.0, "b")
    assert isinstance(start, StartMatch)
    assert lookups.matched(0.0, "b", start.attempt, "E", NOTHING_STORED) == [ReleaseLease("E")]


def test_the_local_hit_may_cover_or_shrink(lookups: Lookups) -> None:
    promise(lookups)
    assert lookups.query(0.001, "a", 3 * CHUNK, never) == (0, [])  # nothing is decided while nothing is to be loaded
    assert lookups.query(0.001, "a", CHUNK, always) == (CHUNK, [])
    assert lookups.query(0.001, "a", 0, never) == (2 * CHUNK, [])  # decided once: it may not be taken back


def test_a_load_that_is_not_worth_it_is_a_miss_and_still_known(lookups: Lookups) -> None:
    promise(lookups)
    asked: list[tuple[int, int]] = []

    def refuse(tokens: int, load_bytes: int) -> bool:
        asked.append((tokens, load_bytes))
        return False

    assert lookups.query(0.0, "a", CHUNK, refuse) == (0, [ReleaseLease("L")])
    assert asked == [(CHUNK, PER_CHUNK * UNIT_BYTES)]
    assert lookups.matched_chunk_count("a") == 2  # no reason to save them again
    assert lookups.query(0.0, "a", 0, always) == (0, [])


def test_an_unused_promise_ages_and_is_asked_for_anew(lookups: Lookups) -> None:
    promise(lookups)
    assert lookups.query(9.9, "a", 0, always) == (2 * CHUNK, [])
    tokens, effects = lookups.query(10.1, "a", 0, always)
    assert tokens is None
    assert effects[0] == ReleaseLease("L")
    assert isinstance(effects[1], StartMatch)
    assert lookups.matched(10.11, "a", effects[1].attempt, "L2", stored(1)) == []
    assert lookups.query(10.12, "a", 0, always) == (CHUNK, [])


def test_admitted_without_our_tokens_then_preempted(lookups: Lookups) -> None:
    promise(lookups)
    lookups.query(0.0, "a", 0, always)
    assert lookups.allocated("a", 0, [[1, 2]]) == [ReleaseLease("L")]
    tokens, effects = lookups.query(1.0, "a", 0, always)  # preempted: asked again
    assert tokens is None
    assert [type(effect) for effect in effects] == [StartMatch]


def test_a_failed_load_is_never_tried_again(lookups: Lookups) -> None:
    promise(lookups)
    lookups.query(0.0, "a", 0, always)
    lookups.allocated("a", 2 * CHUNK, [list(range(8))])
    assert lookups.load_finished("a", failed=True) == [ReleaseLease("L")]
    assert lookups.matched_chunk_count("a") == 0  # what is recomputed is worth saving
    assert lookups.query(1.0, "a", 0, always) == (0, [])
    assert lookups.allocated("a", 0, []) == []
    assert lookups.query(2.0, "a", 0, always) == (0, [])


def test_aborted_while_loading_keeps_the_lease_until_the_workers_are_done(lookups: Lookups) -> None:
    promise(lookups)
    lookups.query(0.0, "a", 0, always)
    lookups.allocated("a", 2 * CHUNK, [list(range(8))])
    assert lookups.finished("a") == []
    assert lookups.live_lease_ids() == ("L",)
    assert lookups.load_finished("a", failed=False) == [ReleaseLease("L")]
    assert len(lookups) == 0
    assert lookups.load_finished("a", failed=False) == []


def test_a_lost_lease_ends_the_promise_but_not_the_load(lookups: Lookups) -> None:
    promise(lookups, "a", lease="LA")
    promise(lookups, "b", lease="LB")
    lookups.query(0.0, "b", 0, always)
    lookups.allocated("b", CHUNK, [list(range(8))])
    lookups.leases_lost(["LA", "LB", "unknown"])
    assert lookups.query(0.0, "a", 0, always)[0] is None
    assert lookups.load_finished("b", failed=False) == []
    assert lookups.live_lease_ids() == ()


def test_reset_ends_promises_and_orphans_lookups(lookups: Lookups) -> None:
    promise(lookups, "a", lease="LA")
    (start,) = lookups.new_request(0.0, "b")
    assert isinstance(start, StartMatch)
    assert lookups.reset() == [ReleaseLease("LA")]
    assert lookups.matched(0.0, "b", start.attempt, "LB", stored(1)) == [ReleaseLease("LB")]
    assert lookups.query(0.0, "a", 0, always)[0] is None


def test_an_answer_from_before_a_reset_does_not_answer_the_question_after_it(lookups: Lookups) -> None:
    (before,) = lookups.new_request(0.0, "a")
    assert isinstance(before, StartMatch)
    lookups.reset()
    tokens, (after,) = lookups.query(0.001, "a", 0, always)
    assert tokens is None
    assert isinstance(after, StartMatch)
    assert lookups.matched(0.002, "a", before.attempt, "old", stored(2)) == [ReleaseLease("old")]
    assert lookups.query(0.003, "a", 0, always) == (None, [])
    assert lookups.matched(0.004, "a", after.attempt, "new", stored(1)) == []
    assert lookups.query(0.005, "a", 0, always) == (CHUNK, [])


def test_only_so_many_look_before_they_are_asked(lookups: Lookups) -> None:
    started = [bool(lookups.new_request(0.0, f"r{i}")) for i in range(5)]
    assert started == [True, True, True, False, False]
    tokens, effects = lookups.query(0.0, "r4", 0, always)
    assert tokens is None
    assert len(effects) == 1


def test_the_same_request_announced_twice_keeps_its_lease(lookups: Lookups) -> None:
    promise(lookups)
    assert lookups.new_request(0.0, "a") == []
    assert lookups.finished("a") == [ReleaseLease("L")]


def test_an_audited_hit_is_a_miss_whose_lease_stays_until_the_audit_has_ended(lookups: Lookups) -> None:
    promise(lookups)
    assert lookups.query(0.0, "a", BLOCK, always, lambda request_id: request_id == "a") == (0, [])
    assert lookups.query(99.0, "a", 2 * BLOCK, always) == (0, []), "no promise that could grow old"
    assert lookups.allocated("a", 0, []) == [StartAudit("a", 2 * BLOCK, stored(2))]
    assert lookups.matched_chunk_count("a") == 2, "it need not be saved"
    assert lookups.finished("a") == []
    assert lookups.live_lease_ids() == ("L",)
    assert lookups.audit_ended("a") == [ReleaseLease("L")]
    assert len(lookups) == 0
    assert lookups.audit_ended("a") == []


def test_only_hits_worth_loading_are_audited_and_only_before_they_are_answered(lookups: Lookups) -> None:
    promise(lookups)
    assert lookups.query(0.0, "a", 2 * CHUNK, always, lambda _: True) == (0, []), "nothing beyond what is there"
    assert lookups.query(0.0, "a", 0, always) == (2 * CHUNK, [])
    assert lookups.query(0.0, "a", 0, always, lambda _: True) == (2 * CHUNK, [])
    promise(lookups, "b", lease="M")
    assert lookups.query(0.0, "b", 0, never, lambda _: True) == (0, [ReleaseLease("M")])


def test_a_request_whose_audit_has_ended_may_hit_after_a_preemption(lookups: Lookups) -> None:
    promise(lookups)
    lookups.query(0.0, "a", 0, always, lambda _: True)
    lookups.allocated("a", 0, [])
    assert lookups.audit_ended("a") == [ReleaseLease("L")]
    tokens, effects = lookups.query(1.0, "a", 0, always)
    assert tokens is None
    assert isinstance(effects[0], StartMatch)
