"""What a check of ``mfctl doctor`` finds."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class State(enum.Enum):
    OK = "ok"
    INFO = "info"
    WARN = "warn"
    FAIL = "fail"
    UNSEEN = "unseen"
    """It could not be looked at from here: neither well nor wrong."""


@dataclass(frozen=True, slots=True)
class Finding:
    """``cause``: what was seen, perhaps in several lines. ``remedy``: what to do; "" when nothing needs doing."""

    check: str
    state: State
    cause: str
    remedy: str = ""
