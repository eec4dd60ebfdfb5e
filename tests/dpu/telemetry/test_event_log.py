"""The ring of events: bounded, in order, and watched by a few."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from meshfusion.dpu.api.event_types import Event, Severity
from meshfusion.dpu.telemetry.event_log import MAX_WATCHERS, EventLog
from meshfusion.jbof.errors import ServiceError, ServiceUnavailableError


def sequences(events: Iterator[Event]) -> list[int]:
    return [event.sequence for event in events]


def told(log: EventLog, count: int) -> None:
    for i in range(count):
        log.tell("saves_stopped", f"reason {i}")


def test_holds_the_last_ones_and_counts_all() -> None:
    log = EventLog(kept=3, unix_time_s=lambda: 12.5)
    told(log, 5)
    assert log.recent(10) == tuple(
        Event(i, 12.5, "saves_stopped", Severity.ERROR, f"reason {i - 1}", ()) for i in (3, 4, 5)
    )
    assert [event.sequence for event in log.recent(1)] == [5]
    assert log.recent(0) == ()
    assert log.counts == {"saves_stopped": 5}


@pytest.mark.parametrize(("after", "expected"), [(0, [3, 4, 5]), (3, [4, 5]), (5, []), (77, [3, 4, 5])])
def test_those_after(after: int, expected: list[int]) -> None:
    """77: of an earlier life of the service, which counts from 1 in each."""
    log = EventLog(kept=3)
    told(log, 5)
    assert sequences(log.events(after, follow=False)) == expected


def test_fields_are_texts() -> None:
    log = EventLog()
    log.tell("quarantine_grew", "two", segments=2)
    assert log.recent(1)[0].fields == (("segments", "2"),)


def test_severity_is_told_once() -> None:
    log = EventLog()
    with pytest.raises(AssertionError):
        log.tell("saves_stopped", "x", severity=Severity.INFO)
    with pytest.raises(AssertionError):
        log.tell("drive_state", "x")
    with pytest.raises(KeyError):
        log.tell("no_such_kind", "x")


def test_following_gets_what_comes_until_the_end() -> None:
    log = EventLog()
    told(log, 2)
    got: list[int] = []
    has_two = threading.Event()

    def follow() -> None:
        for event in log.events(1, follow=True):
            got.append(event.sequence)
            if len(got) == 2:
                has_two.set()

    thread = threading.Thread(target=follow)
    thread.start()
    told(log, 1)
    assert has_two.wait(10.0)
    told(log, 1)
    log.close()
    thread.join(10.0)
    assert not thread.is_alive()
    assert got == [2, 3, 4]
    assert log.watcher_count == 0


def test_a_watcher_that_is_too_slow_is_told_so() -> None:
    log = EventLog(kept=3)
    told(log, 1)
    watcher = log.events(0, follow=True)
    assert next(watcher).sequence == 1
    told(log, 4)
    with pytest.raises(ServiceError, match=r"too slow: the events 2 to 2 are gone"):
        next(watcher)
    assert log.watcher_count == 0


def test_what_was_gone_before_it_came_is_no_fault_of_its() -> None:
    log = EventLog(kept=3)
    told(log, 9)
    watcher = log.events(2, follow=True)
    assert next(watcher).sequence == 7
    watcher.close()  # type: ignore[attr-defined]


def test_no_more_than_a_few_watch() -> None:
    log = EventLog()
    told(log, 1)
    watchers = [log.events(0, follow=True) for _ in range(MAX_WATCHERS)]
    for watcher in watchers:
        next(watcher)
    with pytest.raises(ServiceUnavailableError, match="watchers"):
        next(log.events(0, follow=True))
    assert sequences(log.events(0, follow=False)) == [1], "asking once is no watching"
    watchers.pop().close()  # type: ignore[attr-defined]
    assert next(log.events(0, follow=True)).sequence == 1


def test_one_that_is_not_wanted_ends() -> None:
    log = EventLog()
    told(log, 1)
    assert sequences(log.events(0, follow=True, is_wanted=lambda: False)) == []


def test_sequence_of_another_life_while_following() -> None:
    log = EventLog()
    watcher = log.events(50, follow=True)
    timer = threading.Timer(0.1, lambda: told(log, 1))
    timer.start()
    assert next(watcher).sequence == 1
    watcher.close()  # type: ignore[attr-defined]


def test_what_is_told_of_one_of_several_pools_says_so() -> None:
    log = EventLog()
    log.of_pool("red").tell("drive_state", "drive 0 is gone", severity=Severity.ERROR, drive=0)
    log.of_pool("").tell("saves_stopped", "full")
    log.tell("service_stops", "it ends")
    assert [(event.pool, event.kind, event.fields) for event in log.recent(9)] == [
        ("red", "drive_state", (("drive", "0"),)), ("", "saves_stopped", ()), ("", "service_stops", ())
    ]  # fmt: skip
    assert log.counts == {"drive_state": 1, "saves_stopped": 1, "service_stops": 1}
