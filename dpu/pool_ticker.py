"""What a served pool does now and then, whether anybody asks or not: leases lapse, the silent are probed, the curator
learns."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from meshfusion.dpu.pool_holders import PoolHolders
from meshfusion.dpu.pool_tending import Adoption
from meshfusion.dpu.pool_transactions import Transactions
from meshfusion.dpu.store.store import Store

logger = logging.getLogger("meshfusion.pool")

TICK_S = 1.0


class Ticker:
    """On a thread of its own, from :meth:`start` on. ``mutex``: the pool's."""

    def __init__(
        self,
        store: Store,
        transactions: Transactions,
        holders: PoolHolders,
        adoption: Adoption,
        *,
        mutex: threading.Lock,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._transactions, self._holders, self._adoption = store, transactions, holders, adoption
        self._mutex, self._clock = mutex, clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="meshfusion-tick", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Begin nothing more; :meth:`join` waits for what is under way."""
        self._stop.set()

    def join(self) -> None:
        if self._thread.is_alive():
            self._thread.join()

    def _loop(self) -> None:
        while not self._stop.wait(TICK_S):
            for do in (self._tick, self._holders.probe, self._tend):
                try:
                    do(self._clock())
                except Exception:  # without ticks nothing would lapse, and nobody would be fenced, from then on
                    logger.exception("a part of the pool's tick failed")

    def _tick(self, now_s: float) -> None:
        with self._mutex:
            self._store.tick(now_s)
            self._transactions.submit(self._store.summarize(now_s))
            self._holders.wake_for_condemned()

    def _tend(self, now_s: float) -> None:
        """Lookups come in between."""
        self._adoption.go_on(now_s)
        has_more = True
        while has_more and not self._stop.is_set():
            with self._mutex:
                has_more = self._store.tend(now_s)
            time.sleep(0)  # a mutex is not handed on by being released: whoever waits has to run
