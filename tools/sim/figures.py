"""What a simulated run came to."""

from __future__ import annotations

from dataclasses import dataclass

DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Counts are of blocks. ``usable_hits``: hits with all blocks before them hit too, what an engine can load.

    ``usable_hit_tokens`` of ``input_tokens``. ``admitted``: written because a request missed them; ``rewritten``:
    written again by reclaim.
    """

    policy: str
    capacity_blocks: int
    block_bytes: int
    duration_s: float
    accesses: int
    hits: int
    usable_hits: int
    input_tokens: int
    usable_hit_tokens: int
    admitted: int
    rewritten: int = 0

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.accesses if self.accesses else 0.0

    @property
    def usable_hit_ratio(self) -> float:
        return _share(self.usable_hits, self.accesses)

    @property
    def token_hit_ratio(self) -> float:
        return _share(self.usable_hit_tokens, self.input_tokens)

    @property
    def writes_per_access(self) -> float:
        return (self.admitted + self.rewritten) / self.accesses if self.accesses else 0.0

    @property
    def bytes_written(self) -> int:
        return (self.admitted + self.rewritten) * self.block_bytes

    @property
    def write_amplification(self) -> float:
        """Of the application: blocks written for each block admitted."""
        return (self.admitted + self.rewritten) / self.admitted if self.admitted else 1.0

    @property
    def drive_writes_per_day(self) -> float:
        """Times the capacity is written in a day, at the trace's pace."""
        if not self.duration_s:
            return 0.0
        return (self.admitted + self.rewritten) / self.capacity_blocks / self.duration_s * DAY_S


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


@dataclass(slots=True)
class HitCount:
    """Counts the hits of request after request."""

    block_tokens: int
    accesses: int = 0
    hits: int = 0
    usable: int = 0
    input_tokens: int = 0
    usable_tokens: int = 0

    def add(self, blocks: int, hits: int, first_miss: int, input_tokens: int) -> None:
        """A request of ``blocks``, ``first_miss`` of them hit before the first miss (all of them if there is none)."""
        self.accesses += blocks
        self.hits += hits
        self.usable += first_miss
        self.input_tokens += input_tokens
        self.usable_tokens += min(first_miss * self.block_tokens, input_tokens)
