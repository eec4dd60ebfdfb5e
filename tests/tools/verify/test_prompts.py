"""The prompts: on both sides of boundaries, with shared prefixes, and new with every seed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.errors import ConfigError
from meshfusion.tools.verify.prompts import ANSWER_TOKENS, Prompt, prompts_for


def prompts(chunk: int = 128, block: int = 32, context: int = 4096, seed: int = 1) -> dict[str, Prompt]:
    made = prompts_for(chunk, block, vocabulary=8192, context_tokens=context, seed=seed)
    return {prompt.name: prompt for prompt in made}


def shared_tokens(one: Prompt, other: Prompt) -> int:
    pairs = list(zip(one.token_ids, other.token_ids, strict=False))
    return next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), len(pairs))


def test_lengths_lie_on_both_sides_of_boundaries() -> None:
    assert sorted(len(prompt.token_ids) for prompt in prompts().values()) == [
        127, 129, 255, 256, 289, 320, 321, 449, 1025,
    ]  # fmt: skip


def test_two_share_what_their_names_say_and_no_others_share_a_block() -> None:
    made = prompts()
    long = made["three chunks and a half"]
    sharing = {"its first two chunks, then others": 256, "its first chunk and a half, then others": 192}
    for name, prompt in made.items():
        if prompt is not long:
            assert sharing.get(name, 0) <= shared_tokens(prompt, long) < sharing.get(name, 0) + 32


def test_a_seed_makes_the_same_prompts_again_and_another_seed_others() -> None:
    assert prompts(seed=1) == prompts(seed=1)
    for name, prompt in prompts(seed=1).items():
        assert shared_tokens(prompt, prompts(seed=2)[name]) < 32


@given(chunk=st.integers(2, 600), context=st.integers(2, 4000))
def test_what_does_not_fit_is_left_out_unless_nothing_fits(chunk: int, context: int) -> None:
    if chunk + 1 + ANSWER_TOKENS > context:
        with pytest.raises(ConfigError, match=f"chunks have {chunk} tokens") as raised:
            prompts(chunk, 1, context)
        assert f"--max-model-len {chunk + 1 + ANSWER_TOKENS}" in raised.value.next_step
    else:
        lengths = [len(prompt.token_ids) for prompt in prompts(chunk, 1, context).values()]
        assert chunk < max(lengths) <= context - ANSWER_TOKENS
