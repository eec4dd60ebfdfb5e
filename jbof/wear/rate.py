"""How fast a drive is being written now, and how long it lasts at that rate."""

from __future__ import annotations

from collections import deque
from typing import Final

from meshfusion.jbof.policy.write_budget import DAY_S, months_left, used_share_per_day

WINDOW_S: Final = DAY_S
LEAST_S: Final = 3600.0  # of less nothing is said: one busy minute is not a rate
_SPACING_S: Final = 600.0


class WriteRate:
    """Of one drive, over the last day, or as much of it as was seen: an hour at least.

    Fed with its counter of bytes written by hosts, which only grows; what does not is another drive's, and all before
    it is forgotten.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self._latest: tuple[float, int] | None = None

    def saw(self, now_s: float, written_bytes: int) -> None:
        if self._latest is not None and written_bytes < self._latest[1]:
            self._samples.clear()
        self._latest = (now_s, written_bytes)
        if not self._samples or now_s - self._samples[-1][0] >= _SPACING_S:
            self._samples.append(self._latest)
        # The oldest one kept is the last of those that are older than the window.
        while len(self._samples) > 1 and now_s - self._samples[1][0] >= WINDOW_S:
            self._samples.popleft()

    @property
    def bytes_per_day(self) -> float | None:
        if self._latest is None or not self._samples:
            return None
        (first_s, first_bytes), (last_s, last_bytes) = self._samples[0], self._latest
        seen_s = last_s - first_s
        return (last_bytes - first_bytes) / seen_s * DAY_S if seen_s >= LEAST_S else None

    def months_left(self, percentage_used: int, rated_bytes: int) -> float | None:
        """Until the drive's rated endurance is used up, at this rate; infinite when nothing is written, None when the
        rate or the rating is not known.

        ``rated_bytes``: what the maker allows hosts to write over its life; 0 where it is not told: then what was
        written for each percent so far stands for it.
        """
        rate = self.bytes_per_day
        if rate is None or self._latest is None:
            return None
        rated = rated_bytes or (100 * self._latest[1] // percentage_used if percentage_used else 0)
        return months_left(percentage_used, used_share_per_day(rate, rated)) if rated else None
