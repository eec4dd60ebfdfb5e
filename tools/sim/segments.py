"""A medium of segments: appends to a few open ones, reclaims whole ones, writes again what is worth it.

Models what decides hits and writes: that a block stays where it was written, that room comes only by giving up all of a
segment, and that some of it may be written again. Not: leases and grants, which keep a segment from being reclaimed for
a while, and time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from meshfusion.jbof.policy.medium_policy import SegmentStats
from meshfusion.tools.sim.pool import GROUP, Blocks
from meshfusion.tools.sim.trace import Ids, Trace

REWRITE_SHARE = 0.1
"""Blocks that reclaim may write again for each block admitted: application write amplification of 1.10 at most."""

_CANDIDATE_SHARE = 64  # of the segments: so many are looked at for a victim, chosen again when used up
_NOWHERE = -1


class SegmentMedium:
    """``lifetime_count`` segments are open at once. Sizes in blocks; the pool is a whole number of segments."""

    def __init__(
        self, trace: Trace, blocks: Blocks, segment_count: int, segment_blocks: int, lifetime_count: int
    ) -> None:
        assert segment_count >= lifetime_count + 2, (segment_count, lifetime_count)
        assert segment_blocks > 1, segment_blocks
        self.rewritten = 0
        self._admitted = 0
        self._blocks = blocks
        self._segment_blocks = segment_blocks
        self._segment_of = np.full(trace.unique_blocks, _NOWHERE, np.int64)
        self._members: list[list[int]] = [[] for _ in range(segment_count)]
        self._opened_seq = [0] * segment_count
        self._sealed = np.zeros(segment_count, np.bool_)
        self._free = list(range(segment_count))[::-1]
        self._open = [_NOWHERE] * lifetime_count
        self._last_seq = 0
        self._candidates: list[int] = []

    def is_held(self, blocks: Ids) -> npt.NDArray[np.bool_]:
        held: npt.NDArray[np.bool_] = self._segment_of[blocks] != _NOWHERE
        return held

    def matched(self, blocks: Ids, now_s: float) -> None:
        """The medium remembers no use: the policy does."""

    def write(self, blocks: Ids, lifetimes: npt.NDArray[np.int8], now_s: float) -> int:
        for block, lifetime in zip(blocks.tolist(), lifetimes.tolist(), strict=True):
            self._append(block, lifetime, now_s)
        self._admitted += len(blocks)
        held = blocks[self.is_held(blocks)]  # in a small pool the first may have been reclaimed for the last
        self._blocks.policy.on_stored(GROUP, self._blocks.keys[held])
        return len(blocks)

    def _append(self, block: int, lifetime: int, now_s: float) -> None:
        segment = self._open[lifetime]
        while segment == _NOWHERE or len(self._members[segment]) == self._segment_blocks:
            if segment != _NOWHERE:
                self._sealed[segment] = True
                self._open[lifetime] = _NOWHERE
            if self._free:
                self._open_next(lifetime)
            else:
                self._reclaim(now_s)  # what it writes again may open a segment of this lifetime
            segment = self._open[lifetime]
        self._members[segment].append(block)
        self._segment_of[block] = segment

    def _open_next(self, lifetime: int) -> None:
        segment = self._free.pop()
        assert not self._members[segment], segment
        self._last_seq += 1
        self._opened_seq[segment] = self._last_seq
        self._open[lifetime] = segment

    def _reclaim(self, now_s: float) -> None:
        """Free the victim; what is kept of it goes to the segment of the longest lifetime, if need be the victim."""
        victim = self._victim(now_s)
        members = np.array(self._members[victim], np.int64)
        densities = self._blocks.densities(members, now_s)
        allowed = int(REWRITE_SHARE * self._admitted) - self.rewritten
        kept = self._blocks.policy.keep(densities, min(allowed, self._segment_blocks // 2))
        self._segment_of[members] = _NOWHERE
        self._members[victim] = []
        self._sealed[victim] = False
        self._free.append(victim)
        self._blocks.policy.on_dropped(GROUP, self._blocks.keys[members[~kept]])
        longest = len(self._open) - 1
        for block in members[kept].tolist():
            self._append(block, longest, now_s)
        self.rewritten += int(kept.sum())

    def _victim(self, now_s: float) -> int:
        self._candidates = [segment for segment in self._candidates if self._sealed[segment]]
        if not self._candidates:
            self._candidates = self._least_valuable(now_s)
        stats = [
            SegmentStats(
                segment,
                self._segment_blocks,
                float(self._blocks.densities(np.array(self._members[segment], np.int64), now_s).sum()),
                self._opened_seq[segment],
            )
            for segment in self._candidates
        ]
        victim = self._blocks.policy.victim(stats).segment
        self._candidates.remove(victim)
        return victim

    def _least_valuable(self, now_s: float) -> list[int]:
        held = np.flatnonzero(self._segment_of != _NOWHERE)
        sums = np.bincount(
            self._segment_of[held], weights=self._blocks.densities(held, now_s), minlength=len(self._sealed)
        )
        sums[~self._sealed] = np.inf
        count = min(max(4, len(self._sealed) // _CANDIDATE_SHARE), int(self._sealed.sum()))
        return [int(segment) for segment in np.argsort(sums, kind="stable")[:count]]
