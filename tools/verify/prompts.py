"""Which prompts are tried: lengths on both sides of blocks and chunks, and prefixes that prompts share."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from meshfusion.jbof.errors import ConfigError

ANSWER_TOKENS: Final = 8
LONGEST_CHUNKS: Final = 8
FIRST_TOKEN: Final = 5
"""Smaller numbers are often special tokens."""


@dataclass(frozen=True, slots=True)
class Prompt:
    name: str
    token_ids: tuple[int, ...]


def prompts_for(
    chunk_tokens: int, block_tokens: int, *, vocabulary: int, context_tokens: int, seed: int
) -> tuple[Prompt, ...]:
    """Those that fit in ``context_tokens`` with their answers. ``block_tokens``: of the KV group with the shortest.

    The same for the same ``seed``; prompts of two seeds share nothing but by chance. Raises ConfigError when nothing
    that could be loaded fits.
    """
    chosen = random.Random(seed)

    def some(length: int) -> tuple[int, ...]:
        return tuple(chosen.randrange(FIRST_TOKEN, vocabulary) for _ in range(length))

    chunk, half = chunk_tokens, chunk_tokens // 2
    long = some(3 * chunk + half + 1)
    prompts = [
        Prompt("a chunk and a token", some(chunk + 1)),
        Prompt("two chunks", some(2 * chunk)),
        Prompt("two chunks less a token", some(2 * chunk - 1)),
        Prompt("two chunks, a block and a token", some(2 * chunk + block_tokens + 1)),
        Prompt("three chunks and a half", long),
        Prompt("its first two chunks, then others", long[: 2 * chunk] + some(half + 1)),
        Prompt("its first chunk and a half, then others", long[: chunk + half] + some(chunk)),
        Prompt("eight chunks and a token", some(LONGEST_CHUNKS * chunk + 1)),
        Prompt("less than a chunk", some(chunk - 1)),
    ]
    fitting = tuple(prompt for prompt in prompts if len(prompt.token_ids) + ANSWER_TOKENS <= context_tokens)
    if not any(len(prompt.token_ids) > chunk for prompt in fitting):
        needed, all_fit = chunk + 1 + ANSWER_TOKENS, LONGEST_CHUNKS * chunk + 1 + ANSWER_TOKENS
        raise ConfigError(
            f"chunks have {chunk} tokens here, so that nothing can be loaded within {context_tokens}",
            next_step=f"use --max-model-len {needed} or more (all prompts fit in {all_fit}), or a smaller "
            "chunk_min_bytes in the connector's configuration",
        )
    return fitting
