"""One queue pair: every command ends once, and its memory is given back only when nobody can touch it."""

from __future__ import annotations

import math
import struct

import pytest

from meshfusion.jbof.nvme.admin_commands import keep_alive
from meshfusion.jbof.nvme.queue_effects import (
    CommandDeadlineError,
    Finished,
    InDoubt,
    MemoryFree,
    NotSent,
    QueueDead,
    QueueFullError,
    QueueLost,
    QueueState,
)
from meshfusion.jbof.nvme.transport import KillLink, LinkBroken, LinkDead, LinkUp, PostCapsule, Received, Sent
from tests.jbof.nvme.queue_bench import BROKEN, LINK, live_queue, new_queue, posted, response, submit


def test_a_command_is_over_when_sent_and_answered() -> None:
    queue = live_queue()
    [post] = submit(queue, "a")
    assert isinstance(post, PostCapsule)
    assert post.capsule[:4] == bytes([0x00, 0x40]) + struct.pack("<H", post.command_id)
    assert queue.handle(1.0, response(post.command_id, result=77)) == []
    [end] = queue.handle(1.0, Sent(LINK, post.command_id))
    assert isinstance(end, Finished)
    assert (end.owner, end.completion.result, end.completion.status.is_success) == ("a", 77, True)
    assert queue.load == 0


def test_sent_first_is_the_same() -> None:
    queue = live_queue()
    [command_id] = posted(submit(queue, "a"))
    assert queue.handle(1.0, Sent(LINK, command_id)) == []
    [end] = queue.handle(1.0, response(command_id, status=0x281))
    assert isinstance(end, Finished)
    assert (end.completion.status.sct, end.completion.status.sc) == (2, 0x81)


@pytest.mark.parametrize(("sq_id", "phase"), [(0, 1), (5, 0), (65535, 1)])
def test_reserved_fields_of_a_response_mean_nothing(sq_id: int, phase: int) -> None:
    """Base Figure 97: over Fabrics, SQID and the phase tag are reserved."""
    queue = live_queue()
    [command_id] = posted(submit(queue, "a"))
    queue.handle(0.0, Sent(LINK, command_id))
    assert len(queue.handle(0.0, response(command_id, sq_id=sq_id, phase=phase))) == 1


def test_depth_less_one_are_posted_some_wait_and_no_more() -> None:
    queue = live_queue(depth=4, max_waiting=2)
    ids = [posted(submit(queue, i)) for i in range(3)]
    assert all(len(found) == 1 for found in ids)
    assert [submit(queue, i) for i in (3, 4)] == [[], []]
    assert queue.room == 0
    [refused] = submit(queue, 5)
    assert isinstance(refused, NotSent)
    assert isinstance(refused.error, QueueFullError)
    queue.handle(0.0, Sent(LINK, ids[0][0]))
    effects = queue.handle(0.0, response(ids[0][0]))
    assert [type(effect) for effect in effects] == [Finished, PostCapsule]


def test_a_target_with_a_shorter_queue_is_not_overrun() -> None:
    queue = live_queue(depth=8, entries=2)
    assert [len(submit(queue, i)) for i in range(3)] == [1, 1, 0]


def test_identifiers_come_back_as_late_as_possible() -> None:
    queue = live_queue()
    seen = set()
    for _ in range(65535):
        [command_id] = posted(submit(queue, "a"))
        queue.handle(0.0, Sent(LINK, command_id))
        queue.handle(0.0, response(command_id))
        seen.add(command_id)
    assert seen == set(range(0xFFFF))  # FFFFh is none (Base Figure 91)
    assert posted(submit(queue, "a")) == [0]


def test_a_deadline_loses_the_queue_and_the_memory_comes_back_with_its_death() -> None:
    queue = live_queue(depth=3)
    submit(queue, "late", deadline_s=1.0)
    submit(queue, "other", deadline_s=9.0)
    submit(queue, "waiting", deadline_s=9.0)
    assert queue.next_deadline_s == 1.0
    assert queue.tick(0.999) == []
    effects = queue.tick(1.0)
    lost = effects[0]
    assert isinstance(lost, QueueLost)
    assert isinstance(lost.error, CommandDeadlineError)
    assert effects[1:] == [
        KillLink(LINK),
        NotSent("waiting", lost.error),
        InDoubt("late", lost.error),
        InDoubt("other", lost.error),
    ]
    assert queue.state.value == "dying"
    assert queue.handle(50.0, LinkDead(LINK)) == [MemoryFree("late"), MemoryFree("other"), QueueDead(LINK)]
    assert queue.state.value == "dead"


def test_a_late_response_is_no_success() -> None:
    queue = live_queue()
    [command_id] = posted(submit(queue, "a", deadline_s=1.0))
    queue.handle(0.5, Sent(LINK, command_id))
    effects = queue.handle(1.0, response(command_id))  # no tick came between
    assert [type(effect) for effect in effects] == [QueueLost, KillLink, InDoubt]
    assert queue.handle(1.1, response(command_id)) == []


def test_what_waits_too_long_was_not_sent_and_costs_nothing_more() -> None:
    queue = live_queue(depth=2)
    submit(queue, "a", deadline_s=9.0)
    submit(queue, "b", deadline_s=1.0)
    [effect] = queue.tick(1.0)
    assert isinstance(effect, NotSent)
    assert effect.owner == "b"
    assert queue.state is QueueState.LIVE
    [effect] = submit(queue, "c", now_s=1.0, deadline_s=1.0)
    assert isinstance(effect, NotSent)


@pytest.mark.parametrize(
    "event",
    [
        response(40000),  # unknown
        Received(LINK, b"too short"),
        LinkBroken(LINK, BROKEN),
    ],
    ids=["unknown identifier", "short", "broken"],
)
def test_what_cannot_be_trusted_ends_the_queue(event: Received | LinkBroken) -> None:
    queue = live_queue()
    submit(queue, "a")
    assert [type(effect) for effect in queue.handle(0.0, event)] == [QueueLost, KillLink, InDoubt]


def test_a_second_response_ends_the_queue() -> None:
    queue = live_queue()
    [command_id] = posted(submit(queue, "a"))
    queue.handle(0.0, response(command_id))
    assert isinstance(queue.handle(0.0, response(command_id))[0], QueueLost)


def test_connecting_has_a_deadline_and_may_fail() -> None:
    queue = new_queue()
    assert isinstance(submit(queue, "a")[0], NotSent)
    assert queue.next_deadline_s == 5.0
    assert [type(effect) for effect in queue.tick(5.0)] == [QueueLost, KillLink]
    for event in (LinkBroken(LINK, BROKEN), LinkUp(LINK, b"\x01\x00\x10\x00"), LinkUp(LINK, b"")):
        assert [type(effect) for effect in new_queue().handle(0.0, event)] == [QueueLost, KillLink]


def test_requests_for_events_have_no_deadline() -> None:
    queue = live_queue()
    queue.submit(0.0, "event", keep_alive(), math.inf)
    assert queue.next_deadline_s == math.inf
    assert queue.tick(1e9) == []


def test_killing_twice_is_killing_once() -> None:
    queue = live_queue()
    assert len(queue.kill(BROKEN)) == 2
    assert queue.kill(BROKEN) == []
    queue.handle(0.0, LinkDead(LINK))
    assert queue.kill(BROKEN) == []


def test_a_death_that_was_not_asked_for_is_a_broken_contract() -> None:
    with pytest.raises(AssertionError):
        live_queue().handle(0.0, LinkDead(LINK))
