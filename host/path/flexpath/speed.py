"""What a path takes for bytes: latency and bandwidth, from requests that were answered. Pure.

A request that found ``b`` bytes under way, itself included, is expected to be answered after ``latency + b /
bandwidth``. Both come from one least-squares line through what was seen, old answers counting less and less: a rate
alone would count the latency as slowness, and a path with little to do would look slower than it is.
"""

from __future__ import annotations

from typing import Final

SAMPLES_MIN: Final = 4  # fewer say nothing
_MEMORY: Final = 32  # answers after which an old one counts a third
_DECAY: Final = 1 - 1 / _MEMORY
_HALF_LIFE_S: Final = 1.0  # with few answers: a path that was slow must not look so for long
_SPREAD_MIN: Final = 0.1  # standard deviation of the bytes, in their mean, below which there is no line to see
_LATENCY_PART_MAX: Final = 0.75  # of what was seen: noise must not make a path infinitely fast
_TICK_S: Final = 1e-9  # of the clock: nothing takes less, and a bandwidth stays finite
_OUTLIER_FACTOR: Final = 8.0  # one answer that was held up somewhere must not decide


class Speed:
    """``assumed_*``: before anything was measured."""

    def __init__(self, assumed_bandwidth_bytes_per_s: float, assumed_latency_s: float) -> None:
        self._slope_s = 1 / assumed_bandwidth_bytes_per_s
        self._latency_s = assumed_latency_s
        self._samples = 0
        self._seen_s = 0.0
        self._weight = self._bytes = self._seconds = self._bytes_bytes = self._bytes_seconds = 0.0

    @property
    def is_measured(self) -> bool:
        return self._samples >= SAMPLES_MIN

    @property
    def bandwidth_bytes_per_s(self) -> float:
        return 1 / self._slope_s

    @property
    def latency_s(self) -> float:
        return self._latency_s

    def completion_s(self, bytes_ahead: int) -> float:
        """Until the last of ``bytes_ahead`` bytes is there, those under way included."""
        return self._latency_s + self._slope_s * bytes_ahead

    def observe(self, now_s: float, bytes_ahead: int, seconds: float) -> None:
        """A request that made it ``bytes_ahead`` bytes under way was answered now, ``seconds`` later."""
        if bytes_ahead <= 0 or seconds <= 0:
            return
        seconds = max(seconds, _TICK_S)
        if self.is_measured:
            seconds = min(seconds, _OUTLIER_FACTOR * self.completion_s(bytes_ahead))
        kept = _DECAY * 2.0 ** -((now_s - self._seen_s) / _HALF_LIFE_S)
        self._seen_s = now_s
        self._samples += 1
        self._weight = self._weight * kept + 1
        self._bytes = self._bytes * kept + bytes_ahead
        self._seconds = self._seconds * kept + seconds
        self._bytes_bytes = self._bytes_bytes * kept + float(bytes_ahead) ** 2
        self._bytes_seconds = self._bytes_seconds * kept + bytes_ahead * seconds
        if self.is_measured:
            self._fit()

    def forget(self) -> None:
        """It is another path now as far as one knows; what it was is the best guess until there are new answers."""
        self._samples = 0
        self._weight = self._bytes = self._seconds = self._bytes_bytes = self._bytes_seconds = 0.0

    def _fit(self) -> None:
        mean_bytes, mean_s = self._bytes / self._weight, self._seconds / self._weight
        variance = self._bytes_bytes / self._weight - mean_bytes**2
        ratio_s = mean_s / mean_bytes
        slope_s = ratio_s
        if variance > (_SPREAD_MIN * mean_bytes) ** 2:
            slope_s = (self._bytes_seconds / self._weight - mean_bytes * mean_s) / variance
        self._slope_s = min(max(slope_s, ratio_s * (1 - _LATENCY_PART_MAX)), ratio_s)
        self._latency_s = max(0.0, mean_s - self._slope_s * mean_bytes)
