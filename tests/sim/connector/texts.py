"""What requests consist of, and the KV of each token as a value that can be compared.

A text is a string, a token one letter of it. The KV of a token depends on all tokens before it: its value is the text
up to it, with its KV group and the era of the weights.
"""

from __future__ import annotations

from functools import cache
from typing import Final

TEXT_TOKENS: Final = 24
TEXTS: Final = (
    "a" * TEXT_TOKENS,
    "a" * 4 + "b" * (TEXT_TOKENS - 4),
    "a" * 9 + "c" * (TEXT_TOKENS - 9),
    "a" * 13 + "d" * (TEXT_TOKENS - 13),
    "e" * TEXT_TOKENS,
)
"""Some begin alike: at a boundary of chunks, inside a chunk, inside a block."""

Value = str


@cache
def values(text: str, group: int, era: int, shard: int) -> tuple[Value, ...]:
    """One for each token; of a state, what it is after that token. ``shard``: of which ranks."""
    return tuple(f"{era}.{group}.{shard}.{text[: i + 1]}" for i in range(len(text)))


@cache
def block_hashes(text: str, hash_tokens: int) -> tuple[bytes, ...]:
    """The engine's hashes: each stands for all tokens before its end, so the simplest is these tokens."""
    return tuple(text[:end].encode() for end in range(hash_tokens, len(text) + 1, hash_tokens))
