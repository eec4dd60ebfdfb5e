"""How the simulation says that a rule is broken."""

from __future__ import annotations


class Violation(AssertionError):
    """The initiator broke a rule."""


def must(condition: object, *what: object) -> None:
    if not condition:
        raise Violation(" ".join(map(str, what)))
