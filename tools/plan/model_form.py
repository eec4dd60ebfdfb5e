"""A model's KV as the connector cuts it into chunks, and what of them lies on the medium and is loaded.

Chunks, shards and needs are :mod:`meshfusion.host.kv.chunk_form`'s and :mod:`meshfusion.host.kv.resume`'s, blocks on
the medium :mod:`meshfusion.jbof.format`'s: what an engine and a pool do, not a second reckoning of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from meshfusion.dpu.api.types import ShardSize
from meshfusion.host.connector.load_parts import load_bytes
from meshfusion.host.kv.chunk_form import ChunkForm, form_of
from meshfusion.host.kv.resume import LocalChunk, ResumeRule, WholePrefix
from meshfusion.jbof.errors import ConfigError, UnsupportedError
from meshfusion.jbof.format import LBA_BYTES, shard_lba_count
from meshfusion.tools.model_kv import ModelKv


@dataclass(frozen=True, slots=True)
class _Block:
    group: int
    block_tokens: int
    unit_bytes: int


def form_of_model(model: ModelKv, *, rank_count: int, chunk_min_bytes: int) -> ChunkForm:
    """The chunks of an engine that serves ``model`` on ``rank_count`` ranks, of which ``model`` describes one.

    Raises :class:`~meshfusion.jbof.errors.UnsupportedError` for a model with a KV group that is not served.
    """
    blocks: list[_Block] = []
    rules: list[ResumeRule] = []
    for index, group in enumerate(model.groups):
        if group.rule is None or group.refusals:
            raise UnsupportedError(
                f"KV group {index} is not served: {'; '.join(group.refusals)}",
                next_step="See `mfctl kinds --model FOLDER`, or plan for a model whose kinds of KV are served.",
            )
        (block_tokens,) = {member.block_tokens for member in group.members}
        blocks.append(_Block(index, block_tokens, group.unit_bytes))
        rules.append(group.rule)
    if not blocks:
        raise UnsupportedError("the model keeps no KV", next_step="Run its engine without this connector.")
    shared = tuple(group.ranks_per_shard for group in model.groups)
    return form_of(blocks, rules, chunk_min_bytes=chunk_min_bytes, rank_count=rank_count, ranks_per_shard=shared)


def form_of_bytes(
    kv_bytes_per_token: int, *, block_tokens: int, rank_count: int, is_replicated: bool, chunk_min_bytes: int
) -> ChunkForm:
    """Of full attention or MLA with so many bytes a token, on all ranks together; ``is_replicated``: on each of them,
    which all hold the same."""
    sharing = rank_count if is_replicated else 1
    block_bytes, rest = divmod(kv_bytes_per_token * block_tokens, rank_count // sharing)
    if rest:
        raise ConfigError(
            f"{kv_bytes_per_token} bytes a token in blocks of {block_tokens} tokens do not divide by {rank_count}",
            next_step="Give the bytes of all ranks together, or --replicated with those of one.",
        )
    block = _Block(0, block_tokens, block_bytes)
    return form_of(
        [block], [WholePrefix()], chunk_min_bytes=chunk_min_bytes, rank_count=rank_count, ranks_per_shard=[sharing]
    )


# ---- what lies on the medium -------------------------------------------------------------------------------------


def shards_of_chunk(form: ChunkForm) -> float:
    """Of all groups together, on the average of chunks that follow each other in a long prompt."""
    return _mean(form, lambda shard: 1)


def payload_bytes_of_chunk(form: ChunkForm) -> float:
    """KV that is stored of a chunk's tokens, of all groups and ranks, averaged likewise."""
    return _mean(form, lambda shard: shard.unit_bytes * shard.unit_count)


def medium_bytes_of_chunk(form: ChunkForm) -> float:
    """The same with headers, in whole blocks of the medium."""
    return _mean(form, medium_bytes)


def medium_bytes(shard: ShardSize) -> int:
    return shard_lba_count(shard.unit_bytes, shard.unit_count) * LBA_BYTES


def largest_shard_bytes(form: ChunkForm) -> int:
    """On the medium."""
    return max(medium_bytes(shard) for chunk in _period(form) for shard in _shards(form, chunk))


def records_of_chunk(form: ChunkForm) -> float:
    """Entries of the index for a chunk's tokens: one for each group that stores something of them."""
    chunks = _period(form)
    groups = range(len(form.plans))
    stored = [1 for c in chunks for g in groups if any(shard.unit_count for shard in form.shards_of(g, c))]
    return sum(stored) / len(chunks)


def _mean(form: ChunkForm, measure: Callable[[ShardSize], int]) -> float:
    chunks = _period(form)
    return sum(measure(shard) for chunk in chunks for shard in _shards(form, chunk)) / len(chunks)


def _shards(form: ChunkForm, chunk: int) -> list[ShardSize]:
    return [s for plan in form.plans for s in form.shards_of(plan.group, chunk) if s.unit_count]


def _period(form: ChunkForm) -> range:
    """As many chunks as it takes for what is stored of them to repeat: local attention forgets at the end of each of
    its stretches; of all other kinds every chunk has as many blocks."""
    stretches = [plan.rule.stretch_tokens for plan in form.plans if isinstance(plan.rule, LocalChunk)]
    return range(math.lcm(form.chunk_tokens, *stretches) // form.chunk_tokens)


# ---- what is loaded ----------------------------------------------------------------------------------------------


def chunks_to_hold(form: ChunkForm, tokens: float) -> int:
    """Whole chunks that hold so many tokens: the last is counted whole."""
    return math.ceil(tokens / form.chunk_tokens)


def loaded_bytes_of_rank(form: ChunkForm, tokens: float) -> int:
    """To resume behind ``tokens``, with nothing in the engine's own cache."""
    return load_bytes(form, chunks_to_hold(form, tokens), 0)


def loaded_bytes(form: ChunkForm, tokens: float) -> int:
    """The same on all ranks: what several ranks hold alike is read by each of them."""
    return loaded_bytes_of_rank(form, tokens) * form.rank_count
