"""Which units a request needs to resume where the pool says it can, beyond what the engine has itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.pool_events import StoredBoundary


class LoadPart(NamedTuple):
    """One KV group's share of a load: the request's blocks of that group from ``first_block`` (counted from 0) on. The
    columns have an entry for each unit (block); ``lbas`` and ``digests`` are a column for each shard."""

    group: int
    first_block: int
    block_ids: tuple[int, ...]
    lbas: tuple[tuple[int, ...], ...]
    digests: tuple[tuple[bytes, ...], ...]


def load_parts(
    form: ChunkForm, stored: StoredBoundary, first_tokens: int, last_tokens: int, block_ids: Sequence[Sequence[int]]
) -> tuple[LoadPart, ...] | None:
    """What to load so that the request, which the engine itself has up to ``first_tokens``, can resume at
    ``last_tokens``. None: at that place it cannot. A part of what a window needs is there only in part."""
    parts = []
    for plan, group, ids in zip(form.plans, stored.groups, block_ids, strict=True):
        assert first_tokens % plan.block_tokens == 0, (first_tokens, plan)
        needed = plan.needed_blocks_at(last_tokens)
        is_whole = last_tokens == stored.chunk_count * plan.chunk_tokens
        if not is_whole and (plan.is_snapshot or needed.start < group.first_block):
            return None
        first = max(needed.start, first_tokens // plan.block_tokens)
        units = slice(first - group.first_block, needed.stop - group.first_block)
        parts.append(
            LoadPart(
                plan.group,
                first,
                tuple(ids[first : needed.stop]),
                tuple(column[units] for column in group.unit_lbas),
                tuple(column[units] for column in group.unit_digests),
            )
        )
    return tuple(parts)


def load_bytes(form: ChunkForm, chunk_count: int, local_tokens: int) -> int:
    """Bytes to load on each rank to resume after ``chunk_count`` chunks, when the engine has ``local_tokens``."""
    total = 0
    for plan, unit_bytes in zip(form.plans, form.unit_bytes, strict=True):
        needed = plan.needed_blocks(chunk_count)
        total += (needed.stop - max(needed.start, local_tokens // plan.block_tokens)) * unit_bytes
    return total
