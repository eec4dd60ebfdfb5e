"""Work from many threads, done by one of them at a time, without any of them waiting."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Serial(Generic[T]):
    """``work`` is called with everything that was put, in order, and never by two threads at a time.

    Whoever finds nobody at work works until nothing is left. What work itself puts is done after it.
    """

    def __init__(self, work: Callable[[T], None]) -> None:
        self._work = work
        self._items: deque[T] = deque()
        self._at_work = threading.Lock()

    def put(self, item: T) -> None:
        self._items.append(item)
        # Looked at again after the lock is let go: who put something meanwhile has gone away.
        while self._items and self._at_work.acquire(blocking=False):
            try:
                while self._items:
                    self._work(self._items.popleft())
            finally:
                self._at_work.release()
