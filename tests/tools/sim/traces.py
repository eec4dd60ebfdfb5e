"""Traces made up for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshfusion.tools.sim.trace import Request, Trace


def trace_of(prompts: Sequence[Sequence[int]], *, gap_s: float = 1.0, block_tokens: int = 64) -> Trace:
    """Whole prompts, one every ``gap_s``; ids must be 0 to n - 1."""
    requests = tuple(
        Request(number * gap_s, len(prompt) * block_tokens, np.array(prompt, np.int64))
        for number, prompt in enumerate(prompts)
    )
    return Trace("made up", block_tokens, requests, len({block for prompt in prompts for block in prompt}))


def conversations(count: int, turns: int, seed: int = 1) -> Trace:
    """Conversations of some turns, several at once, each turn two blocks longer; half are never continued."""
    random = np.random.default_rng(seed)
    prompts: list[list[int]] = []
    total = 0
    running: list[tuple[list[int], int]] = []
    while count or running:
        if count and (len(running) < 8 or random.random() < 0.3):
            running.append(([], int(random.integers(2, turns + 1)) if random.random() < 0.5 else 1))
            count -= 1
        history, left = running.pop(int(random.integers(len(running))))
        history = [*history, total, total + 1]
        total += 2
        prompts.append(history)
        if left > 1:
            running.append((history, left - 1))
    return trace_of(prompts, gap_s=5.0)
