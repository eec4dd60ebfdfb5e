"""A drive's writes a day: a bound that holds over every window of 24 hours, and how long the drive lasts."""

from __future__ import annotations

import math

DAY_S = 86400.0
BURST_SHARE = 0.25
DAYS_PER_MONTH = 365.25 / 12


class WriteBudget:
    """A token bucket that never lets more than a day's budget through in any 24 hours.

    A day's budget of D bytes is split: a bucket of b = D * BURST_SHARE, full at the start, and a refill of
    r = (D - b) / 86400 bytes a second. Take any window of 24 hours from t. At t the bucket holds at most b (it never
    holds more), in the window at most 86400 * r = D - b is refilled, and only what is in the bucket is given out (it
    never goes below 0). So at most b + (D - b) = D is given out in the window.

    A restart must not fill the bucket anew: pass what was left of it (``level_bytes``), or 0.
    """

    def __init__(self, bytes_per_day: float, start_s: float, level_bytes: float | None = None) -> None:
        assert bytes_per_day > 0, bytes_per_day
        self._burst_bytes = bytes_per_day * BURST_SHARE
        self._rate_bytes_per_s = (bytes_per_day - self._burst_bytes) / DAY_S
        self._level_bytes = self._burst_bytes if level_bytes is None else min(max(level_bytes, 0.0), self._burst_bytes)
        self._now_s = start_s

    @classmethod
    def of_drive(cls, capacity_bytes: int, drive_writes_per_day: float, start_s: float) -> WriteBudget:
        return cls(capacity_bytes * drive_writes_per_day, start_s)

    def level(self, now_s: float) -> float:
        """The share of the bucket that is filled, 0 to 1: what admission goes by."""
        self._refill(now_s)
        return self._level_bytes / self._burst_bytes

    def take(self, length_bytes: int, now_s: float) -> bool:
        """May so much be written now? If so it is taken."""
        assert length_bytes >= 0, length_bytes
        self._refill(now_s)
        if length_bytes > self._level_bytes:
            return False
        self._level_bytes -= length_bytes
        return True

    def wait_s(self, length_bytes: int, now_s: float) -> float:
        """How long until so much may be written; 0 for now, infinite for more than there ever is at once."""
        self._refill(now_s)
        if length_bytes > self._burst_bytes:
            return math.inf
        return max(0.0, (length_bytes - self._level_bytes) / self._rate_bytes_per_s)

    def left_bytes(self, now_s: float) -> int:
        """What may be written now, in whole bytes."""
        self._refill(now_s)
        return int(self._level_bytes)

    def _refill(self, now_s: float) -> None:
        """A clock that steps back brings nothing, and nothing twice."""
        if now_s > self._now_s:
            refilled = self._level_bytes + (now_s - self._now_s) * self._rate_bytes_per_s
            self._level_bytes = min(refilled, self._burst_bytes)
            self._now_s = now_s


def months_left(percentage_used: float, used_share_per_day: float) -> float:
    """Months until a drive's endurance is used up, at the present rate; infinite when nothing is written.

    ``percentage_used``: as in the drive's health log, 100 at the end of its rated endurance, possibly more.
    ``used_share_per_day``: the share of that endurance that a day uses up, see :func:`used_share_per_day`.
    """
    assert percentage_used >= 0, percentage_used
    assert used_share_per_day >= 0, used_share_per_day
    left = max(0.0, 1.0 - percentage_used / 100.0)
    if left == 0.0:
        return 0.0
    return left / used_share_per_day / DAYS_PER_MONTH if used_share_per_day else float("inf")


def used_share_per_day(bytes_per_day: float, rated_bytes: float, device_write_amplification: float = 1.0) -> float:
    """The share of the rated endurance (bytes written by the host, TBW) that a day's writes use up.

    The rating assumes the vendor's workload (JESD219 for enterprise drives), so an amplification below that one's
    makes this too pessimistic, never too good, as long as 1.0 or more is given.
    """
    assert rated_bytes > 0, rated_bytes
    assert device_write_amplification >= 1.0, device_write_amplification
    return bytes_per_day * device_write_amplification / rated_bytes
