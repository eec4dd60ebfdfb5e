"""A trace instead of assumptions."""

from __future__ import annotations

import pytest

from meshfusion.jbof.errors import ConfigError
from meshfusion.tools.plan.replay import LADDER, Streams, check_trace, replay_at, replay_for
from meshfusion.tools.sim.run import SimSettings, run_policy
from tests.tools.sim.traces import conversations, trace_of

TRACE = conversations(200, 6)
BYTES_PER_TOKEN = 1000.0
ALL_BYTES = TRACE.unique_blocks * 64 * BYTES_PER_TOKEN
OWN_RATE = len(TRACE.requests) / TRACE.duration_s


def test_streams_by_hand() -> None:
    """Blocks of 64 tokens; at three times its pace the trace is three streams, and a pool holds a third of each."""
    assert Streams(TRACE, None, BYTES_PER_TOKEN).blocks_in(6_400_000) == 100
    tripled = Streams(TRACE, 3 * OWN_RATE, BYTES_PER_TOKEN)
    assert tripled.blocks_in(19_200_000 + 1) == 100
    assert tripled.bytes_for(100) == pytest.approx(19_200_000)


def test_a_replay_is_what_the_simulator_finds() -> None:
    found = replay_at(Streams(TRACE, None, BYTES_PER_TOKEN), ALL_BYTES / 5)
    figures = run_policy(TRACE, "segments", TRACE.unique_blocks // 5, SimSettings(1000))
    assert found.hit_ratio == figures.token_hit_ratio > 0
    assert found.requests_per_s == pytest.approx(OWN_RATE)
    assert found.prompt_tokens == sum(r.input_tokens for r in TRACE.requests) / len(TRACE.requests)
    computed = figures.input_tokens - figures.usable_hit_tokens
    assert found.written_share == pytest.approx(figures.admitted * 64 / computed)
    assert found.rewrite_share == pytest.approx(figures.rewritten / figures.admitted)
    assert "needed_bytes" not in found.given()


def test_a_faster_pace_needs_as_much_more_room_for_the_same_hits() -> None:
    once = replay_at(Streams(TRACE, None, BYTES_PER_TOKEN), ALL_BYTES / 5)
    fourfold = replay_at(Streams(TRACE, 4 * OWN_RATE, BYTES_PER_TOKEN), 4 * ALL_BYTES / 5)
    assert fourfold.hit_ratio == once.hit_ratio
    assert "requests_per_s" not in fourfold.given(), "which was given"


def test_the_smallest_size_that_has_the_hits_is_taken() -> None:
    streams = Streams(TRACE, None, BYTES_PER_TOKEN)
    all_of_it = replay_at(streams, max(LADDER) * ALL_BYTES).hit_ratio
    found = replay_for(streams, all_of_it / 2)
    assert found.hit_ratio >= all_of_it / 2
    assert found.needed_bytes is not None
    smaller = [share for share in LADDER if share * ALL_BYTES < found.needed_bytes * 0.99]
    assert smaller
    assert replay_at(streams, smaller[-1] * ALL_BYTES).hit_ratio < all_of_it / 2


def test_hits_that_are_not_to_be_had_are_refused_with_what_is() -> None:
    with pytest.raises(ConfigError, match="are not to be had at any size; the most") as found:
        replay_for(Streams(TRACE, None, BYTES_PER_TOKEN), 0.999)
    assert "Ask for 0." in found.value.next_step


def test_a_pool_without_room_for_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="no room for one block"):
        replay_at(Streams(TRACE, None, BYTES_PER_TOKEN), 63_999)


@pytest.mark.parametrize("prompts", [[], [[0, 1]]])
def test_a_trace_without_a_pace_is_refused(prompts: list[list[int]]) -> None:
    with pytest.raises(ConfigError, match="too few for a rate"):
        check_trace(trace_of(prompts))


def test_a_trace_without_reuse_is_written_and_never_hit() -> None:
    found = replay_at(Streams(trace_of([[i] for i in range(400)]), None, BYTES_PER_TOKEN), 1e9)
    assert found.hit_ratio == 0
    assert 0 <= found.written_share <= 1
