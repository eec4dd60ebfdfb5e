"""Formulas of a model's KV."""

from __future__ import annotations

from typing import Any, Final

from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.tools.plan import model_form
from meshfusion.tools.plan.formula import Unit, formula

_FORM: Final = "host/kv/chunk_form.py, by which the connector cuts"
_MEAN: Final = "the mean of a long prompt's chunks; of states one for each chunk, the most that there can be"


@formula("tokens of a chunk", Unit.TOKENS, _FORM)
def chunk_tokens(form: ChunkForm) -> Any:
    return form.chunk_tokens


@formula("shards of a chunk, of all KV groups", Unit.COUNT, f"{_FORM}; {_MEAN}")
def chunk_shards(form: ChunkForm) -> Any:
    return model_form.shards_of_chunk(form)


@formula("KV of a chunk", Unit.BYTES, f"{_FORM}; {_MEAN}")
def chunk_bytes(form: ChunkForm) -> Any:
    return model_form.payload_bytes_of_chunk(form)


@formula("KV of a token, stored", Unit.BYTES, "what ranks hold alike is stored once")
def kv_bytes_per_token(chunk_bytes: float, chunk_tokens: int) -> Any:
    return chunk_bytes / chunk_tokens


@formula("a chunk on the medium", Unit.BYTES, "jbof/format.py: a header for each shard, all in blocks of 4096 bytes")
def chunk_medium_bytes(form: ChunkForm) -> Any:
    return model_form.medium_bytes_of_chunk(form)


@formula("a token on the medium", Unit.BYTES, "what a token costs of the drives")
def medium_bytes_per_token(chunk_medium_bytes: float, chunk_tokens: int) -> Any:
    return chunk_medium_bytes / chunk_tokens


@formula("entries of the index for a chunk's tokens", Unit.COUNT, "one for each KV group that stores something of them")
def records_per_chunk(form: ChunkForm) -> Any:
    return model_form.records_of_chunk(form)


MODEL: Final = (
    chunk_tokens, chunk_shards, chunk_bytes, kv_bytes_per_token, chunk_medium_bytes, medium_bytes_per_token,
    records_per_chunk,
)  # fmt: skip
