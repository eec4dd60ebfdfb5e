"""Commands whose memory is given through windows: no end before the key is dead, and no key twice."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.nvme.io_commands import read, write
from meshfusion.jbof.nvme.key_scope import KeyScope
from meshfusion.jbof.nvme.queue import QueuePair
from meshfusion.jbof.nvme.queue_effects import Finished, InDoubt, MemoryFree, QueueDead, QueueLost
from meshfusion.jbof.nvme.sgl import RemoteMemory, window_data
from meshfusion.jbof.nvme.transport import (
    Bind,
    InvalidateKey,
    KeyInvalidated,
    KillLink,
    LinkDead,
    LinkUp,
    PostCapsule,
    Received,
    Sent,
)
from meshfusion.jbof.nvme.windows import KeyWindows, next_key
from tests.jbof.nvme.queue_bench import LINK, accept, live_queue, new_queue, queue_with_windows, response, submit

MEMORY = RemoteMemory(0x7F0011223000, 8192, 5)  # of region 5
READ = read(1, 0, 2, window_data(MEMORY))
WRITE = write(1, 0, 2, window_data(MEMORY))


def post(queue: QueuePair, owner: object = "a", command: Any = READ) -> PostCapsule:
    [effect] = queue.submit(0.0, owner, command, 10.0)
    assert isinstance(effect, PostCapsule)
    return effect


def key_of(effect: PostCapsule) -> int:
    assert effect.bind is not None
    return effect.bind.key


def answered_with(effect: PostCapsule, key: int) -> Received:
    return response(effect.command_id)._replace(invalidated_key=key)


def test_a_command_binds_a_window_and_names_its_key() -> None:
    """Base Figure 122, RDMA Figure 10: the key at byte 11 of SGL entry 1, and the sub type to invalidate it."""
    effect = post(queue_with_windows())
    assert effect.bind == Bind(0, 0x010000, MEMORY, is_written=True)  # after 0100FF, whose last 8 bits go round
    address, rest = struct.unpack_from("<QQ", effect.capsule, 24)
    assert (address, rest & 0xFFFFFF) == (MEMORY.address, MEMORY.length_bytes)
    assert (rest >> 24 & 0xFFFFFFFF, rest >> 56) == (0x010000, 0x4F)


def test_a_write_lets_its_memory_be_read_only() -> None:
    assert post(queue_with_windows(), command=WRITE).bind == Bind(0, 0x010000, MEMORY, is_written=False)


def test_a_key_that_the_target_invalidated_counts_as_sent_but_keeps_its_place() -> None:
    queue = queue_with_windows(depth=2)
    effect = post(queue)
    assert [type(e) for e in queue.handle(1.0, answered_with(effect, key_of(effect)))] == [Finished]
    assert queue.load == 1
    assert queue.submit(1.0, "b", READ, 10.0) == []  # waits for the place
    [after] = queue.handle(1.0, Sent(LINK, effect.command_id))
    assert isinstance(after, PostCapsule)
    assert after.bind == Bind(0, 0x010001, MEMORY, is_written=True)


def test_a_key_that_the_target_left_is_invalidated_before_the_command_ends() -> None:
    queue = queue_with_windows(depth=2)
    effect = post(queue)
    assert queue.handle(0.0, Sent(LINK, effect.command_id)) == []
    assert queue.submit(0.0, "b", READ, 10.0) == []
    invalidation = InvalidateKey(LINK, effect.command_id, key_of(effect))
    assert queue.handle(1.0, response(effect.command_id, status=0x281)) == [invalidation]
    assert queue.load == 2
    [end, after] = queue.handle(1.0, KeyInvalidated(LINK, effect.command_id))
    assert isinstance(end, Finished)
    assert end.owner == "a"
    assert isinstance(after, PostCapsule)
    assert key_of(after) == 0x010001


def test_a_dead_key_is_not_enough_while_the_capsule_may_be_read_again() -> None:
    queue = queue_with_windows()
    effect = post(queue)
    queue.handle(0.0, response(effect.command_id))
    assert queue.handle(0.0, KeyInvalidated(LINK, effect.command_id)) == []
    assert [type(e) for e in queue.handle(0.0, Sent(LINK, effect.command_id))] == [Finished]


@pytest.mark.parametrize("key", [0x020001, 0x010001, 0x0100FF], ids=["of another command", "next", "before"])
def test_a_target_that_invalidates_another_key_is_not_trusted(key: int) -> None:
    queue = queue_with_windows()
    first, second = post(queue, "a"), post(queue, "b")
    assert (key_of(first), key_of(second)) == (0x010000, 0x020001)
    effects = queue.handle(1.0, answered_with(first, key))
    assert [type(e) for e in effects] == [QueueLost, KillLink, InDoubt, InDoubt]
    assert queue.handle(2.0, LinkDead(LINK)) == [MemoryFree("a"), MemoryFree("b"), QueueDead(LINK)]


def test_a_key_where_none_was_told_is_not_trusted() -> None:
    queue = live_queue()
    [effect] = submit(queue, "a")
    assert isinstance(effect, PostCapsule)
    assert isinstance(queue.handle(1.0, answered_with(effect, 7))[0], QueueLost)


def test_a_key_that_does_not_die_in_time_leaves_the_command_in_doubt() -> None:
    queue = queue_with_windows()
    effect = post(queue)
    queue.handle(0.0, Sent(LINK, effect.command_id))
    queue.handle(1.0, response(effect.command_id))
    assert [type(e) for e in queue.tick(10.0)] == [QueueLost, KillLink, InDoubt]
    assert queue.handle(11.0, KeyInvalidated(LINK, effect.command_id)) == []
    assert queue.handle(11.0, LinkDead(LINK)) == [MemoryFree("a"), QueueDead(LINK)]


def test_a_place_whose_send_never_completes_is_not_kept_for_ever() -> None:
    """The owner of the command has heard of its end; the queue still dies at the deadline."""
    queue = queue_with_windows()
    effect = post(queue)
    queue.handle(1.0, answered_with(effect, key_of(effect)))
    assert [type(e) for e in queue.tick(10.0)] == [QueueLost, KillLink]
    assert queue.handle(11.0, LinkDead(LINK)) == [QueueDead(LINK)]


def test_an_invalidation_that_was_not_asked_for_is_a_broken_contract() -> None:
    queue = queue_with_windows()
    effect = post(queue)
    with pytest.raises(AssertionError, match="not asked for"):
        queue.handle(0.0, KeyInvalidated(LINK, effect.command_id))


def test_a_transport_without_windows_is_a_broken_contract() -> None:
    queue = new_queue(key_scope=KeyScope.COMMAND)
    with pytest.raises(AssertionError, match="without windows"):
        queue.handle(0.0, LinkUp(LINK, accept(100)))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4, unique_by=lambda key: key >> 8), st.data())
def test_a_key_comes_back_after_256_binds_of_its_window_and_not_before(keys: list[int], data: st.DataObject) -> None:
    windows = KeyWindows(keys)
    used: dict[int, list[int]] = {window: [key] for window, key in enumerate(keys)}
    bound: list[Bind] = []
    for _ in range(data.draw(st.integers(1, 60))):
        if len(bound) == len(keys) or (bound and data.draw(st.booleans())):
            windows.give_back(bound.pop(data.draw(st.integers(0, len(bound) - 1))))
        else:
            bound.append(windows.bind(MEMORY, is_written=True))
            used[bound[-1].window].append(bound[-1].key)
    assert all(len(set(of_one)) == len(of_one) for of_one in used.values())
    assert all({key >> 8 for key in of_one} == {keys[window] >> 8} for window, of_one in used.items())


def test_keys_go_round() -> None:
    keys = [0xABCDEF07]
    for _ in range(256):
        keys.append(next_key(keys[-1]))
    assert len(set(keys)) == 256
    assert keys[256] == keys[0]
    assert {key >> 8 for key in keys} == {0xABCDEF}
