"""Lines for the person who waits."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

Note = Callable[[str], None]


def elapsed_notes() -> Note:
    """Prints each line on stderr behind the seconds since now, as ``tools/lib/say.sh`` does."""
    began = time.monotonic()

    def note(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", file=sys.stderr, flush=True)

    return note
