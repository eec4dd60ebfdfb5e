"""The thread that drives a session over a transport, in turns of bounded work.

It polls: pyverbs' waiting calls would stop every thread of the process. Between turns that bring nothing it yields the
processor, then sleeps for longer and longer while commands are under way, and waits to be woken while none is.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from meshfusion.jbof.nvme.rdma import Transport
from meshfusion.jbof.nvme.session import Session
from meshfusion.jbof.nvme.transfer_effects import SessionEffect
from meshfusion.jbof.nvme.transport import KillLink, OpenLink, PostCapsule

Call = Callable[[float], list[SessionEffect]]

_CALLS_PER_TURN: Final = 64
_TICK_S: Final = 0.001
_SPIN_S: Final = 0.0005  # after the last event
_SHORT_SLEEP_S: Final = 0.00005
_LONG_SLEEP_S: Final = 0.001
_IDLE_WAIT_S: Final = 0.005


class Poller:
    """``on_effect`` gets all effects that are not the transport's; ``on_crash`` the exception that ends the thread.

    Both are called on the poller's thread and must not wait.
    """

    def __init__(
        self,
        session: Session,
        transport: Transport,
        on_effect: Callable[[SessionEffect], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._session = session
        self._transport = transport
        self._on_effect = on_effect
        self._on_crash = on_crash
        self._calls: deque[Call] = deque()
        self._wake = threading.Event()
        self._is_ending = False
        self._next_tick_s = 0.0
        self._last_event_s = 0.0
        self._thread = threading.Thread(target=self._run, name="nvme-poller", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def call(self, action: Call) -> None:
        """Let the thread do ``action`` with the time, soon, and act on its effects. In the order of calls."""
        self._calls.append(action)
        self._wake.set()

    def end(self, timeout_s: float) -> None:
        """No more turns. Returns when the thread has ended, at the latest after ``timeout_s``."""
        self._is_ending = True
        self._wake.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._is_ending:
                self._rest(self._turn(time.monotonic()))
        except BaseException as error:
            self._on_crash(error)

    def _turn(self, now_s: float) -> bool:
        """Did anything happen?"""
        calls = min(len(self._calls), _CALLS_PER_TURN)
        for _ in range(calls):
            self._act(now_s, self._calls.popleft()(now_s))
        events = self._transport.poll(now_s)
        now_s = time.monotonic()  # later than what the events tell of: a late response is not taken for one in time
        for event in events:
            self._act(now_s, self._session.handle(now_s, event))
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + _TICK_S
            self._act(now_s, self._session.tick(now_s))
        if not calls and not events:
            return False
        self._last_event_s = now_s
        return True

    def _act(self, now_s: float, effects: list[SessionEffect]) -> None:
        for effect in effects:
            if isinstance(effect, PostCapsule | OpenLink | KillLink):
                self._transport.carry_out(now_s, effect)
            else:
                self._on_effect(effect)

    def _rest(self, was_busy: bool) -> None:
        if was_busy:
            return
        quiet_s = time.monotonic() - self._last_event_s
        if quiet_s < _SPIN_S:
            time.sleep(0)  # for other threads: it lets the global lock go, which the next line may not
            os.sched_yield()
        elif self._session.transfers.open_count:
            time.sleep(_SHORT_SLEEP_S if quiet_s < 10 * _SPIN_S else _LONG_SLEEP_S)
        else:
            self._wake.wait(_IDLE_WAIT_S)
            self._wake.clear()
