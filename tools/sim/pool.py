"""A pool of blocks under a :class:`MediumPolicy`, replaying a trace.

Two media: :class:`BlockMedium` drops single blocks (what the policy could do at best), :class:`SegmentMedium`
(``segments.py``) appends and reclaims whole segments, as a pool does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from meshfusion.jbof.policy.chain import Chain, Floats, Indexes, Keys
from meshfusion.jbof.policy.medium_policy import MediumPolicy
from meshfusion.jbof.policy.write_budget import WriteBudget
from meshfusion.tools.sim.figures import Figures, HitCount
from meshfusion.tools.sim.trace import Ids, Trace

GROUP = 0
STEP_TOKENS = 8192
"""An engine computes a prompt in steps of so many tokens, and offers what is new in each."""

_VICTIM_SHARE = 64  # of the capacity: so many victims are chosen at once


class Medium(Protocol):
    """Where blocks lie. ``rewritten``: blocks written again by reclaim."""

    rewritten: int

    def is_held(self, blocks: Ids) -> npt.NDArray[np.bool_]: ...

    def matched(self, blocks: Ids, now_s: float) -> None:
        """A request asked for these."""

    def room_density(self, now_s: float) -> float:
        """See :meth:`MediumPolicy.admit`."""

    def write(self, blocks: Ids, lifetimes: npt.NDArray[np.int8], now_s: float) -> int:
        """Make room and write the first n of these blocks, in order; returns n."""


class Blocks:
    """What a medium and its policy know of blocks: key, position in the prompt."""

    def __init__(self, trace: Trace, policy: MediumPolicy, block_bytes: int) -> None:
        self.keys = mixed(np.arange(trace.unique_blocks, dtype=np.uint64))
        self.positions = np.zeros(trace.unique_blocks, np.intp)
        self.policy = policy
        self.block_tokens = trace.block_tokens
        self.block_bytes = block_bytes

    def chain(self, blocks: Ids, input_tokens: int) -> Chain:
        whole_count = min(input_tokens // self.block_tokens, len(blocks))
        return Chain(GROUP, self.keys[blocks], self.block_tokens, self.block_bytes, whole_count)

    def densities(self, blocks: Ids, now_s: float) -> Floats:
        return self.policy.densities(GROUP, self.keys[blocks], self.positions[blocks], now_s)


def simulate(
    trace: Trace, blocks: Blocks, medium: Medium, name: str, capacity_blocks: int, budget: WriteBudget | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Figures:  # fmt: skip
    """Replay ``trace``. ``budget``: of writes, for the whole pool. ``progress``: gets the number of accesses done."""
    count = HitCount(trace.block_tokens)
    admitted = 0
    for request in trace.requests:
        ids, now_s = request.blocks, request.time_s
        blocks.positions[ids] = np.arange(len(ids))
        chain = blocks.chain(ids, request.input_tokens)
        blocks.policy.on_match(chain, now_s)
        blocks.policy.refresh_if_due(now_s)  # what is computed is offered later
        medium.matched(ids, now_s)
        held = medium.is_held(ids)
        first_miss = len(ids) if held.all() else int(held.argmin())
        count.add(len(ids), int(held.sum()), first_miss, request.input_tokens)
        admitted += _write_missed(blocks, medium, chain, ids, np.flatnonzero(~held), now_s, budget)
        progress(len(ids))
    return Figures(
        name, capacity_blocks, blocks.block_bytes, trace.duration_s, count.accesses, count.hits, count.usable,
        count.input_tokens, count.usable_tokens, admitted, medium.rewritten,
    )  # fmt: skip


def _write_missed(
    blocks: Blocks, medium: Medium, chain: Chain, ids: Ids, missed: Indexes, now_s: float, budget: WriteBudget | None
) -> int:  # fmt: skip
    """Offer what is missing step by step; behind what is not written nothing more is. Returns how many were written."""
    # A block that stands twice in one prompt is written once.
    missed = missed[np.sort(np.unique(ids[missed], return_index=True)[1])]
    step_blocks = max(1, STEP_TOKENS // blocks.block_tokens)
    total = 0
    for start in range(0, len(missed), step_blocks):
        offered = missed[start : start + step_blocks]
        level = budget.level(now_s) if budget else 1.0
        answer = blocks.policy.admit(chain, offered, now_s, level, medium.room_density(now_s))
        chosen = offered[answer.admitted]
        if budget:
            chosen = chosen[: budget.left_bytes(now_s) // blocks.block_bytes]
        written = medium.write(ids[chosen], answer.lifetimes[answer.admitted][: len(chosen)], now_s)
        if budget:
            is_taken = budget.take(written * blocks.block_bytes, now_s)
            assert is_taken, written
        total += written
        if written < len(offered):
            break
    return total


class BlockMedium:
    """Drops single blocks, the least valuable first, as long as what comes is worth more."""

    rewritten = 0

    def __init__(self, trace: Trace, blocks: Blocks, capacity_blocks: int) -> None:
        assert capacity_blocks > 0, capacity_blocks
        self._blocks = blocks
        self._free = capacity_blocks
        self._batch = max(1, capacity_blocks // _VICTIM_SHARE)
        self._held = np.zeros(trace.unique_blocks, np.bool_)
        self._used_s = np.zeros(trace.unique_blocks)
        self._victims: list[tuple[float, int]] = []  # the least valuable last, as of ``_chosen_s``
        self._chosen_s = -1.0

    def is_held(self, blocks: Ids) -> npt.NDArray[np.bool_]:
        return self._held[blocks]

    def matched(self, blocks: Ids, now_s: float) -> None:
        self._used_s[blocks] = now_s

    def room_density(self, now_s: float) -> float:
        """It compares block by block when it writes."""
        return 0.0

    def write(self, blocks: Ids, lifetimes: npt.NDArray[np.int8], now_s: float) -> int:
        count = min(self._free, len(blocks))
        dropped: list[int] = []
        for density in self._blocks.densities(blocks[count:], now_s).tolist():
            victim = self._victim(density, now_s, len(blocks) - count)
            if victim is None:
                break
            dropped.append(victim)
        if dropped:
            self._blocks.policy.on_dropped(GROUP, self._blocks.keys[dropped])
        self._free += len(dropped)
        count += len(dropped)
        self._free -= count
        self._held[blocks[:count]] = True
        self._blocks.policy.on_stored(GROUP, self._blocks.keys[blocks[:count]])
        return count

    def _victim(self, density: float, now_s: float, wanted: int) -> int | None:
        """The least valuable block, dropped; None when all are worth ``density`` or more."""
        while True:
            if self._victims and self._used_s[self._victims[-1][1]] > self._chosen_s:
                self._victims.pop()  # used since it was chosen
            elif self._victims and self._victims[-1][0] < density:
                victim = self._victims.pop()[1]
                self._held[victim] = False
                return victim
            elif self._chosen_s >= now_s:
                return None
            else:
                self._choose(now_s, max(self._batch, wanted))

    def _choose(self, now_s: float, count: int) -> None:
        held = np.flatnonzero(self._held)
        densities = self._blocks.densities(held, now_s)
        count = min(count, len(held))
        lowest = np.argpartition(densities, count - 1)[:count] if count else held
        lowest = lowest[np.argsort(-densities[lowest], kind="stable")]
        self._victims = list(zip(densities[lowest].tolist(), held[lowest].tolist(), strict=True))
        self._chosen_s = now_s


def mixed(numbers: npt.NDArray[np.uint64]) -> Keys:
    """64 uniform bits for each number, as a chunk's key has: the finalizer of SplitMix64 (Steele et al., 2014)."""
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
