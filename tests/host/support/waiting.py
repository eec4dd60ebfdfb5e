"""Waiting for other threads, with an end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], *, limit_s: float = 8.0, what: str = "") -> T:
    """The first true answer of ``condition``."""
    end_s = time.monotonic() + limit_s
    while not (answer := condition()):
        assert time.monotonic() < end_s, f"waited {limit_s} s in vain {what}"
        time.sleep(0.002)
    return answer
