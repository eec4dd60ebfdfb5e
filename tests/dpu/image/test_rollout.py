"""The order of a rollout, and that its bounds hold whatever happens."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from meshfusion.dpu.image.rollout import Rollout, RolloutLimits, State

LIMITS = st.builds(
    RolloutLimits, canaries=st.integers(0, 4), max_unavailable=st.integers(1, 5), max_failures=st.integers(0, 4)
)


def _run(names: list[str], limits: RolloutLimits, failing: set[str], rng: random.Random) -> tuple[Rollout, list[str]]:
    rollout = Rollout(names, limits)
    running: list[str] = []
    begun: list[str] = []
    while not rollout.is_over:
        new = rollout.begin_next()
        running += new
        begun += new
        failed = [name for name, state in rollout.states.items() if state is State.FAILED]
        assert running, "it waits for nothing"
        assert len(running) + len(failed) <= limits.max_unavailable
        name = running.pop(rng.randrange(len(running)))
        rollout.ended(name, is_done=name not in failing)
    return rollout, begun


@given(st.integers(1, 12), LIMITS, st.randoms(use_true_random=False), st.sets(st.integers(0, 11)))
def test_its_bounds_hold(count: int, limits: RolloutLimits, rng: random.Random, failing: set[int]) -> None:
    names = [f"dpu-{number}" for number in range(count)]
    rollout, begun = _run(names, limits, {f"dpu-{number}" for number in failing}, rng)
    states = rollout.states
    failed = [name for name, state in states.items() if state is State.FAILED]
    canaries = names[: limits.canaries]
    assert begun == names[: len(begun)], "in their order"
    if set(failed) & set(canaries):
        assert set(begun) <= set(canaries), "none but canaries was begun"
    if not failed:
        assert set(states.values()) == {State.DONE}
        assert not rollout.why_stopped
    # What ran already when the last tolerated one failed may fail as well.
    assert len(failed) <= limits.max_failures + limits.max_unavailable
    if State.HELD_BACK in states.values():
        assert rollout.why_stopped


def test_canaries_come_first_and_alone() -> None:
    rollout = Rollout(list("abcde"), RolloutLimits(canaries=2, max_unavailable=3))
    assert rollout.begin_next() == ("a", "b")
    rollout.ended("a", is_done=True)
    assert rollout.begin_next() == (), "the other canary is still at it"
    rollout.ended("b", is_done=True)
    assert rollout.begin_next() == ("c", "d", "e")


def test_a_canary_that_fails_ends_it_whatever_else_may_fail() -> None:
    rollout = Rollout(list("abc"), RolloutLimits(canaries=1, max_unavailable=3, max_failures=3))
    assert rollout.begin_next() == ("a",)
    rollout.ended("a", is_done=False)
    assert rollout.states == {"a": State.FAILED, "b": State.HELD_BACK, "c": State.HELD_BACK}
    assert rollout.why_stopped == "the canary a failed"


def test_a_failed_card_stays_out_of_service_and_counts() -> None:
    rollout = Rollout(list("abcd"), RolloutLimits(canaries=0, max_unavailable=2, max_failures=3))
    assert rollout.begin_next() == ("a", "b")
    rollout.ended("a", is_done=False)
    assert rollout.begin_next() == ()
    rollout.ended("b", is_done=True)
    assert rollout.begin_next() == ("c",)
    rollout.ended("c", is_done=False)
    assert rollout.states["d"] is State.HELD_BACK
    assert "no more may be" in rollout.why_stopped


def test_what_was_done_before_needs_no_canary() -> None:
    rollout = Rollout(list("abc"), RolloutLimits(canaries=1), done=frozenset("a"))
    assert rollout.begin_next() == ("b",)
    rollout.ended("b", is_done=True)
    assert rollout.begin_next() == ("c",)


def test_one_that_serves_as_before_is_not_out_of_service() -> None:
    rollout = Rollout(["a", "b", "c"], RolloutLimits(canaries=0, max_unavailable=1, max_failures=2))
    assert rollout.begin_next() == ("a",)
    rollout.ended("a", is_done=False, serves_as_before=True)
    assert rollout.begin_next() == ("b",), "a failed, and serves"
    rollout.ended("b", is_done=False)
    assert rollout.states["c"] is State.HELD_BACK
    assert "1 failed and are out of service" in rollout.why_stopped
