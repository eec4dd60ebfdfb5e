"""What is known of a segment: durably, in a table, and for people. Values of :mod:`~meshfusion.jbof.segments`."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """What is durable about a segment that was ever used. ``opened_seq`` orders openings over the pool's life; 0: it
    holds nothing, and only its generation is known (from a rebuild). ``lifetime_class``: of what is written into it.
    ``is_summarized``: its summary is on the medium."""

    segment: int
    generation: int
    opened_seq: int
    lifetime_class: int = 0
    is_summarized: bool = False


UNVALUED = float("inf")
"""The worth of what nobody has valued: it goes after all that is known to be worth less, the longest unused first."""


class SegmentState(enum.Enum):
    FREE = "free"
    OPENING = "opening"  # its record is not durable yet: no extent of it may leave
    EMPTYING = "emptying"  # nothing of it counts any more; free once that is durable
    OPEN = "open"
    SEALED = "sealed"


class SummaryState(enum.Enum):
    NONE = "none"  # not sealed yet, or nothing to tell
    DUE = "due"  # to be written once no writer is left
    UNDERWAY = "underway"
    WRITTEN = "written"


@dataclass(slots=True)
class Segment:
    """What a table knows of one segment. ``next_lba``: behind what was handed out."""

    state: SegmentState
    generation: int
    opened_seq: int
    next_lba: int
    lifetime_class: int = 0
    extent_count: int = 0  # handed out in this generation
    summary: SummaryState = SummaryState.NONE
    read_pins: int = 0
    write_pins: int = 0
    is_held: bool = False  # it is made ready to be given up, and is nobody else's victim
    last_used_s: float = float("-inf")
    worth: float = UNVALUED


@dataclass(frozen=True, slots=True)
class Allocation:
    segment: int
    lba: int
    lba_count: int
    generation: int


class SegmentTally(NamedTuple):
    """Of some segments, how many are in each state, those in quarantine apart from the rest; and how many of all these
    have readers and writers, so that they cannot be reclaimed. ``opening``: being opened, or emptied."""

    free: int
    opening: int
    open: int
    sealed: int
    quarantined: int
    read: int
    written: int


@dataclass(frozen=True, slots=True)
class SegmentCounts:
    free: int
    open: int
    sealed: int
    opening: int
