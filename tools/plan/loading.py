"""When is loading faster than recomputing? Asked of the estimate that an engine's connector decides by."""

from __future__ import annotations

from meshfusion.host.connector.estimate import SAMPLES_MIN, EstimateOptions, LoadEstimate
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.tools.plan.model_form import loaded_bytes_of_rank

_MOST_CHUNKS = 1 << 20


def loading_s(form: ChunkForm, tokens: float, load_bytes_per_s: float) -> float:
    """Until a request can resume behind ``tokens``, all of whose ranks load ``load_bytes_per_s`` together."""
    return _estimate(form, load_bytes_per_s).load_s(loaded_bytes_of_rank(form, tokens))


def break_even_tokens(form: ChunkForm, load_bytes_per_s: float, prefill_tokens_per_s: float) -> float:
    """The shortest prefix of whole chunks that is loaded faster than an engine computes it; infinite: there is none.

    What is to be loaded grows ever slower with the prefix, the computing evenly: once ahead, loading stays ahead.
    """
    estimate = _estimate(form, load_bytes_per_s)

    def loads_faster(chunks: int) -> bool:
        tokens = chunks * form.chunk_tokens
        return estimate.load_s(loaded_bytes_of_rank(form, tokens)) < tokens / prefill_tokens_per_s

    if not loads_faster(_MOST_CHUNKS):
        return float("inf")
    slower, faster = 0, _MOST_CHUNKS
    while faster - slower > 1:
        middle = (slower + faster) // 2
        slower, faster = (slower, middle) if loads_faster(middle) else (middle, faster)
    return faster * form.chunk_tokens


def _estimate(form: ChunkForm, load_bytes_per_s: float) -> LoadEstimate:
    """As an engine has it that has seen its ranks load at this rate, each a part of it."""
    estimate = LoadEstimate(EstimateOptions())
    for _ in range(SAMPLES_MIN):
        estimate.observe_load(1, form.rank_count / load_bytes_per_s)
    return estimate
