"""How much of what others cause goes into the log, and what of their words does. No I/O, no clock."""

from __future__ import annotations

from collections import deque
from typing import Final

MAX_QUOTED_CHARS: Final = 200


def quoted(text: str) -> str:
    """Of what a caller said, as much as a line may hold: ASCII without control characters, in quotes."""
    printable = "".join(c if " " <= c < "\x7f" else "?" for c in text[:MAX_QUOTED_CHARS])
    return repr(printable) + (f" and {len(text) - MAX_QUOTED_CHARS} characters more" * (len(text) > MAX_QUOTED_CHARS))


class LineLimit:
    """At most ``per_minute`` in any minute; what is passed over is counted. No clock."""

    def __init__(self, per_minute: int) -> None:
        self._times: deque[float] = deque(maxlen=per_minute)
        self._passed_over = 0

    def take(self, now_s: float) -> int | None:
        """None: not now. Else how many were passed over since the last that was not."""
        is_full = len(self._times) == self._times.maxlen
        if is_full and now_s - self._times[0] < 60.0:
            self._passed_over += 1
            return None
        self._times.append(now_s)
        passed_over, self._passed_over = self._passed_over, 0
        return passed_over
