"""What an engine answered, and how far two answers are from each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """Given greedily. ``logprobs``: of the likeliest tokens at each position. ``cached_tokens``: those of the prompt
    that were not computed. ``ttft_s``: from the request's arrival to its first token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    cached_tokens: int
    ttft_s: float = 0.0

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Answer:
        logprobs = tuple({int(token): float(value) for token, value in at.items()} for at in body["logprobs"])
        return cls(tuple(body["token_ids"]), logprobs, int(body["cached_tokens"]), float(body["ttft_s"]))

    def distance(self, other: Answer) -> float:
        """The largest difference of a token's log-probability, over the positions up to the first other token.

        Of a token that only one of them lists it is at least what that token exceeds the other's last one by. Infinite
        where something is no number.
        """
        largest = 0.0
        for at, (mine, theirs) in enumerate(zip(self.logprobs, other.logprobs, strict=True)):
            found = [abs(mine[token] - theirs[token]) for token in mine.keys() & theirs.keys()]
            found += [mine[token] - min(theirs.values()) for token in mine.keys() - theirs.keys()]
            found += [theirs[token] - min(mine.values()) for token in theirs.keys() - mine.keys()]
            if any(math.isnan(value) for value in found):
                return math.inf
            largest = max([largest, *found])
            if self.token_ids[at] != other.token_ids[at]:
                break
        return largest
