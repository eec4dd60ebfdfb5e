"""What is known of each drive of a pool beside its state: its health, its rate, how its commands do. No I/O."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from meshfusion.jbof.drives.health import Health
from meshfusion.jbof.wear.rate import WriteRate


class DriveRecords:
    """By the drives' numbers; of one that was never heard of, nothing is known."""

    def __init__(self) -> None:
        self._health: dict[int, Health] = {}
        self._rates: dict[int, WriteRate] = {}
        self._months_left: dict[int, float | None] = {}
        self._fault_counts: Counter[int] = Counter()
        self._latencies_s: dict[int, float] = {}

    def has_health(self, now_s: float, number: int, health: Health, endurance_bytes: int) -> None:
        self._health[number] = health
        rate = self._rates.setdefault(number, WriteRate())
        rate.saw(now_s, health.written_bytes)
        self._months_left[number] = rate.months_left(health.percentage_used, endurance_bytes)

    def failed(self, number: int) -> None:
        """A command did."""
        self._fault_counts[number] += 1

    def took(self, number: int, latencies_s: Sequence[float]) -> None:
        """Reads of single blocks, in one look."""
        if latencies_s:
            self._latencies_s[number] = statistics.median(latencies_s)

    def forget(self, number: int) -> None:
        """It has left the pool, for good."""
        for known in (self._health, self._rates, self._months_left, self._fault_counts, self._latencies_s):
            known.pop(number, None)

    def health(self, number: int) -> Health | None:
        return self._health.get(number)

    def months_left(self, number: int) -> float:
        """-1 where it is not known."""
        months = self._months_left.get(number)
        return -1.0 if months is None else months

    def fault_count(self, number: int) -> int:
        """Commands that failed since it is known here."""
        return self._fault_counts[number]

    def read_latency_s(self, number: int) -> float:
        """The median of the last look; -1 before the first."""
        return self._latencies_s.get(number, -1.0)
