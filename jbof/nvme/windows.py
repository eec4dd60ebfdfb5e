"""The memory windows of one queue pair, and the keys that they go through. No I/O.

A key has 24 bits that the device chose and 8 that are the consumer's (InfiniBand Architecture Specification 10.6.7).
Each bind takes the next of these 8, so that the key of a command that has ended opens nothing, not even what its window
opens next; after 256 binds of the same window it would. Windows take turns, so that this takes as long as possible.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from meshfusion.jbof.nvme.sgl import RemoteMemory
from meshfusion.jbof.nvme.transport import Bind

_CONSUMER_BITS = 0xFF


class KeyWindows:
    """``keys``: of each window, as the device made it. None is bound."""

    def __init__(self, keys: Sequence[int]) -> None:
        self._keys = list(keys)
        self._free = deque(range(len(keys)))

    def __len__(self) -> int:
        return len(self._keys)

    def bind(self, memory: RemoteMemory, *, is_written: bool) -> Bind:
        """Take a window, of which there must be a free one. ``is_written``: by the target, which else reads."""
        window = self._free.popleft()
        key = next_key(self._keys[window])
        self._keys[window] = key
        return Bind(window, key, memory, is_written)

    def give_back(self, bind: Bind) -> None:
        """Its key is dead."""
        assert self._keys[bind.window] == bind.key
        assert bind.window not in self._free
        self._free.append(bind.window)


def next_key(key: int) -> int:
    """As ibv_inc_rkey(3)."""
    return key & ~_CONSUMER_BITS | key + 1 & _CONSUMER_BITS
