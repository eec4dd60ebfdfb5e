"""Who drives, and that it is one thread at a time, over a session and a transport that only note what is done."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshfusion.jbof.nvme import poller
from meshfusion.jbof.nvme.baton import Baton
from meshfusion.jbof.nvme.pending import Moment
from meshfusion.jbof.nvme.poller import Poller
from meshfusion.jbof.nvme.transfer_effects import TransferDone
from meshfusion.jbof.nvme.transport import PostCapsule

POST = PostCapsule(1, 0, b"")


class Bench:
    """``posted`` and ``told``: who did it, and what. Events that tests put into ``events`` become effects as they are.

    Everything that is done in a turn checks that no other thread is in one.
    """

    def __init__(self) -> None:
        self.posted: list[int] = []
        self.told: list[tuple[int, Any]] = []
        self.crashes: list[BaseException] = []
        self.events: deque[Any] = deque()
        self.transfers = SimpleNamespace(open_count=0, is_all_sent=True)
        self._inside: list[int] = []
        self.poller = Poller(cast(Any, self), cast(Any, self), self.on_effect, self.crashes.append)

    def alone(self) -> None:
        self._inside.append(threading.get_ident())
        time.sleep(0)  # lets another thread in, if it could get in
        assert self._inside.pop() == threading.get_ident()
        assert not self._inside

    # ---- as transport and session --------------------------------------------------------------------------------

    def carry_out(self, now_s: float, effect: Any) -> None:
        self.alone()
        self.posted.append(threading.get_ident())

    def poll(self, now_s: float) -> list[Any]:
        self.alone()
        return [self.events.popleft()] if self.events else []

    def handle(self, now_s: float, event: Any) -> list[Any]:
        return [event]

    def tick(self, now_s: float) -> list[Any]:
        return []

    def on_effect(self, effect: Any) -> None:
        self.alone()
        if isinstance(effect, TransferDone) and isinstance(effect.owner, Moment):
            effect.owner.set()
        self.told.append((threading.get_ident(), effect))


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.poller.end(5.0)
    assert not made.poller.is_alive


@pytest.fixture
def _sleeps_until_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The poller's thread: so that nothing is found in time by chance."""
    monkeypatch.setattr(poller, "_STAND_BY_S", 30.0)
    monkeypatch.setattr(poller, "_IDLE_WAIT_S", 30.0)


def in_thread(action: Callable[[], Any]) -> Future[Any]:
    """On one that is not the main thread."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(action)


def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it does not happen"
        time.sleep(0.001)


def leads(bench: Bench, threads: ThreadPoolExecutor, moment: Moment, timeout_s: float = 5.0) -> Future[bool]:
    """A thread that waits for ``moment``, and drives: the poller's, which may be in a turn, is let rest first."""
    until(lambda: bench.poller._is_idle)
    leader = threads.submit(lambda: bench.poller.wait(moment, time.monotonic() + timeout_s))
    until(lambda: bench.poller._is_led)
    return leader


def tells(owner: object, _: float) -> list[Any]:
    return [TransferDone(owner)]


def posts(_: float) -> list[Any]:
    return [POST]


@pytest.mark.usefixtures("_sleeps_until_woken")
def test_a_thread_posts_by_itself(bench: Bench) -> None:
    def call() -> list[int]:
        for _ in range(20):
            bench.poller.call(posts)
        return [threading.get_ident()]

    until(lambda: bench.poller._is_idle)
    assert in_thread(call).result() * 20 == bench.posted


@pytest.mark.usefixtures("_sleeps_until_woken")
def test_the_main_thread_leaves_it_to_the_poller(bench: Bench) -> None:
    until(lambda: bench.poller._is_idle)
    bench.poller.call(posts)
    until(lambda: bench.posted)
    assert bench.posted != [threading.get_ident()]


def test_who_posts_is_not_told(bench: Bench) -> None:
    """It may hold what the one that is told needs. In order nevertheless."""

    def call() -> int:
        for i in range(200):
            bench.poller.call(partial(tells, i))
        return threading.get_ident()

    caller = in_thread(call).result()
    until(lambda: len(bench.told) == 200)
    assert [effect.owner for _, effect in bench.told] == list(range(200))
    assert caller not in {thread for thread, _ in bench.told}


@pytest.mark.usefixtures("_sleeps_until_woken")
def test_who_waits_drives(bench: Bench) -> None:
    moment = Moment()

    def wait() -> tuple[bool, int]:
        bench.poller.call(posts)
        threading.Timer(0.02, lambda: bench.events.append(TransferDone(moment))).start()
        return bench.poller.wait(moment, time.monotonic() + 5.0), threading.get_ident()

    until(lambda: bench.poller._is_idle)
    has_come, waiter = in_thread(wait).result()
    assert has_come
    assert (waiter, TransferDone(moment)) in bench.told


def test_the_main_thread_waits_while_the_poller_drives(bench: Bench) -> None:
    moment = Moment()
    bench.events.append(TransferDone(moment))
    assert bench.poller.wait(moment, time.monotonic() + 5.0)
    assert bench.told[0][0] != threading.get_ident()


def test_waiting_ends_at_the_deadline(bench: Bench) -> None:
    began_s = time.monotonic()
    assert not in_thread(lambda: bench.poller.wait(Moment(), began_s + 0.05)).result()
    assert 0.05 <= time.monotonic() - began_s < 1.0
    assert not bench.poller.wait(Moment(), time.monotonic() + 0.01)


@pytest.mark.usefixtures("_sleeps_until_woken")
def test_a_call_while_another_thread_drives_is_made_by_that_one(bench: Bench) -> None:
    moment = Moment()
    with ThreadPoolExecutor(2) as threads:
        led = leads(bench, threads, moment)
        threads.submit(bench.poller.call, posts).result()
        until(lambda: bench.posted)
        bench.events.append(TransferDone(moment))
        assert led.result()
    assert bench.posted == [thread for thread, _ in bench.told]


@pytest.mark.usefixtures("_sleeps_until_woken")
def test_who_waits_beside_goes_on_when_the_leader_leaves(bench: Bench) -> None:
    first, second = Moment(), Moment()
    with ThreadPoolExecutor(2) as threads:
        leader = leads(bench, threads, first)
        bench.transfers.open_count = 2
        follower = threads.submit(bench.poller.wait, second, time.monotonic() + 5.0)
        until(lambda: bench.poller._followers and bench.poller._is_standing_by)
        bench.events += [TransferDone(first), TransferDone(second)]
        assert leader.result()
        assert follower.result()
    bench.transfers.open_count = 0


@pytest.mark.usefixtures("_sleeps_until_woken")
def test_who_is_to_be_called_is_not_forgotten(bench: Bench) -> None:
    """Nobody waits: the poller's thread, which is idle, is to do it."""
    moment, called = Moment(), threading.Event()
    until(lambda: bench.poller._is_idle)

    def ask() -> None:
        bench.transfers.open_count = 1
        bench.poller.call(posts)
        moment.then(called.set)
        bench.poller.expect()

    in_thread(ask).result()
    bench.events.append(TransferDone(moment))
    assert called.wait(5.0)
    bench.transfers.open_count = 0


def test_one_at_a_time_and_nothing_is_lost(bench: Bench) -> None:
    """Threads that ask and wait, a thread that only asks, and the main thread."""

    def done(moment: Moment) -> Callable[[float], list[Any]]:
        def call(_: float) -> list[Any]:
            bench.events.append(TransferDone(moment))
            return [POST]

        return call

    def ask_and_wait() -> bool:
        has_come = True
        for _ in range(50):
            moment = Moment()
            bench.poller.call(done(moment))
            has_come &= bench.poller.wait(moment, time.monotonic() + 5.0)
        return has_come

    with ThreadPoolExecutor(5) as threads:
        waiting = [threads.submit(ask_and_wait) for _ in range(4)]
        asking = [threads.submit(bench.poller.call, posts) for _ in range(50)]
        assert ask_and_wait()
        assert all(future.result() for future in waiting)
        assert not any(future.exception() for future in asking)
    until(lambda: len(bench.posted) == 300)
    assert not bench.crashes


@pytest.mark.usefixtures("_sleeps_until_woken")
def test_the_end_waits_for_who_drives(bench: Bench) -> None:
    moment = Moment()
    with ThreadPoolExecutor(1) as threads:
        led = leads(bench, threads, moment, 0.5)
        bench.poller.end(5.0)
        assert not bench.poller.is_alive
        assert not led.result()
    in_thread(lambda: bench.poller.call(posts)).result()
    assert not bench.posted
    bench.poller.end(5.0)  # again is no error


@pytest.mark.usefixtures("_sleeps_until_woken")
def test_the_end_does_not_lie_about_a_turn_that_hangs() -> None:
    bench, moment, release = Bench(), Moment(), threading.Event()
    with ThreadPoolExecutor(1) as threads:
        led = leads(bench, threads, moment, 0.3)
        bench.poller.call(lambda _: [TransferDone(release.wait(5.0))])
        until(lambda: not bench.poller._calls)
        bench.poller.end(0.05)
        assert bench.poller.is_alive
        release.set()
        led.result()
    bench.poller.end(5.0)
    assert not bench.poller.is_alive


def test_a_bug_ends_it_on_whatever_thread(bench: Bench) -> None:
    def bug(_: float) -> list[Any]:
        raise ZeroDivisionError

    in_thread(lambda: bench.poller.call(bug)).result()
    until(lambda: bench.crashes)
    bench.poller.call(posts)
    in_thread(lambda: bench.poller.call(posts)).result()
    time.sleep(0.02)
    assert [type(crash) for crash in bench.crashes] == [ZeroDivisionError]
    assert not bench.posted


def test_a_callback_may_ask_for_more(bench: Bench) -> None:
    first, second = Moment(), Moment()

    def more(_: float) -> list[Any]:
        bench.events.append(TransferDone(second))
        return [POST]

    first.then(lambda: bench.poller.call(more))
    bench.events.append(TransferDone(first))
    assert in_thread(lambda: bench.poller.wait(second, time.monotonic() + 5.0)).result()


def test_baton() -> None:
    baton = Baton()
    assert baton.take()
    assert baton.is_taken
    assert not baton.take()
    baton.give()
    assert not baton.is_taken
    with pytest.raises(AssertionError):
        baton.give()
    assert baton.take()
