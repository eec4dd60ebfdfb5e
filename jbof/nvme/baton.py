"""Leave to do what one thread at a time may do, for threads that do something else when they do not get it."""

from __future__ import annotations

from collections import deque


class Baton:
    """A lock that is never waited for. Taking and giving are the atomic ends of a queue of one.

    ``threading.Lock`` would do, but up to Python 3.13 it reads the clock whenever it is acquired, which costs as much
    as a good part of a command where that is a system call (virtual machines without a stable clock).
    """

    def __init__(self) -> None:
        self._free = deque([None])

    @property
    def is_taken(self) -> bool:
        return not self._free

    def take(self) -> bool:
        """Did this thread get it?"""
        try:
            self._free.pop()
        except IndexError:
            return False
        return True

    def give(self) -> None:
        assert not self._free, "it was not taken"
        self._free.append(None)
