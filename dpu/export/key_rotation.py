"""Whose key is replaced, and when. No I/O, no clock, no lock.

A key is replaced when somebody asks for it, or when it has lived for its time; and only that of a host that says which
one it has (:class:`~meshfusion.dpu.api.types.HeartbeatRequest`). An engine of a release that does not would never learn
of another one, and could not connect again. Nor is one replaced that its target does not ask for yet: so a host has two
at most, that which its target asks for and the one after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

RETRY_S: Final = 60.0
"""A file that could not be written is tried again after so long."""


@dataclass(frozen=True, slots=True)
class ServedKey:
    """The key that a host is meant to have. ``is_there``: its target asks for it. ``age_s``: it had when this was
    asked, by a clock that may have been set meanwhile; counts only when it is seen first, as after a restart."""

    id: str
    is_there: bool = True
    age_s: float = 0.0


class KeyRotation:
    """``lifetime_s``: of a key; infinite: as long as its host's."""

    def __init__(self, lifetime_s: float = math.inf) -> None:
        self._lifetime_s = lifetime_s
        self._told: dict[str, str] = {}  # by incarnation, the id of the key that it has
        self._end_s: dict[str, float] = {}
        self._asked: set[str] = set()
        self._retry_s: dict[str, float] = {}  # of those whose file could not be written

    def heard(self, incarnation: str, key_id: str) -> None:
        """It has this key."""
        self._told[incarnation] = key_id

    def ask(self, incarnation: str) -> None:
        """Its key is to be replaced, once it has said which one it has."""
        self._asked.add(incarnation)

    def is_asked(self, incarnation: str) -> bool:
        """And it has not been replaced yet."""
        return incarnation in self._asked

    def has_failed(self, incarnation: str) -> bool:
        """It could not be replaced when that was tried last, and is tried again."""
        return incarnation in self._retry_s

    def known_by(self, incarnation: str) -> str:
        """The id of the key that it says it has; empty: it says nothing."""
        return self._told.get(incarnation, "")

    def due(self, now_s: float, served: Mapping[str, ServedKey]) -> tuple[str, ...]:
        """Whose key is to be replaced now. ``served``: of all that are. One that has not come to know its last key is
        left alone by the clock."""
        self._told = {one: key_id for one, key_id in self._told.items() if one in served}
        self._retry_s = {one: retry_s for one, retry_s in self._retry_s.items() if one in served}
        self._asked &= served.keys()
        self._end_s = {
            one: self._end_s.get(one, now_s + max(0.0, self._lifetime_s - key.age_s)) for one, key in served.items()
        }
        return tuple(one for one, key in served.items() if self._is_due(now_s, one, key))

    def _is_due(self, now_s: float, incarnation: str, key: ServedKey) -> bool:
        known_id = self.known_by(incarnation)
        if not known_id or not key.is_there or now_s < self._retry_s.get(incarnation, now_s):
            return False
        return incarnation in self._asked or (now_s >= self._end_s[incarnation] and known_id == key.id)

    def replaced(self, now_s: float, incarnation: str) -> None:
        self._asked.discard(incarnation)
        self._retry_s.pop(incarnation, None)
        self._end_s[incarnation] = now_s + self._lifetime_s

    def failed(self, now_s: float, incarnation: str) -> None:
        """It has the one that it had."""
        self._retry_s[incarnation] = now_s + min(RETRY_S, self._lifetime_s)
