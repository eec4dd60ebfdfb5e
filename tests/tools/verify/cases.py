"""Answers and blocks as two engines might report them."""

from __future__ import annotations

from meshfusion.tools.verify.answers import Answer
from meshfusion.tools.verify.judge import LoadedAnswer, OwnAnswers


def answer(*tokens: int, shift: float = 0.0, cached: int = 0) -> Answer:
    """Every position lists its token and token 999; ``shift`` moves the log-probability of the former."""
    return Answer(tokens, tuple({token: -0.5 + shift, 999: -2.0} for token in tokens), cached)


def own(*tokens: int, shift: float = 0.0) -> OwnAnswers:
    """Of which the second differs from the others by ``shift``."""
    return OwnAnswers(answer(*tokens), answer(*tokens, shift=shift), answer(*tokens))


def loaded(given: Answer, *groups: list[tuple[str, str]]) -> LoadedAnswer:
    return LoadedAnswer(given, groups)
