"""Whose key is replaced, and when. No I/O, no clock, no lock.

A key is replaced when somebody asks for it, or when it has lived for its time; and only that of a host that says which
one it has (:class:`~meshfusion.dpu.api.types.HeartbeatRequest`). An engine of a release that does not would never learn
of another one, and could not connect again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

RETRY_S: Final = 60.0
"""A file that could not be written is tried again after so long."""


class KeyRotation:
    """``lifetime_s``: of a key; infinite: as long as its host's."""

    def __init__(self, lifetime_s: float = math.inf) -> None:
        self._lifetime_s = lifetime_s
        self._told: dict[str, str] = {}  # by incarnation, the id of the key that it has
        self._end_s: dict[str, float] = {}
        self._asked: set[str] = set()

    def heard(self, incarnation: str, key_id: str) -> None:
        """It has this key."""
        self._told[incarnation] = key_id

    def ask(self, incarnation: str) -> None:
        """Its key is to be replaced, once it has said which one it has."""
        self._asked.add(incarnation)

    def is_asked(self, incarnation: str) -> bool:
        """And it has not been replaced yet."""
        return incarnation in self._asked

    def known_by(self, incarnation: str) -> str:
        """The id of the key that it says it has; empty: it says nothing."""
        return self._told.get(incarnation, "")

    def due(self, now_s: float, served: Mapping[str, str]) -> tuple[str, ...]:
        """Whose key is to be replaced now. ``served``: all that are served, and the id of the key that each is meant to
        have. One that has not come to know its last key is left alone by the clock."""
        self._told = {incarnation: key_id for incarnation, key_id in self._told.items() if incarnation in served}
        self._asked &= served.keys()
        self._end_s = {one: self._end_s.get(one, now_s + self._lifetime_s) for one in served}
        return tuple(incarnation for incarnation in served if self._is_due(now_s, incarnation, served[incarnation]))

    def _is_due(self, now_s: float, incarnation: str, key_id: str) -> bool:
        if incarnation not in self._told:
            return False
        return incarnation in self._asked or (now_s >= self._end_s[incarnation] and self._told[incarnation] == key_id)

    def replaced(self, now_s: float, incarnation: str) -> None:
        self._asked.discard(incarnation)
        self._end_s[incarnation] = now_s + self._lifetime_s

    def failed(self, now_s: float, incarnation: str) -> None:
        """It has the one that it had."""
        self._asked.discard(incarnation)
        self._end_s[incarnation] = now_s + min(RETRY_S, self._lifetime_s)
