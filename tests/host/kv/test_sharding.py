"""Which ranks hold the same bytes of a group, as the engine itself works it out."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.kv.resume import GroupPlan, LastWindow, WholePrefix
from meshfusion.host.kv.sharding import ranks_per_shard
from tests.host.kv.spec_instances import make_spec

POWERS = st.sampled_from([1, 2, 4, 8])
ATTENTION = st.sampled_from(["FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec"])


@settings(deadline=None)
@given(ATTENTION, st.none() | POWERS, POWERS)
def test_as_the_engine_counts_its_replicas(name: str, shards: int | None, ranks: int) -> None:
    spec = make_spec(name, max_tp_shards=shards)
    utils: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
    group = SimpleNamespace(kv_cache_spec=spec)
    assert ranks_per_shard(spec, ranks) == utils.kv_cache_groups_tp_replicas([group], ranks)


@pytest.mark.parametrize(("is_replicated", "expected"), [(False, 1), (True, 4)])
def test_states_are_replicated_when_the_engine_says_so(is_replicated: bool, expected: int) -> None:
    assert ranks_per_shard(make_spec("MambaSpec", tp_replicated=is_replicated), 4) == expected


@pytest.mark.parametrize("shards", [3, 4, 0, -1, 16, "2", None])
def test_what_does_not_divide_the_ranks_or_is_no_count_is_replicated_nowhere(shards: object) -> None:
    """4 of 6 ranks: some hold one shard, some halves of two. 16 of 6: none holds what another does."""
    ranks = 6 if shards != 3 else 8
    assert ranks_per_shard(make_spec("FullAttentionSpec", max_tp_shards=shards), ranks) == 1


def test_an_engine_that_does_not_say() -> None:
    class MLAAttentionSpec:
        pass

    MLAAttentionSpec.__module__ = "vllm.v1.kv_cache_interface"
    MLAAttentionSpec.__qualname__ = "MLAAttentionSpec"
    assert ranks_per_shard(MLAAttentionSpec(), 4) == 1


@settings(deadline=None)
@given(
    POWERS.flatmap(lambda ranks: st.tuples(st.just(ranks), st.sampled_from([n for n in (1, 2, 4, 8) if n <= ranks])))
)
def test_each_shard_has_one_writer_and_all_ranks_a_shard(sizes: tuple[int, int]) -> None:
    ranks, per_shard = sizes
    plans = (GroupPlan(0, WholePrefix(), 16, 32), GroupPlan(1, LastWindow(17), 16, 32))
    form = ChunkForm(plans, (100, 60), ranks, (1, per_shard))
    assert [shard.rank for shard in form.shards_of(0, 3)] == list(range(ranks))
    shards = form.shards_of(1, 3)
    assert len(shards) == form.shard_count(1) == ranks // per_shard
    assert {(shard.unit_bytes, shard.unit_count) for shard in shards} == {(60, 1)}
    for rank in range(ranks):
        shard = shards[form.shard_at(1, rank)]
        assert shard.rank <= rank < shard.rank + per_shard
        assert form.is_writer(1, rank) == (shard.rank == rank)
        assert (form.is_writer(0, rank), form.shard_at(0, rank)) == (True, rank)
