"""Who drives a session over a transport, in turns of bounded work: a thread of its own, or whoever waits.

One thread at a time drives: whoever holds the baton. A thread that asks for something posts it itself if nobody drives,
and one that waits drives until it has what it waits for, since a change of threads costs more than a command. The
poller's own thread drives what nobody waits for, and stands by while others drive. The main thread leaves all to it:
a signal's handler may raise there, in the middle of the state machine.

Driving is polling: pyverbs' waiting calls would stop every thread of the process. After turns that bring nothing the
driver sleeps, for longer and longer; and it sleeps now and then when it is busy, or other threads would get the global
lock only every 5 ms (sys.getswitchinterval).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from meshfusion.jbof.nvme.baton import Baton
from meshfusion.jbof.nvme.pending import Moment
from meshfusion.jbof.nvme.rdma import Transport
from meshfusion.jbof.nvme.session import Session
from meshfusion.jbof.nvme.transfer_effects import SessionEffect
from meshfusion.jbof.nvme.transport import TransportEffect

Call = Callable[[float], list[SessionEffect]]

_CALLS_PER_TURN: Final = 64
_TICK_S: Final = 0.001
_MAX_TURN_S: Final = 0.001  # how long a turn of the poller's thread may take
_SPIN_S: Final = 0.0001  # after the last event, by a thread that waits
_PAUSES_S: Final = 0.0005  # after the last event, in pauses, by the poller's
_PAUSE_S: Final = 0.000001  # as short as a sleep can be: about 0.06 ms
_MAX_HOLD_S: Final = 0.001  # between pauses: what an engine may have to wait
_SHORT_SLEEP_S: Final = 0.00005
_LONG_SLEEP_S: Final = 0.001
_LONG_QUIET_S: Final = 0.005
_STAND_BY_S: Final = 0.002
_IDLE_WAIT_S: Final = 0.005


class Poller:
    """``on_effect`` gets all effects that are not the transport's, in order; ``on_crash`` the exception that ends it.

    Both are called on the thread that drives, one call at a time, and must not wait.
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
        self._driving = Baton()
        self._calls: deque[Call] = deque()
        self._followers: deque[None] = deque()  # one for each thread that waits while another drives
        self._wake = threading.Event()
        self._is_idle = False  # the poller's thread, as in the next line
        self._is_standing_by = False
        self._is_ending = False
        self._is_dead = False
        # The following belong to who drives.
        self._is_led = False  # by a thread that waits
        self._lead_count = 0
        self._untold: deque[SessionEffect] = deque()
        self._next_tick_s = 0.0
        self._last_turn_s = 0.0
        self._last_post_s = 0.0
        self._last_event_s = 0.0
        self._last_rest_s = 0.0
        self._thread = threading.Thread(target=self._run, name="nvme-poller", daemon=True)
        self._thread.start()

    # ---- for any thread ------------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """May still touch session and transport."""
        return not self._is_dead

    def call(self, action: Call, asked_s: float | None = None) -> None:
        """Do ``action``, soon, and act on its effects. In the order of calls. ``asked_s``: the time, if it is known."""
        self._calls.append(action)  # first: who drives now looks for calls when it stops
        if not _is_main_thread() and self._driving.take():
            self._drive(lambda: self._post(time.monotonic() if asked_s is None else asked_s))
            if not self._calls and not self._untold and self._session.transfers.is_all_sent:
                return  # the rest is for whoever waits, or is to be called
        self._hand_on()

    def wait(self, moment: Moment, deadline_s: float) -> bool:
        """Has ``moment`` come? Returns then, or at ``deadline_s``."""
        if not _is_main_thread():
            # If another thread drives, is it just the poller's? Its turn ends soon.
            if self._driving.take() or (not self._is_led and not moment.wait(_MAX_TURN_S) and self._driving.take()):
                self._drive(lambda: self._lead(moment, deadline_s))
                self._hand_on()
                self._pause_if_due()
            if moment.is_set():
                return True
        self._followers.append(None)
        try:
            self._hand_on()
            return moment.wait(deadline_s - time.monotonic())
        finally:
            self._followers.pop()

    def expect(self) -> None:
        """Somebody is to be told of something that no thread may be waiting for."""
        if (self._is_idle or self._is_standing_by) and not self._driving.is_taken:
            self._wake.set()

    def end(self, timeout_s: float) -> None:
        """No more turns. Returns when nobody drives any more, at the latest after ``timeout_s``."""
        if self._is_dead:
            return
        end_s = time.monotonic() + timeout_s
        self._is_ending = True
        self._wake.set()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            # Never given back: nobody drives from now on.
            while not (is_ours := self._driving.take()) and time.monotonic() < end_s:
                time.sleep(_LONG_SLEEP_S)
            self._is_dead = is_ours

    def _pause_if_due(self) -> None:
        """Threads that want the global lock get it here, for one that waits in vain asks for it only after 5 ms."""
        if self._last_turn_s - self._last_rest_s >= _MAX_HOLD_S:
            self._last_rest_s = self._last_turn_s
            time.sleep(_PAUSE_S)

    def _hand_on(self) -> None:
        """Wake the poller's thread if it has something to do and does not know."""
        if self._is_idle or (self._is_standing_by and self._has_work and not self._driving.is_taken):
            self._wake.set()

    @property
    def _has_work(self) -> bool:
        return bool(self._calls or self._untold or self._followers)

    # ---- for the thread that drives ------------------------------------------------------------------------------

    def _drive(self, work: Callable[[], object]) -> None:
        """Do ``work`` by the thread that has the baton, and give it back."""
        try:
            if not self._is_ending:
                work()
        except BaseException as error:
            self._is_ending = True
            self._on_crash(error)
        finally:
            self._driving.give()

    def _post(self, asked_s: float) -> None:
        """What was called for, but telling: this thread may hold what the one that is told needs."""
        now_s = self._last_post_s = max(asked_s, self._last_turn_s, self._last_post_s)  # others may have come between
        for _ in range(min(len(self._calls), _CALLS_PER_TURN)):
            for effect in self._calls.popleft()(now_s):
                if not self._carry_out(now_s, effect):
                    self._untold.append(effect)

    def _lead(self, moment: Moment, deadline_s: float) -> None:
        """Turns until ``moment`` has come, or ``deadline_s``."""
        self._is_led = True
        self._lead_count += 1
        while not (moment.is_set() or self._is_ending):
            self._turn()
            now_s = self._last_turn_s
            if moment.is_set() or now_s >= deadline_s:
                break
            quiet_s = now_s - self._last_event_s
            if quiet_s < _SPIN_S and now_s - self._last_rest_s < _MAX_HOLD_S:
                os.sched_yield()
            else:
                self._last_rest_s = now_s
                _sleep(quiet_s)
        self._is_led = False

    def _turn(self) -> None:
        now_s = time.monotonic()
        is_busy = bool(self._calls or self._untold)
        while self._untold:
            self._on_effect(self._untold.popleft())
        for _ in range(min(len(self._calls), _CALLS_PER_TURN)):
            self._act(now_s, self._calls.popleft()(now_s))
        events = self._transport.poll(now_s)
        if events:
            is_busy = True
            now_s = time.monotonic()  # later than what they tell of: a late response is not taken for one in time
            for event in events:
                self._act(now_s, self._session.handle(now_s, event))
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + _TICK_S
            self._act(now_s, self._session.tick(now_s))
        if is_busy:
            self._last_event_s = now_s
        self._last_turn_s = now_s

    def _act(self, now_s: float, effects: list[SessionEffect]) -> None:
        for effect in effects:
            if not self._carry_out(now_s, effect):
                self._on_effect(effect)

    def _carry_out(self, now_s: float, effect: SessionEffect) -> bool:
        """Is it the transport's?"""
        if isinstance(effect, TransportEffect):
            self._transport.carry_out(now_s, effect)
            return True
        return False

    # ---- the poller's own thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        seen = 0
        while not self._is_ending:
            # Who has just led will do so again: between its waits, its baton is not taken away.
            others_lead = self._lead_count != seen and not self._has_work
            seen = self._lead_count
            if not others_lead and self._driving.take():
                self._drive(self._turn)
                self._rest()
            else:
                self._stand_by()

    def _rest(self) -> None:
        """After a turn that brought nothing, and now and then after others, for threads that want the global lock."""
        quiet_s = self._last_turn_s - self._last_event_s
        if quiet_s <= 0 and self._last_turn_s - self._last_rest_s < _MAX_HOLD_S:
            return
        if quiet_s < _PAUSES_S or self._session.transfers.open_count:
            self._last_rest_s = self._last_turn_s
            _sleep(quiet_s)
            return
        self._is_idle = True
        if not (self._calls or self._untold or self._session.transfers.open_count):
            self._wake.wait(_IDLE_WAIT_S)
            self._wake.clear()
        self._is_idle = False

    def _stand_by(self) -> None:
        self._is_standing_by = True
        if self._driving.is_taken or not self._has_work:
            self._wake.wait(_STAND_BY_S)
            self._wake.clear()
        self._is_standing_by = False


def _sleep(quiet_s: float) -> None:
    """``quiet_s``: since the last event."""
    if quiet_s < _PAUSES_S:
        time.sleep(_PAUSE_S)
    elif quiet_s < _LONG_QUIET_S:
        time.sleep(_SHORT_SLEEP_S)
    else:
        time.sleep(_LONG_SLEEP_S)


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident
