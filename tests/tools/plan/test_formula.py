"""Formulas as functions: what they are called, what is shown of them, and in which order they are computed."""

from __future__ import annotations

from typing import Any

import pytest

from meshfusion.tools.plan.formula import Formula, Unit, evaluate, formula
from meshfusion.tools.plan.given import BY_NAME, GIVEN
from meshfusion.tools.plan.plan import DERIVED, FORMULAS

FACTOR = 3


@formula("twice the sum", Unit.BYTES, "made up")
def doubled(summed: float) -> Any:
    return summed * 2


@formula("a sum", Unit.BYTES, "made up")
def summed(a: float, b: float) -> Any:
    return (a + b) * FACTOR


def test_a_formula_shows_what_it_computes() -> None:
    assert summed.name == "summed"
    assert summed.needs == ("a", "b")
    assert summed.text == "(a + b) * FACTOR"
    assert summed.constants == {"FACTOR": 3}
    assert summed.compute(a=1, b=2) == 9


def test_more_than_a_return_is_no_formula() -> None:
    def longer(a: float) -> Any:
        b = a
        return b

    with pytest.raises(ValueError, match="too many values"):
        formula("x", Unit.COUNT, "y")(longer)


def test_evaluation_is_in_the_order_of_needs() -> None:
    found = evaluate([doubled, summed], {"a": 1, "b": 1})
    assert found.values == {"a": 1, "b": 1, "summed": 6, "doubled": 12}
    assert found.computed == {"summed", "doubled"}
    assert found.lacking == {}


def test_what_is_given_goes_before_its_formula() -> None:
    found = evaluate([doubled, summed], {"summed": 5})
    assert found.values == {"summed": 5, "doubled": 10}
    assert found.computed == {"doubled"}


def test_what_is_lacking_is_told_of_all_that_depends_on_it() -> None:
    found = evaluate([doubled, summed], {"a": 1})
    assert found.values == {"a": 1}
    assert found.lacking == {"doubled": ("b",), "summed": ("b",)}


def test_formulas_that_need_each_other_are_our_mistake() -> None:
    @formula("", Unit.COUNT, "")
    def one(other: float) -> Any:
        return other

    @formula("", Unit.COUNT, "")
    def other(one: float) -> Any:
        return one

    with pytest.raises(AssertionError, match="needs one"):
        evaluate([one, other], {})


# ---- the table ---------------------------------------------------------------------------------------------------


def test_every_need_of_the_table_is_given_or_computed() -> None:
    known = {entry.name for entry in FORMULAS} | BY_NAME.keys() | DERIVED
    assert {need for entry in FORMULAS for need in entry.needs} <= known
    assert len({entry.name for entry in FORMULAS}) == len(FORMULAS)
    assert len({entry.option for entry in GIVEN}) == len(GIVEN)


def test_every_quantity_that_can_be_given_is_used() -> None:
    used = {need for entry in FORMULAS for need in entry.needs}
    checked = {"drive_write_rate", "dpu_memory", "utilisation_max"}  # by tools/plan/checks.py
    beside = {"target_memory", "target_cores"}  # by the sizing of the target, which is a value of its own
    assert set(BY_NAME) - used - checked - beside == set()


@pytest.mark.parametrize("entry", FORMULAS, ids=lambda entry: entry.name)
def test_every_formula_says_where_it_comes_from(entry: Formula) -> None:
    assert entry.title
    assert entry.source
    assert entry.text
