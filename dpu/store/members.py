"""Which chunks lie in which segment, as far as a policy needs it: 14 bytes for each chunk.

The index knows this too, on the medium; here it is at hand for valuing thousands of chunks at a time. What was dropped
alone stays listed until its segment is emptied: the policy knows that it is not held any more.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

import numpy as np

from meshfusion.jbof.policy.chain import Indexes, Keys

LAST_POSITION: Final = 2**32 - 1


class GroupMembers(NamedTuple):
    """Chunks of one of the policy's groups: the first 64 bits of each one's key, and its index in its chain; what lies
    behind :data:`LAST_POSITION`, as writers may say, counts as if it lay there."""

    group: int
    keys: Keys
    positions: Indexes


class _Columns:
    __slots__ = ("groups", "keys", "positions")

    def __init__(self) -> None:
        self.keys = array("Q")
        self.groups = array("H")
        self.positions = array("I")


class Members:
    """By segment: those that something was added to, or that were cleared."""

    def __init__(self) -> None:
        self._columns: dict[int, _Columns] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __contains__(self, segment: int) -> bool:
        return segment in self._columns

    def count_in(self, segment: int) -> int:
        columns = self._columns.get(segment)
        return len(columns.keys) if columns else 0

    def add(self, segment: int, group: int, key: int, position: int) -> None:
        columns = self._columns.setdefault(segment, _Columns())
        columns.keys.append(key)
        columns.groups.append(group)
        columns.positions.append(min(position, LAST_POSITION))

    def by_group(self, segment: int) -> list[GroupMembers]:
        """Copies: what is added later is not in them."""
        columns = self._columns.get(segment)
        if columns is None:
            return []
        keys = np.array(columns.keys, np.uint64)
        groups = np.array(columns.groups, np.uint16)
        positions = np.array(columns.positions, np.intp)
        return [
            GroupMembers(int(group), keys[groups == group], positions[groups == group]) for group in np.unique(groups)
        ]

    def discard(self, segment: int, keys: Collection[int]) -> None:
        """Those with these keys are not in the segment any more."""
        columns = self._columns.get(segment)
        if columns is None:
            return
        self.clear(segment)
        for key, group, position in zip(columns.keys, columns.groups, columns.positions, strict=True):
            if key not in keys:
                self.add(segment, group, key, position)

    def forget(self, segment: int) -> None:
        """There is no such segment any more."""
        del self._columns[segment]

    def clear(self, segment: int) -> None:
        """The segment is known, and nothing is in it."""
        self._columns[segment] = _Columns()
