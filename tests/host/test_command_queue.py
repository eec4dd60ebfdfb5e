"""Commands between two threads: their order, their bound, their end."""

from __future__ import annotations

import logging
import threading

import pytest

from meshfusion.host.command_queue import CommandQueue


def test_they_come_in_their_order_and_what_is_in_it_is_taken_after_its_end() -> None:
    taken: list[int] = []
    commands = CommandQueue("things", most=3)
    for i in range(3):
        assert commands.offer(lambda i=i: taken.append(i))  # type: ignore[misc]
    commands.close()
    while (command := commands.take()) is not None:
        command()
    assert taken == [0, 1, 2]
    assert commands.take() is None


def test_no_more_than_so_many_wait_and_that_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    commands = CommandQueue("things", most=3)
    nothing = lambda: None  # noqa: E731
    with caplog.at_level(logging.WARNING, logger="meshfusion.client"):
        assert [commands.offer(nothing, behind=2) for _ in range(4)] == [True, True, False, False]
        assert [commands.offer(nothing) for _ in range(3)] == [True, False, False]
        assert [record.getMessage() for record in caplog.records] == [
            "too many things wait for the chunk service: not all are taken"
        ]
        for _ in range(3):
            commands.take()
        assert [commands.offer(nothing) for _ in range(4)] == [True, True, True, False]
        assert len(caplog.records) == 2, "it was empty in between"


def test_one_that_waits_is_woken_by_a_command_and_by_the_end() -> None:
    commands, woken = CommandQueue("things", most=1), []
    taker = threading.Thread(target=lambda: woken.extend([commands.take(), commands.take()]))
    taker.start()
    commands.offer(woken.clear)
    while not commands.offer(woken.clear):
        pass
    taker.join(10.0)
    assert woken == [woken.clear, woken.clear]
    last = threading.Thread(target=lambda: woken.append(commands.take()))
    last.start()
    commands.close()
    last.join(10.0)
    assert woken[-1] is None
