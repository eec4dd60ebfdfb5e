"""What is announced of chunks: only what is visible, always to be taken back, and never without bound."""

from __future__ import annotations

import random

import pytest

from meshfusion.host.connector.announcements import ANSWER_MAX_S, Announcements, RemovedBlocks, StoredChunk

OURS, OTHERS = b"ours", b"others"


def chunk(number: int, *, group: int = 0, blocks: int = 2) -> StoredChunk:
    hashes = tuple(b"hash-%d-%d" % (number, i) for i in range(blocks))
    return StoredChunk(group, hashes, None, tuple(range(blocks * 4)), 4)


def key(number: int) -> bytes:
    return b"key-%d" % number


def announce(announcements: Announcements, *numbers: int, now_s: float = 0.0, group: int = 0) -> None:
    announcements.settling(now_s, OURS, [(key(n), chunk(n, group=group)) for n in numbers])
    announcements.committed([key(n) for n in numbers], ())


def test_nothing_is_told_before_the_service_has_answered() -> None:
    announcements = Announcements(OURS)
    announcements.settling(0.0, OURS, [(key(1), chunk(1)), (key(2), chunk(2))])
    assert announcements.take() == []
    assert announcements.pending_count == 2
    announcements.committed([key(2)], [key(1)])
    assert announcements.pending_count == 1, "to be told"
    assert announcements.take() == [chunk(2)]
    assert announcements.take() == []
    assert announcements.pending_count == 0
    assert announcements.counters == {"kv_events_stored": 1}


def test_an_answer_nobody_waits_for_tells_nothing() -> None:
    announcements = Announcements(OURS)
    announcements.committed([key(1)], [key(2)])
    announcements.gone([key(1), key(2)])
    assert announcements.take() == []


def test_a_commit_that_is_never_answered_is_not_waited_for_for_ever() -> None:
    announcements = Announcements(OURS)
    announcements.settling(5.0, OURS, [(key(1), chunk(1))])
    announcements.give_up_late(5.0 + ANSWER_MAX_S - 0.1)
    assert announcements.pending_count == 1
    announcements.give_up_late(5.0 + ANSWER_MAX_S)
    assert announcements.pending_count == 0
    announcements.committed([key(1)], ())
    assert announcements.take() == []


def test_what_is_gone_is_taken_back_once_with_the_hashes_it_was_told_by() -> None:
    announcements = Announcements(OURS)
    announce(announcements, 1, 2)
    announce(announcements, 3, group=1)
    announcements.take()
    announcements.gone([key(3), key(1), key(7)])
    assert announcements.take() == [RemovedBlocks(1, chunk(3).block_hashes), RemovedBlocks(0, chunk(1).block_hashes)]
    announcements.gone([key(3), key(1)])
    assert announcements.take() == []


def test_told_and_taken_back_between_two_steps_keeps_its_order() -> None:
    announcements = Announcements(OURS)
    announce(announcements, 1)
    announcements.gone([key(1)])
    announce(announcements, 1)
    assert announcements.take() == [chunk(1), RemovedBlocks(0, chunk(1).block_hashes), chunk(1)]


def test_after_a_reset_everything_is_taken_back_and_late_commits_tell_nothing() -> None:
    announcements = Announcements(OURS)
    announce(announcements, 1, 2)
    announcements.settling(0.0, OURS, [(key(3), chunk(3))])
    announcements.take()
    announcements.reset(OTHERS)
    announcements.committed([key(3)], ())
    announcements.settling(0.0, OURS, [(key(4), chunk(4))])  # it was being written
    announcements.committed([key(4)], ())
    assert announcements.take() == [RemovedBlocks(0, chunk(1).block_hashes + chunk(2).block_hashes)]
    announcements.settling(0.0, OTHERS, [(key(5), chunk(5))])
    announcements.committed([key(5)], ())
    assert announcements.take() == [chunk(5)]


def test_another_pool_has_nothing_of_the_first() -> None:
    announcements = Announcements(OURS)
    announcements.in_pool("a")
    announce(announcements, 1)
    announcements.take()
    announcements.in_pool("a")
    assert announcements.take() == [], "attached again, the chunks are still there"
    announcements.in_pool("b")
    assert announcements.take() == [RemovedBlocks(0, chunk(1).block_hashes)]


def test_a_full_queue_drops_what_is_stored_and_never_a_removal() -> None:
    announcements = Announcements(OURS, queue_max=3)
    announce(announcements, 1, 2, 3)
    announce(announcements, 4)
    announcements.gone([key(1), key(4)])
    assert announcements.take() == [chunk(1), chunk(2), chunk(3), RemovedBlocks(0, chunk(1).block_hashes)]
    assert announcements.counters["kv_events_dropped"] == 1
    announcements.settling(0.0, OURS, [(key(n), chunk(n)) for n in range(10, 15)])
    announcements.committed([key(n) for n in range(10, 15)], ())
    assert announcements.take() == [chunk(10), chunk(11), chunk(12)]
    assert announcements.counters["kv_events_dropped"] == 3


def test_what_falls_out_of_memory_is_taken_back_first() -> None:
    announcements = Announcements(OURS, hashes_max=4)
    announce(announcements, 1, 2, 3)
    assert announcements.take() == [chunk(1), chunk(2), chunk(3), RemovedBlocks(0, chunk(1).block_hashes)]
    announce(announcements, 2)  # written anew: now the youngest
    announce(announcements, 4)
    assert announcements.take() == [chunk(2), chunk(4), RemovedBlocks(0, chunk(3).block_hashes)]


def test_many_removals_come_in_parts() -> None:
    announcements = Announcements(OURS)
    announce(announcements, *range(1500))
    announcements.take()
    announcements.reset(OTHERS)
    removed = announcements.take()
    assert [len(one.block_hashes) for one in removed] == [1024, 1024, 952]
    assert {h for one in removed for h in one.block_hashes} == {h for n in range(1500) for h in chunk(n).block_hashes}


@pytest.mark.parametrize("seed", range(20))
def test_a_listener_never_believes_more_than_is_visible(seed: int) -> None:
    """Whatever happens, in any order: what a listener that heard everything counts on is visible under our identity,
    and is bounded."""
    chosen = random.Random(seed)
    announcements = Announcements(OURS, queue_max=6, hashes_max=10)
    identity, resets = OURS, 0
    under_way: dict[int, bytes] = {}
    visible: set[int] = set()
    believed: set[bytes] = set()
    for _ in range(2000):
        number = chosen.randrange(12)
        match chosen.randrange(6):
            case 0 if number not in under_way and number not in visible:
                announcements.settling(0.0, identity, [(key(number), chunk(number))])
                under_way[number] = identity
            case 1 if number in under_way:
                is_committed = chosen.random() < 0.7
                if is_committed and under_way.pop(number) == identity:
                    visible.add(number)
                under_way.pop(number, None)
                announcements.committed([key(number)] if is_committed else [], [] if is_committed else [key(number)])
            case 2 if number in visible:
                visible.remove(number)
                announcements.gone([key(number)])
            case 3 if chosen.random() < 0.1:
                resets += 1
                identity = b"reset %d" % resets
                visible.clear()
                announcements.reset(identity)
            case _:
                for told in announcements.take():
                    hashes = set(told.block_hashes)
                    believed = believed - hashes if isinstance(told, RemovedBlocks) else believed | hashes
                assert believed <= {h for n in visible for h in chunk(n).block_hashes}
                assert len(believed) <= 10
    assert announcements.counters["kv_events_stored"] > 10
