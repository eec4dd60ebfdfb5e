"""What the store asks a policy, and what it answers with."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from meshfusion.jbof.policy.chain import Chain, Floats, Indexes, Keys


class Refusal(enum.IntEnum):
    """Why a chunk is not to be written."""

    NONE = 0
    GAIN = 1
    """It would be used too little in the room and for the write that it costs."""
    ANCESTOR = 2
    """A chunk before it is neither held nor admitted, and without that one it can never be loaded."""
    BUDGET = 3
    """The drive's writes for now are spent."""


@dataclass(frozen=True, slots=True, eq=False)
class Admissions:
    """For each offered chunk a :class:`Refusal`, and its lifetime class (0 the shortest) where that is NONE."""

    refusals: npt.NDArray[np.int8]
    lifetimes: npt.NDArray[np.int8]

    @property
    def admitted(self) -> npt.NDArray[np.bool_]:
        is_admitted: npt.NDArray[np.bool_] = self.refusals == Refusal.NONE
        return is_admitted


@dataclass(frozen=True, slots=True)
class SegmentStats:
    """A sealed segment that may be reclaimed now: room for ``chunk_count`` is gained, and ``density_sum`` is lost.

    Chunks that are written again (see ``keep``) count in neither; a store that does not look at them counts all that
    fit and all that are there. Densities are those of ``densities``.
    """

    segment: int
    chunk_count: int
    density_sum: float
    opened_seq: int

    @property
    def density(self) -> float:
        """What a chunk's room in it costs."""
        return self.density_sum / self.chunk_count if self.chunk_count else float("inf")


class MediumPolicy(Protocol):
    """Called by the store, from one thread, with times that do not go back (a step back counts as no time)."""

    def on_match(self, chain: Chain, now_s: float) -> None:
        """A request asked for this chain: once for each request and group, hits and misses alike, before ``admit``."""

    def on_computed(self, chain: Chain, now_s: float) -> None:
        """Chunks of this chain that nobody asked for before were computed beyond what a request asked for: what it
        generated. They are taken to be used like those before them, in the next turn."""

    def refresh_if_due(self, now_s: float) -> None:
        """Learn from what was observed: a bounded piece of work, to be called often and beside no lookup."""

    def is_held(self, group: int, keys: Keys) -> npt.NDArray[np.bool_]:
        """Which of these are on the medium, as far as it was told and remembers."""

    def admit(
        self, chain: Chain, offered: Indexes, now_s: float, budget_level: float, room_density: float = 0.0
    ) -> Admissions:
        """Which of a chain's chunks to write: at reserve time, for those (ascending) that the engine offers.

        ``budget_level``: how much of the drive's writes is left, 0 to 1 (:class:`WriteBudget`). ``room_density``: of
        the segment that would be reclaimed next (:attr:`SegmentStats.density`), 0 while there are free ones.
        """

    def on_stored(self, group: int, keys: Keys) -> None:
        """These chunks are on the medium now."""

    def on_found(self, group: int, keys: Keys, chunk_tokens: int, chunk_bytes: int, age_s: float, now_s: float) -> None:
        """These chunks are on the medium since before this policy began, used ``age_s`` ago or earlier, as far as is
        known: the age of their segment will do."""

    def on_dropped(self, group: int, keys: Keys) -> None:
        """These chunks are on the medium no more."""

    def densities(self, group: int, keys: Keys, positions: Indexes, now_s: float) -> Floats:
        """The value per byte of keeping each chunk, comparable between groups. ``positions``: index in its chain.

        Among chunks that are alike the later ones of a chain count a little less, so that leaves go first.
        """

    def victim(self, candidates: Sequence[SegmentStats]) -> SegmentStats:
        """The segment to reclaim, of one or more; a store with many segments may pass only some of them."""

    def keep(self, densities: Floats, budget_chunks: int) -> npt.NDArray[np.bool_]:
        """Which chunks of a victim to write again, ``budget_chunks`` at most, to segments of their own.

        ``densities``: shape (..., chunks), of one victim or of some that might be.
        """
