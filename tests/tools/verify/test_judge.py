"""The verdict: what passes, and every way not to."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from meshfusion.tools.verify.answers import Answer
from meshfusion.tools.verify.judge import LoadedAnswer, OwnAnswers, Verdict, judge, tolerance_of
from tests.tools.verify.cases import answer, loaded, own

COMPUTED = [{"a": ["1"], "b": ["2", "3"]}, {"s": ["9"]}]
RIGHT = ([("a", "1"), ("b", "3")], [("s", "9")])


def verdict(given: LoadedAnswer, theirs: OwnAnswers | None = None, **options: Any) -> Verdict:
    options = {"dtype": "float32", "is_loaded": [True, True], **options}
    return judge(["p"], [100], [theirs or own(7, 8)], COMPUTED, [given], **options)


def test_equal_answers_and_bytes_pass() -> None:
    found = verdict(loaded(answer(7, 8, cached=64), *RIGHT))
    assert found.is_passed
    (prompt,) = found.prompts
    assert (prompt.loaded_tokens, prompt.loaded_blocks, prompt.compared_blocks) == (64, 3, 3)
    assert [group.compared_blocks for group in found.groups] == [2, 1]


def test_the_tolerance_is_four_times_what_the_engines_own_answers_differ_by() -> None:
    theirs = own(7, 8, shift=0.01)
    variation, tolerance = tolerance_of([theirs, own(7, 8)], "float32")
    assert variation == pytest.approx(0.01)
    assert tolerance == pytest.approx(0.04)
    # The answer is held against the nearest: 0.03 from two of them, 0.02 from the other.
    assert verdict(loaded(answer(7, 8, shift=0.03), *RIGHT), theirs).is_passed
    assert verdict(loaded(answer(7, 8, shift=0.06), *RIGHT), theirs).problems == (
        "p: log-probabilities differ by 0.05, which is more than 0.04",
    )


@pytest.mark.parametrize(
    ("dtype", "floor"),
    [("float32", 8 * 2**-23), ("float16", 8 * 2**-10), ("bfloat16", 8 * 2**-7), ("something", 8 * 2**-7)],
)
def test_an_engine_that_never_varies_leaves_the_rounding_of_its_dtype(dtype: str, floor: float) -> None:
    assert tolerance_of([own(7, 8)], dtype) == (0.0, floor)


def test_a_large_tolerance_is_told_with_what_it_comes_from() -> None:
    assert verdict(loaded(answer(7, 8), *RIGHT), own(7, 8, shift=0.024)).notices == ()
    assert verdict(loaded(answer(7, 8), *RIGHT), own(7, 8, shift=0.03)).notices == (
        "the engine's own answers differ by 0.03, so log-probabilities prove little here; the blocks' bytes do",
    )


@pytest.mark.parametrize(("unknown", "is_told"), [(2, False), (3, True)])
def test_fewer_than_half_of_a_groups_blocks_compared_is_told(unknown: int, is_told: bool) -> None:
    """Two are compared."""
    found = verdict(loaded(answer(7, 8), [*RIGHT[0], *[("moved on", "5")] * unknown], RIGHT[1]))
    told = "KV group 0: 2 of 5 loaded blocks were compared; the first engine had the others no longer in its cache"
    assert found.is_passed
    assert found.notices == ((told,) if is_told else ())


def test_one_block_of_other_bytes_fails_though_the_answer_is_right() -> None:
    found = verdict(loaded(answer(7, 8), [("a", "1"), ("b", "4")], [("s", "9")]))
    assert found.problems == ("p: 1 of 3 loaded blocks hold other bytes than were computed",)
    assert [group.differing_blocks for group in found.groups] == [1, 0]


def test_other_tokens_fail_though_their_log_probabilities_are_near() -> None:
    near = Answer((999, 8), ({7: -0.5, 999: -0.5}, {8: -0.5}), 0)
    theirs = Answer((7, 8), ({7: -0.5, 999: -0.5}, {8: -0.5}), 0)
    found = verdict(loaded(near, *RIGHT), OwnAnswers(theirs, theirs, theirs))
    assert found.problems == ("p: other tokens than in any answer of the first engine",)


def test_tokens_of_any_of_the_engines_own_answers_will_do() -> None:
    theirs = OwnAnswers(answer(7, 8), answer(7, 9), answer(7, 8))
    assert verdict(loaded(answer(7, 9), *RIGHT), theirs).prompts[0].are_tokens_equal


def test_no_numbers_fail() -> None:
    found = verdict(loaded(answer(7, 8, shift=math.nan), *RIGHT))
    assert found.prompts[0].difference == math.inf
    assert not found.is_passed


def test_nothing_loaded_fails() -> None:
    assert verdict(loaded(answer(7, 8), [], [])).problems == ("nothing was loaded",)


def test_a_kv_group_of_which_nothing_could_be_compared_fails() -> None:
    for blocks in ([], [("", "9")], [("unknown", "9")]):
        found = verdict(loaded(answer(7, 8), RIGHT[0], blocks))
        assert found.problems == ("KV group 1: no loaded block of it could be compared",)
        assert found.groups[1].loaded_blocks == len(blocks)


def test_blocks_that_did_not_load_fail_though_the_engine_made_up_for_them() -> None:
    found = verdict(loaded(answer(7, 8), *RIGHT), failed_blocks=2)
    assert found.problems == ("2 blocks could not be loaded and were recomputed",)


def test_an_answer_is_compared_up_to_the_first_other_token() -> None:
    one = Answer((7, 8), ({7: -0.5}, {8: -1.0}), 0)
    other = Answer((6, 8), ({7: -0.75, 6: -0.7}, {8: -9.0}), 0)
    # Token 6, which the first does not list, is at most as likely there as its last one: at least -0.7 - -0.5.
    assert one.distance(other) == other.distance(one) == pytest.approx(0.25)


def test_times_are_those_of_the_answer_from_nothing_and_of_the_loaded_one() -> None:
    times = [replace(answer(7, 8), ttft_s=seconds) for seconds in (0.5, 0.2, 0.3)]
    (result,) = verdict(loaded(replace(answer(7, 8, cached=2), ttft_s=0.1), *RIGHT), OwnAnswers(*times)).prompts
    assert (result.cold_ttft_s, result.loaded_ttft_s) == (0.5, 0.1)


def test_a_group_of_which_nothing_is_needed_need_not_be_loaded() -> None:
    given = loaded(answer(7, 8), RIGHT[0], [])
    assert verdict(given).problems == ("KV group 1: no loaded block of it could be compared",)
    assert verdict(given, is_loaded=[True, False]).is_passed
    assert verdict(loaded(answer(7, 8), [], []), is_loaded=[True, False]).problems[0] == "nothing was loaded"
