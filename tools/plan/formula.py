"""Formulas as typed functions that say what they are called, their unit and where they come from.

A formula is a function of one ``return``: its parameters are the names of what it needs, given or computed, and what it
returns is shown as it stands in the code. So what is computed and what is told about it cannot differ.
"""

from __future__ import annotations

import ast
import enum
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


class Unit(enum.Enum):
    """Of a quantity; sizes in bytes, times in seconds."""

    BYTES = "bytes"
    BYTES_PER_S = "bytes/s"
    TOKENS = "tokens"
    TOKENS_PER_S = "tokens/s"
    PER_S = "1/s"
    PER_DAY = "1/day"
    COUNT = ""
    SHARE = "share"
    SECONDS = "s"
    HOURS = "h"
    MONTHS = "months"
    YEARS = "years"


@dataclass(frozen=True, slots=True)
class Formula:
    """``needs``: names of quantities, which are the parameters of ``compute``. ``text``: the formula in their names.
    ``source``: why it holds, or where its code or its constants come from. ``constants``: those that it names."""

    name: str
    title: str
    unit: Unit
    source: str
    needs: tuple[str, ...]
    text: str
    constants: Mapping[str, Any]
    compute: Callable[..., Any]


def formula(title: str, unit: Unit, source: str) -> Callable[[Callable[..., Any]], Formula]:
    """Makes a formula of a function whose body is one ``return``."""

    def made(compute: Callable[..., Any]) -> Formula:
        needs = tuple(inspect.signature(compute).parameters)
        returned = _returned(compute)
        names = (node.id for node in ast.walk(returned) if isinstance(node, ast.Name) and node.id.isupper())
        constants = {name: compute.__globals__[name] for name in names}
        return Formula(compute.__name__, title, unit, source, needs, ast.unparse(returned), constants, compute)

    return made


def _returned(compute: Callable[..., Any]) -> ast.expr:
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(compute))).body
    assert isinstance(function, ast.FunctionDef), compute
    (statement,) = function.body
    assert isinstance(statement, ast.Return), f"{compute.__name__} is more than one return"
    assert statement.value is not None, compute
    return statement.value


@dataclass(frozen=True, slots=True)
class Evaluated:
    """``values``: by name, of what was given and what could be ``computed``. ``lacking``: of the formulas that could
    not, what is not given that they need."""

    values: Mapping[str, Any]
    computed: frozenset[str]
    lacking: Mapping[str, tuple[str, ...]]


def evaluate(formulas: Iterable[Formula], given: Mapping[str, Any]) -> Evaluated:
    """Computes what can be, of formulas in any order. What is given goes before a formula of the same name."""
    table = {entry.name: entry for entry in formulas}
    values = dict(given)
    lacking: dict[str, tuple[str, ...]] = {}

    def settle(name: str, asking: tuple[str, ...]) -> tuple[str, ...]:
        """What is lacking to know ``name``; when nothing is, its value is there."""
        assert name not in asking, f"{' needs '.join((*asking, name))}"
        if name in values:
            return ()
        if name in lacking:
            return lacking[name]
        if name not in table:
            return (name,)
        entry = table[name]
        found = [lack for need in entry.needs for lack in settle(need, (*asking, name))]
        if found:
            lacking[name] = tuple(dict.fromkeys(found))
            return lacking[name]
        values[name] = entry.compute(**{need: values[need] for need in entry.needs})
        return ()

    for name in table:
        settle(name, ())
    return Evaluated(values, frozenset(values.keys() - given.keys()), lacking)
