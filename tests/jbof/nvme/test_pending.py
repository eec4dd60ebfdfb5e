"""The moment that waiters and callbacks share: each call is made once, whoever comes first."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from meshfusion.jbof.nvme.memory import MemoryInUseError, RegisteredRegion
from meshfusion.jbof.nvme.pending import Moment
from meshfusion.jbof.nvme.sgl import RemoteMemory


def test_a_moment_that_does_not_come_is_waited_for_as_long_as_said() -> None:
    moment = Moment()
    began_s = time.monotonic()
    assert not moment.wait(0.05)
    assert time.monotonic() - began_s >= 0.05
    assert not moment.wait(0)
    assert not moment._calls, "who does not wait any more leaves nothing behind"


def test_who_waits_is_woken() -> None:
    moment = Moment()
    threading.Timer(0.02, moment.set).start()
    assert moment.wait(5.0)
    assert moment.wait(0)


def test_calls_are_made_in_order_and_late_ones_at_once() -> None:
    moment, log = Moment(), []
    moment.then(lambda: log.append(1))
    moment.then(lambda: log.append(2))
    assert log == []
    moment.set()
    assert log == [1, 2]
    moment.then(lambda: log.append(3))
    assert log == [1, 2, 3]
    moment.set()
    assert log == [1, 2, 3]


def test_each_call_is_made_once_whoever_comes_first() -> None:
    counts: Counter[int] = Counter()
    with ThreadPoolExecutor(2) as threads:
        for i in range(2000):
            moment = Moment()
            setting = threads.submit(moment.set)
            asking = threads.submit(moment.then, lambda i=i: counts.update([i]))  # type: ignore[misc]
            setting.result()
            asking.result()
    assert counts == dict.fromkeys(range(2000), 1)


def test_a_region_is_closed_or_in_use_never_both() -> None:
    """A user and a closer at the same time: one of them is refused."""
    with ThreadPoolExecutor(2) as threads:
        for _ in range(2000):
            region = RegisteredRegion(RemoteMemory(0, 1, 7), None, lambda: None)
            using, closing = threads.submit(region.acquire), threads.submit(region.close)
            is_used = not isinstance(using.exception(), AssertionError)
            is_closed = not isinstance(closing.exception(), MemoryInUseError)
            assert (region.use_count, region.is_closed) == (int(is_used), is_closed)
            assert not (is_used and is_closed)


def test_a_region_that_is_closed_while_a_transfer_enters_is_not_used() -> None:
    region = RegisteredRegion(RemoteMemory(0, 1, 7), None, lambda: None)

    class ClosesFirst(list[None]):
        def append(self, item: None) -> None:
            region.close()
            super().append(item)

    region._uses = ClosesFirst()
    with pytest.raises(AssertionError, match="closed"):
        region.acquire()
    assert (region.is_closed, region.use_count) == (True, 0)


def test_a_region_that_a_transfer_enters_while_it_is_closed_stays_open() -> None:
    region = RegisteredRegion(RemoteMemory(0, 1, 7), None, lambda: None)

    class EntersLate(list[None]):
        def __len__(self) -> int:
            if not super().__len__():
                self.append(None)  # a transfer that has not looked yet
            return super().__len__()

    region._uses = EntersLate()
    with pytest.raises(MemoryInUseError):
        region.close()
    assert not region.is_closed


def test_releasing_what_is_not_used_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        RegisteredRegion(RemoteMemory(0, 1, 7), None, lambda: None).release()
