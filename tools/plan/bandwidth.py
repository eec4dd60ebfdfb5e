"""Formulas of what requests read and write, and of loading against computing."""

from __future__ import annotations

from typing import Any, Final

from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.tools.plan import loading, model_form
from meshfusion.tools.plan.formula import Unit, formula

_ESTIMATE: Final = "host/connector/estimate.py, by which the connector decides: 5 ms, then bytes at the rate"


@formula("tokens of a request that are loaded", Unit.TOKENS, "the mean, by what is given")
def hit_tokens(prompt_tokens: float, hit_ratio: float) -> Any:
    return prompt_tokens * hit_ratio


@formula(
    "loaded for a request",
    Unit.BYTES,
    "host/connector/load_parts.py, up to whole chunks; each rank reads what it needs, also where several hold the "
    "same; of a window or state what the last boundary needs",
)
def loaded_bytes_per_request(form: ChunkForm, hit_tokens: float) -> Any:
    return model_form.loaded_bytes(form, hit_tokens)


@formula("loads", Unit.BYTES_PER_S, "of all engines together")
def loaded_bytes_per_s(requests_per_s: float, loaded_bytes_per_request: float) -> Any:
    return requests_per_s * loaded_bytes_per_request


@formula("tokens computed", Unit.TOKENS_PER_S, "what is not hit, and what is answered")
def computed_tokens_per_s(requests_per_s: float, prompt_tokens: float, hit_ratio: float, output_tokens: float) -> Any:
    return requests_per_s * (prompt_tokens * (1 - hit_ratio) + output_tokens)


@formula("saves", Unit.BYTES_PER_S, "of all engines together")
def saved_bytes_per_s(computed_tokens_per_s: float, medium_bytes_per_token: float, written_share: float) -> Any:
    return computed_tokens_per_s * medium_bytes_per_token * written_share


@formula("written again by reclaim", Unit.BYTES_PER_S, "read and written inside the DPU (dpu/store/tidying.py)")
def rewritten_bytes_per_s(saved_bytes_per_s: float, rewrite_share: float) -> Any:
    return saved_bytes_per_s * rewrite_share


@formula("read from each drive", Unit.BYTES_PER_S, "chunks that follow each other lie on different drives")
def drive_reads(loaded_bytes_per_s: float, rewritten_bytes_per_s: float, drives: int) -> Any:
    return (loaded_bytes_per_s + rewritten_bytes_per_s) / drives


@formula("written to each drive", Unit.BYTES_PER_S, "jbof/wear spreads openings of segments, of equal drives evenly")
def drive_writes(saved_bytes_per_s: float, rewritten_bytes_per_s: float, drives: int) -> Any:
    return (saved_bytes_per_s + rewritten_bytes_per_s) / drives


@formula("out of each port", Unit.BYTES_PER_S, "without the headers of packets, about 2 % of RoCE with an MTU of 4096")
def nic_out(loaded_bytes_per_s: float, nics: int) -> Any:
    return loaded_bytes_per_s / nics


@formula("into each port", Unit.BYTES_PER_S, "as out of it")
def nic_in(saved_bytes_per_s: float, nics: int) -> Any:
    return saved_bytes_per_s / nics


@formula("one load at a time", Unit.BYTES_PER_S, "the narrowest of drives, ports and the engine's own ports")
def load_rate(drives: int, drive_read_rate: float, nics: int, nic_rate: float, engine_nic_rate: float) -> Any:
    return min(drives * drive_read_rate, nics * nic_rate, engine_nic_rate)


@formula("loading a request", Unit.SECONDS, _ESTIMATE)
def load_s(form: ChunkForm, hit_tokens: float, load_rate: float) -> Any:
    return loading.loading_s(form, hit_tokens, load_rate)


@formula("computing it instead", Unit.SECONDS, "an engine that has nothing else to do")
def recompute_s(hit_tokens: float, prefill_tokens_per_s: float) -> Any:
    return hit_tokens / prefill_tokens_per_s


@formula("shortest prefix that is loaded faster", Unit.TOKENS, f"{_ESTIMATE}; of whole chunks")
def break_even(form: ChunkForm, load_rate: float, prefill_tokens_per_s: float) -> Any:
    return loading.break_even_tokens(form, load_rate, prefill_tokens_per_s)


@formula("engines whose prefill is saved", Unit.COUNT, "seconds of prefill that hits save in each second")
def saved_engines(requests_per_s: float, recompute_s: float) -> Any:
    return requests_per_s * recompute_s


BANDWIDTH: Final = (
    hit_tokens, loaded_bytes_per_request, loaded_bytes_per_s, computed_tokens_per_s, saved_bytes_per_s,
    rewritten_bytes_per_s, drive_reads, drive_writes, nic_out, nic_in,
)  # fmt: skip
LOADING: Final = (load_rate, load_s, recompute_s, break_even, saved_engines)
