"""Did the second engine load what the first one computed, and answer as it does? No I/O: answers in, a verdict out.

What "as it does" means is measured, not assumed: the first engine answers every prompt three times (computed from
nothing, from its own prefix cache, and from that beside all others), and these answers differ by the rounding of other
batch shapes. An answer from the pool may differ from the nearest of them by no more than some times what they differ
by among themselves. The bytes of the blocks have no such margin: loading must not change one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from meshfusion.tools.verify.answers import Answer

MARGIN: Final = 4.0
"""Times the largest difference among the engine's own answers. Those of a dozen prompts are a sample; KV of another
token moves a log-probability by far more than this (in the project's tests on tiny models: a hundred times)."""
ROUNDING_STEPS: Final = 8
"""At least that many steps of the dtype's rounding: an engine whose own answers are all equal has shown no variation
in a few prompts, which does not mean that it has none."""
LARGE_TOLERANCE: Final = 0.1
"""From here on a difference of log-probabilities says little: KV of another token may move one by no more."""
_EPSILONS: Final[Mapping[str, float]] = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

Blocks = Sequence[Mapping[str, Sequence[str]]]
"""Of each KV group: the digests of what blocks with that hash of the engine hold, by hash; there may be several such
blocks."""


@dataclass(frozen=True, slots=True)
class OwnAnswers:
    """Of the first engine, to one prompt."""

    cold: Answer
    from_cache: Answer
    together: Answer

    @property
    def all(self) -> tuple[Answer, ...]:
        return (self.cold, self.from_cache, self.together)


@dataclass(frozen=True, slots=True)
class LoadedAnswer:
    """Of the second engine. ``blocks``: those that it loaded for it, for each KV group hash (empty: the engine keeps
    the block without one) and digest."""

    answer: Answer
    blocks: Sequence[Sequence[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class PromptResult:
    """``own_difference``: the largest among the first engine's answers; ``difference``: of the second's from the
    nearest of them. ``cold_ttft_s``/``loaded_ttft_s``: to the first token, computed from nothing and loaded; of one
    answer each, so they show an order of magnitude. ``problems``: empty: none."""

    name: str
    prompt_tokens: int
    loaded_tokens: int
    loaded_blocks: int
    compared_blocks: int
    differing_blocks: int
    own_difference: float
    difference: float
    are_tokens_equal: bool
    cold_ttft_s: float
    loaded_ttft_s: float
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupResult:
    """Blocks of a KV group, over all prompts."""

    loaded_blocks: int
    compared_blocks: int
    differing_blocks: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Differences are of log-probabilities. ``problems``: of the whole and of every prompt; empty: passed.
    ``notices``: what a reader should know of how much was proven; they fail nothing."""

    variation: float
    tolerance: float
    prompts: tuple[PromptResult, ...]
    groups: tuple[GroupResult, ...]
    problems: tuple[str, ...]
    notices: tuple[str, ...]

    @property
    def is_passed(self) -> bool:
        return not self.problems


def tolerance_of(own: Sequence[OwnAnswers], dtype: str) -> tuple[float, float]:
    """The engine's run-to-run variation, and what an answer from the pool may differ by. ``dtype``: of the model."""
    variation = max((_own_difference(answers) for answers in own), default=0.0)
    floor = ROUNDING_STEPS * _EPSILONS.get(dtype, _EPSILONS["bfloat16"])
    return variation, max(MARGIN * variation, floor)


def judge(
    names: Sequence[str],
    prompt_tokens: Sequence[int],
    own: Sequence[OwnAnswers],
    computed: Blocks,
    loaded: Sequence[LoadedAnswer],
    *,
    dtype: str,
    is_loaded: Sequence[bool],
    failed_blocks: int = 0,
) -> Verdict:
    """A column for each prompt. ``computed``: all blocks of the first engine when it had answered from nothing.
    ``is_loaded``: of each KV group, whether anything of it is needed where a chunk ends; of local attention in pieces
    that end there, nothing is. ``failed_blocks``: those that the second engine wanted to load and could not."""
    variation, tolerance = tolerance_of(own, dtype)
    results = tuple(
        _judge_prompt(*columns, computed, tolerance) for columns in zip(names, prompt_tokens, own, loaded, strict=True)
    )
    groups = tuple(_judge_group(group, computed, loaded) for group in range(len(computed)))
    problems = [f"{result.name}: {problem}" for result in results for problem in result.problems]
    if not any(result.loaded_blocks for result in results):
        problems.insert(0, "nothing was loaded")
    else:
        problems += [
            f"KV group {group}: no loaded block of it could be compared"
            for group, found in enumerate(groups)
            if is_loaded[group] and not found.compared_blocks
        ]
    if failed_blocks:
        problems.append(f"{failed_blocks} blocks could not be loaded and were recomputed")
    notices = tuple(_notices(variation, tolerance, groups, is_loaded))
    return Verdict(variation, tolerance, results, groups, tuple(problems), notices)


def _notices(
    variation: float, tolerance: float, groups: Sequence[GroupResult], is_loaded: Sequence[bool]
) -> Iterator[str]:
    if tolerance > LARGE_TOLERANCE:
        yield (
            f"the engine's own answers differ by {variation:.3g}, so log-probabilities prove little here; "
            "the blocks' bytes do"
        )
    for group, found in enumerate(groups):
        if is_loaded[group] and 0 < 2 * found.compared_blocks < found.loaded_blocks:
            yield (
                f"KV group {group}: {found.compared_blocks} of {found.loaded_blocks} loaded blocks were compared; "
                "the first engine had the others no longer in its cache"
            )


def _judge_prompt(
    name: str, prompt_tokens: int, own: OwnAnswers, loaded: LoadedAnswer, computed: Blocks, tolerance: float
) -> PromptResult:
    compared = [pair for group, blocks in enumerate(loaded.blocks) for pair in _compared(blocks, computed[group])]
    differing = compared.count(False)
    equal = [answer for answer in own.all if answer.token_ids == loaded.answer.token_ids]
    difference = min(loaded.answer.distance(answer) for answer in equal or own.all)
    problems = []
    if differing:
        problems.append(f"{differing} of {len(compared)} loaded blocks hold other bytes than were computed")
    if not equal:
        problems.append("other tokens than in any answer of the first engine")
    if not difference <= tolerance:
        problems.append(f"log-probabilities differ by {difference:.3g}, which is more than {tolerance:.3g}")
    return PromptResult(
        name=name,
        prompt_tokens=prompt_tokens,
        loaded_tokens=loaded.answer.cached_tokens,
        loaded_blocks=sum(len(blocks) for blocks in loaded.blocks),
        compared_blocks=len(compared),
        differing_blocks=differing,
        own_difference=_own_difference(own),
        difference=difference,
        are_tokens_equal=bool(equal),
        cold_ttft_s=own.cold.ttft_s,
        loaded_ttft_s=loaded.answer.ttft_s,
        problems=tuple(problems),
    )


def _judge_group(group: int, computed: Blocks, loaded: Sequence[LoadedAnswer]) -> GroupResult:
    blocks = [block for answer in loaded for block in answer.blocks[group]]
    compared = list(_compared(blocks, computed[group]))
    return GroupResult(len(blocks), len(compared), compared.count(False))


def _compared(blocks: Sequence[tuple[str, str]], computed: Mapping[str, Sequence[str]]) -> list[bool]:
    """Of those that both engines have: is it the same?"""
    return [digest in computed[name] for name, digest in blocks if name in computed]


def _own_difference(own: OwnAnswers) -> float:
    return max(one.distance(other) for one, other in combinations(own.all, 2))
