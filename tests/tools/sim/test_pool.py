"""Our policy on media of blocks and of segments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfusion.jbof.policy.density_policy import LIFETIME_COUNT, DensityPolicy, PolicySettings
from meshfusion.tools.sim.classic import simulate_classic
from meshfusion.tools.sim.figures import Figures
from meshfusion.tools.sim.pool import BlockMedium, Blocks, mixed
from meshfusion.tools.sim.run import SimSettings, run_policy, size_blocks
from meshfusion.tools.sim.segments import SegmentMedium
from meshfusion.tools.sim.trace import Trace
from tests.tools.sim.traces import conversations, trace_of

SETTINGS = SimSettings(
    1024, 4, None, PolicySettings(history_entries=1 << 14, sample_entries=1 << 14, refresh_chunks=1024)
)
TRACE = conversations(400, 8)


def blocks_of(trace: Trace) -> Blocks:
    return Blocks(trace, DensityPolicy(SETTINGS.policy), 1)


@pytest.mark.parametrize("name", ["blocks", "segments"])
def test_with_room_for_all_every_use_but_the_first_hits(name: str) -> None:
    found = run_policy(TRACE, name, TRACE.unique_blocks * 4, SETTINGS)
    assert found.hits <= found.accesses - TRACE.unique_blocks
    assert found.admitted <= TRACE.unique_blocks
    assert found.hits >= 0.9 * (found.accesses - TRACE.unique_blocks)
    assert found.rewritten == 0


def test_in_a_small_pool_fewer_writes_and_more_hits_than_lru() -> None:
    capacity = TRACE.unique_blocks // 50
    ours, lru = run_policy(TRACE, "blocks", capacity, SETTINGS), simulate_classic(TRACE, "lru", capacity, 1)
    assert ours.usable_hits > lru.usable_hits
    assert ours.admitted < 0.85 * lru.admitted


def test_segments_cost_few_hits_and_the_writes_that_reclaim_may_do() -> None:
    capacity = TRACE.unique_blocks // 10
    ours, lru = run_policy(TRACE, "segments", capacity, SETTINGS), simulate_classic(TRACE, "lru", capacity, 1)
    assert ours.hits > 0.95 * lru.hits
    assert ours.admitted < 1.05 * lru.admitted
    assert 1.0 < ours.write_amplification <= 1.1


def test_a_budget_of_writes_holds() -> None:
    capacity = TRACE.unique_blocks // 10
    tight = SimSettings(1024, 4, 2.0, SETTINGS.policy)
    found = run_policy(TRACE, "blocks", capacity, tight)
    free = run_policy(TRACE, "blocks", capacity, SETTINGS)
    assert TRACE.duration_s < 86400
    assert 0 < found.admitted <= 2.0 * capacity < free.admitted
    assert found.hits > 0


class Medium:
    """A segment medium that checks itself after each write."""

    def __init__(self, trace: Trace, segment_count: int, segment_blocks: int) -> None:
        self.inner = SegmentMedium(trace, blocks_of(trace), segment_count, segment_blocks, LIFETIME_COUNT)
        self.capacity = segment_count * segment_blocks

    def write(self, blocks: Sequence[int], lifetimes: Sequence[int], now_s: float) -> npt.NDArray[np.bool_]:
        every = np.arange(len(self.inner._segment_of))
        self.inner.write(np.array(blocks), np.array(lifetimes, np.int8), now_s)
        where = self.inner._segment_of
        members = [set(m[:n].tolist()) for m, n in zip(self.inner._members, self.inner._fill, strict=True)]
        assert sum(map(len, members)) == int((where >= 0).sum()) <= self.capacity
        assert all(block in members[where[block]] for block in every if where[block] >= 0)
        assert not any(self.inner._fill[segment] for segment in self.inner._free)
        assert self.inner.rewritten <= 0.1 * self.inner._admitted
        return self.inner.is_held(every)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, LIFETIME_COUNT - 1), min_size=1, max_size=9), max_size=40))
def test_segments_add_up_and_the_newest_write_is_held(writes: list[list[int]]) -> None:
    total = sum(map(len, writes))
    medium = Medium(trace_of([list(range(max(total, 1)))]), LIFETIME_COUNT + 3, 4)
    first = 0
    for number, lifetimes in enumerate(writes):
        blocks = range(first, first + len(lifetimes))
        held = medium.write(blocks, lifetimes, float(number))
        first += len(lifetimes)
        assert held[blocks[-1]]


def test_blocks_are_never_more_than_fit() -> None:
    medium = BlockMedium(TRACE, blocks_of(TRACE), 10)
    written = 0
    for start in range(0, 100, 7):
        wanted = np.arange(start, start + 7)
        written += medium.write(wanted, np.zeros(7, np.int8), float(start))
        assert int(medium.is_held(np.arange(TRACE.unique_blocks)).sum()) <= 10
    assert written >= 10


def test_sizes() -> None:
    trace = trace_of([list(range(200))])
    assert size_blocks("5%", trace, 1024) == 10
    assert size_blocks("0.5 %", trace, 1024) == 1
    assert size_blocks("10KiB", trace, 1024) == 10
    for text, word in (
        ("0.1%", "less than one"),
        ("1KB", "less than one"),
        ("-5%", "not a size"),
        ("five", "not a size"),
    ):
        with pytest.raises(ValueError, match=word):
            size_blocks(text, trace, 1024)


def test_figures() -> None:
    found = Figures("x", 10, 100, 43200.0, 20, 8, 5, 1000, 300, 10, 1)
    assert (found.hit_ratio, found.usable_hit_ratio, found.token_hit_ratio) == (0.4, 0.25, 0.3)
    assert (found.writes_per_access, found.bytes_written, found.write_amplification) == (0.55, 1100, 1.1)
    assert found.drive_writes_per_day == pytest.approx(2.2)
    nothing = Figures("x", 10, 100, 0.0, 0, 0, 0, 0, 0, 0)
    assert (nothing.hit_ratio, nothing.writes_per_access, nothing.write_amplification) == (0.0, 0.0, 1.0)
    assert nothing.drive_writes_per_day == 0.0


def test_mixed_is_splitmix64() -> None:
    """First outputs of the reference implementation with seed 0."""
    assert mixed(np.arange(3, dtype=np.uint64)).tolist() == [
        0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F,
    ]  # fmt: skip
