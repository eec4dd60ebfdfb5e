"""Both halves of the acceptance test: one engine computes and saves, a fresh one loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from meshfusion.jbof.errors import ServiceError
from meshfusion.tools.verify.engine import EngineTask
from meshfusion.tools.verify.judge import Blocks, GroupResult, LoadedAnswer, OwnAnswers, PromptResult, judge
from meshfusion.tools.verify.process import ENGINE_MODULE, verified_process
from meshfusion.tools.verify.prompts import Prompt, prompts_for

Note = Callable[[str], None]

_SAME: Final = ("versions", "platform", "device", "dtype", "identity", "chunk_tokens", "groups")


@dataclass(frozen=True, slots=True)
class Plan:
    """``options``: of ``vllm.LLM``, with the connector's. ``work``: a folder for the engines' logs."""

    options: Mapping[str, Any]
    work: Path
    seed: int


@dataclass(frozen=True, slots=True)
class Computed:
    """By the first engine. ``blocks``: see :data:`meshfusion.tools.verify.judge.Blocks`."""

    facts: Mapping[str, Any]
    prompts: tuple[Prompt, ...]
    own: tuple[OwnAnswers, ...]
    blocks: Blocks
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Loaded:
    """By the second engine. ``path``: the way the bytes went."""

    facts: Mapping[str, Any]
    answers: tuple[LoadedAnswer, ...]
    counts: Mapping[str, int]
    path: str


@dataclass(frozen=True, slots=True)
class Report:
    """What ``mfctl verify --format json`` prints. ``counts``: of the connector, in the engine that computed and saved
    and in the one that loaded. Differences are of log-probabilities. ``notices``: how much less than all was proven,
    where that is so; they fail nothing."""

    is_passed: bool
    problems: tuple[str, ...]
    notices: tuple[str, ...]
    model: str
    versions: Mapping[str, str]
    platform: str
    device: str
    dtype: str
    identity: str
    chunk_tokens: int
    path: str
    seed: int
    options: Mapping[str, Any]
    run_to_run_variation: float
    tolerance: float
    groups: tuple[Mapping[str, Any], ...]
    group_results: tuple[GroupResult, ...]
    prompts: tuple[PromptResult, ...]
    saver_counts: Mapping[str, int]
    loader_counts: Mapping[str, int]


def compute(plan: Plan, note: Note, *, module: str = ENGINE_MODULE) -> Computed:
    """The first engine: every prompt from nothing, then from its own cache, then all at once; nothing is loaded."""
    task = EngineTask(dict(plan.options), may_load=False)
    with verified_process(task, plan.work / "first.log", note, module=module) as engine:
        facts = engine.facts
        prompts = prompts_for(
            facts["chunk_tokens"],
            min(group["block_tokens"] for group in facts["groups"]),
            vocabulary=facts["vocabulary"],
            context_tokens=facts["context_tokens"],
            seed=plan.seed,
        )
        cold = []
        for number, prompt in enumerate(prompts, 1):
            note(f"computing prompt {number} of {len(prompts)}, {len(prompt.token_ids)} tokens")
            cold.append(engine.answer(prompt.token_ids, is_cold=True))
        note("waiting for the pool to have it all")
        counts = engine.call("settle")
        blocks = engine.call("blocks")
        note("answering again from the engine's own cache")
        again = [engine.answer(prompt.token_ids) for prompt in prompts]
        together = engine.answers([prompt.token_ids for prompt in prompts])
    own = tuple(OwnAnswers(*answers) for answers in zip(cold, again, together, strict=True))
    assert not any(answers.cold.cached_tokens for answers in own), own
    return Computed(facts, prompts, own, blocks, counts)


def load(plan: Plan, prompts: tuple[Prompt, ...], note: Note, *, module: str = ENGINE_MODULE) -> Loaded:
    """The second engine: every prompt from the pool, with nothing in its own cache."""
    task = EngineTask(dict(plan.options), may_load=True)
    with verified_process(task, plan.work / "second.log", note, module=module) as engine:
        answers = []
        for number, prompt in enumerate(prompts, 1):
            note(f"loading prompt {number} of {len(prompts)}")
            engine.call("forget")
            answer = engine.answer(prompt.token_ids)
            blocks = [[(name, digest) for name, digest in group] for group in engine.call("loaded")]
            answers.append(LoadedAnswer(answer, blocks))
        counts = engine.call("settle")
        return Loaded(engine.facts, tuple(answers), counts, engine.call("path"))


def report_of(plan: Plan, computed: Computed, loaded: Loaded) -> Report:
    """Raises ServiceError when the two engines are not the same: there is nothing to compare."""
    facts = computed.facts
    other = [name for name in _SAME if facts[name] != loaded.facts[name]]
    if other:
        raise ServiceError(
            f"the second engine has another {', '.join(other)} than the first one, from the same options",
            next_step=f"keep the logs in {plan.work} and report it",
        )
    verdict = judge(
        [prompt.name for prompt in computed.prompts],
        [len(prompt.token_ids) for prompt in computed.prompts],
        computed.own,
        computed.blocks,
        loaded.answers,
        dtype=facts["dtype"],
        is_loaded=[group["is_loaded"] for group in facts["groups"]],
        failed_blocks=loaded.counts.get("failed_blocks", 0),
    )
    return Report(
        is_passed=verdict.is_passed,
        problems=verdict.problems,
        notices=verdict.notices,
        model=Path(plan.options["model"]).name,
        **{name: facts[name] for name in ("versions", "platform", "device", "dtype", "identity", "chunk_tokens")},
        path=loaded.path,
        seed=plan.seed,
        options=plan.options,
        run_to_run_variation=verdict.variation,
        tolerance=verdict.tolerance,
        groups=tuple(facts["groups"]),
        group_results=verdict.groups,
        prompts=verdict.prompts,
        saver_counts=computed.counts,
        loader_counts=loaded.counts,
    )
