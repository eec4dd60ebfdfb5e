"""A medium of segments: appends to a few open ones, reclaims whole ones, writes again what is worth it.

Models what decides hits and writes: that a block stays where it was written, that room comes only by giving up all of a
segment, and that some of it may be written again. Not: leases and grants, which keep a segment from being reclaimed for
a while, and time.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from meshfusion.jbof.policy.chain import Floats, Mask
from meshfusion.jbof.policy.medium_policy import MediumPolicy, SegmentStats
from meshfusion.tools.sim.pool import GROUP, Blocks
from meshfusion.tools.sim.trace import Ids, Trace

REWRITE_SHARE = 0.1
"""Blocks that reclaim may write again for each block admitted: application write amplification of 1.10 at most."""

_CANDIDATE_SHARE = 64  # of the segments: so many are looked at for a victim, chosen again when used up,
_CANDIDATES_S = 10.0  # or after so long: the cheapest are used first, and dear ones would stay
_NOWHERE = -1


class SegmentMedium:
    """One segment for each lifetime, and one for what is written again, are open at once.

    Sizes are in blocks; the pool is a whole number of segments.
    """

    def __init__(
        self, trace: Trace, blocks: Blocks, segment_count: int, segment_blocks: int, lifetime_count: int
    ) -> None:
        assert segment_count >= lifetime_count + 3, (segment_count, lifetime_count)
        assert segment_blocks > 1, segment_blocks
        self.rewritten = 0
        self._admitted = 0
        self._blocks = blocks
        self._segment_blocks = segment_blocks
        self._segment_of = np.full(trace.unique_blocks, _NOWHERE, np.int64)
        self._members = np.full((segment_count, segment_blocks), _NOWHERE, np.int64)
        self._fill = [0] * segment_count
        self._opened_seq = [0] * segment_count
        self._opened_s = [0.0] * segment_count
        self._sealed = np.zeros(segment_count, np.bool_)
        self._free = list(range(segment_count))[::-1]
        self._open = [_NOWHERE] * (lifetime_count + 1)
        self._last_seq = 0
        self._candidates: list[int] = []
        self._chosen_s = -_CANDIDATES_S

    def is_held(self, blocks: Ids) -> npt.NDArray[np.bool_]:
        held: npt.NDArray[np.bool_] = self._segment_of[blocks] != _NOWHERE
        return held

    def matched(self, blocks: Ids, now_s: float) -> None:
        """The medium remembers no use: the policy does."""

    def room_density(self, now_s: float) -> float:
        if self._free or not self._sealed.any():
            return 0.0
        return min(stats.density for stats in self._candidate_stats(now_s))

    def write(self, blocks: Ids, lifetimes: npt.NDArray[np.int8], now_s: float) -> int:
        for first, last in _runs(lifetimes):
            self._append(blocks[first:last], int(lifetimes[first]), now_s)
        self._admitted += len(blocks)
        held = blocks[self.is_held(blocks)]  # in a small pool the first may have been reclaimed for the last
        self._blocks.policy.on_stored(GROUP, self._blocks.keys[held])
        return len(blocks)

    def tell_held(self, policy: MediumPolicy, now_s: float) -> None:
        """After a restart ``policy`` knows nothing of what is held, and of that only the segments' ages are known."""
        block_bytes, block_tokens = self._blocks.block_bytes, self._blocks.block_tokens
        for segment, fill in enumerate(self._fill):
            keys = self._blocks.keys[self._members[segment, :fill]]
            policy.on_found(GROUP, keys, block_tokens, block_bytes, now_s - self._opened_s[segment], now_s)

    # ---- appending -----------------------------------------------------------------------------------------------

    def _append(self, blocks: Ids, which: int, now_s: float) -> None:
        """To the open segment number ``which``, and its successors."""
        while len(blocks):
            segment = self._open_segment(which, now_s)
            fill = self._fill[segment]
            some = blocks[: self._segment_blocks - fill]
            self._members[segment, fill : fill + len(some)] = some
            self._fill[segment] = fill + len(some)
            self._segment_of[some] = segment
            blocks = blocks[len(some) :]

    def _open_segment(self, which: int, now_s: float) -> int:
        """One with room."""
        segment = self._open[which]
        while segment == _NOWHERE or self._fill[segment] == self._segment_blocks:
            if segment != _NOWHERE:
                self._sealed[segment] = True
                self._open[which] = _NOWHERE
            if self._free:
                self._open[which] = self._next_free(now_s)
            else:
                self._reclaim(now_s)  # what it writes again may open this segment
            segment = self._open[which]
        return segment

    def _next_free(self, now_s: float) -> int:
        segment = self._free.pop()
        assert self._fill[segment] == 0, segment
        self._last_seq += 1
        self._opened_seq[segment] = self._last_seq
        self._opened_s[segment] = now_s
        return segment

    # ---- reclaiming ----------------------------------------------------------------------------------------------

    def _reclaim(self, now_s: float) -> None:
        """Free the victim; what is kept of it goes to a segment for such, if need be the victim."""
        victim = self._blocks.policy.victim(self._candidate_stats(now_s)).segment
        self._candidates.remove(victim)
        members = self._members[victim].copy()
        kept = self._blocks.policy.keep(self._blocks.densities(members, now_s), self._rewritable())
        self._segment_of[members] = _NOWHERE
        self._fill[victim] = 0
        self._sealed[victim] = False
        self._free.append(victim)
        self._blocks.policy.on_dropped(GROUP, self._blocks.keys[members[~kept]])
        self.rewritten += int(kept.sum())
        self._append(members[kept], len(self._open) - 1, now_s)

    def _rewritable(self) -> int:
        """How many blocks of a victim may be written again: half of it at most, so that room is gained."""
        return min(int(REWRITE_SHARE * self._admitted) - self.rewritten, self._segment_blocks // 2)

    def _candidate_stats(self, now_s: float) -> list[SegmentStats]:
        self._candidates = [segment for segment in self._candidates if self._sealed[segment]]
        if not self._candidates or now_s - self._chosen_s > _CANDIDATES_S:
            self._candidates, self._chosen_s = self._least_valuable(now_s), now_s
        members = self._members[self._candidates]
        densities = self._blocks.densities(members.ravel(), now_s).reshape(members.shape)
        return self._stats(self._candidates, densities)

    def _stats(self, segments: list[int], densities: Floats) -> list[SegmentStats]:
        """``densities``: of their blocks, shape (segments, blocks of one)."""
        lost: Mask = ~self._blocks.policy.keep(densities, self._rewritable())
        room, cost = lost.sum(axis=1).tolist(), np.where(lost, densities, 0.0).sum(axis=1).tolist()
        return [
            SegmentStats(segment, room[i], cost[i], self._opened_seq[segment]) for i, segment in enumerate(segments)
        ]

    def _least_valuable(self, now_s: float) -> list[int]:
        sealed = np.flatnonzero(self._sealed)
        members = self._members[sealed]
        densities = self._blocks.densities(members.ravel(), now_s).reshape(members.shape)
        stats = self._stats(sealed.tolist(), densities)
        stats.sort(key=lambda found: found.density)
        return [found.segment for found in stats[: max(4, len(self._sealed) // _CANDIDATE_SHARE)]]


def _runs(lifetimes: npt.NDArray[np.int8]) -> Iterator[tuple[int, int]]:
    """First and last + 1 of each run of equal values."""
    edges = (np.flatnonzero(np.diff(lifetimes)) + 1).tolist()
    if len(lifetimes):
        yield from zip([0, *edges], [*edges, len(lifetimes)], strict=True)
