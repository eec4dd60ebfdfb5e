"""Single measurements on their way to histograms: kept until they are collected, never without bound."""

from __future__ import annotations

from typing import Final

OBSERVATIONS_MAX: Final = 4096
"""Of one name, between two collections; an engine that collects does so with every step. Further ones are passed over,
also where an engine never collects."""


class Observations:
    def __init__(self, most: int = OBSERVATIONS_MAX) -> None:
        self._most = most
        self._values: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        """``name``: of the histograms table."""
        values = self._values.setdefault(name, [])
        if len(values) < self._most:
            values.append(value)

    def take(self) -> dict[str, list[float]]:
        """All since the last time, by name."""
        taken, self._values = self._values, {}
        return taken
