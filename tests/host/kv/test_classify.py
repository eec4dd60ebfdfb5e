"""Rules are compared with the engine's own managers: what they drop, and what they call a hit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.host.kv.classify import PLAIN_CACHE_DTYPES, classify, group_refusals, served_rule, spec_refusals
from meshfusion.host.kv.kinds import ATTENTION_SINK, KIND_BY_CLASS
from meshfusion.host.kv.resume import GroupPlan, LastWindow, LocalChunk, StateAtBoundary, WholePrefix
from meshfusion.host.kv.support import CACHE_DTYPES
from meshfusion.jbof.errors import UnsupportedError
from tests.host.kv.spec_classes import spec_classes
from tests.host.kv.spec_instances import make_spec, specs_with_rules

NULL = SimpleNamespace(is_null=True)


class FakePool:
    """The engine's block pool, as far as lookups ask it: which blocks exist. The hash of a block is its number."""

    def __init__(self, block_tokens: int, cached: frozenset[int]) -> None:
        self.hash_block_size = block_tokens
        self.null_block = NULL
        self._cached = cached

    def get_cached_block(self, block_hash: int, group_ids: list[int]) -> list[Any] | None:
        return [SimpleNamespace(is_null=False)] * len(group_ids) if block_hash in self._cached else None


def manager_class(spec: Any) -> Any:
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    return KVCacheSpecRegistry.get_manager_class(spec)


def make_manager(spec: Any, role: str = "default") -> Any:
    """As the engine's coordinator makes it (kv_cache_coordinator.py)."""
    from vllm.v1.core.single_type_kv_cache_manager import get_manager_for_kv_cache_spec

    return get_manager_for_kv_cache_spec(
        kv_cache_spec=spec, max_in_flight_tokens=2048, max_model_len=8192, role=role,
        block_pool=FakePool(spec.block_size, frozenset()), enable_caching=True, kv_cache_group_id=0,
        dcp_world_size=1, pcp_world_size=1, scheduler_block_size=spec.block_size, needs_kv_cache_zeroing=False,
    )  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    """Looking up the first manager imports most of the engine: not within an example that has a deadline."""
    manager_class(make_spec("FullAttentionSpec"))


def rule_of(spec: Any) -> Any:
    rule = classify(spec).rule
    assert rule is not None
    return rule


@given(specs_with_rules(), st.integers(0, 300))
def test_what_lies_before_the_first_token_is_what_the_engine_drops(spec: Any, tokens: int) -> None:
    assert rule_of(spec).first_token(tokens) == max(0, make_manager(spec).get_num_skipped_tokens(tokens))


@given(specs_with_rules(), st.frozensets(st.integers(0, 24)), st.integers(0, 24), st.data())
def test_a_boundary_can_be_resumed_at_when_the_engine_calls_it_a_hit(
    spec: Any, cached: frozenset[int], blocks: int, data: st.DataObject
) -> None:
    """The engine's longest hit is the longest boundary whose needs are met, and the blocks that it names are those."""
    block = spec.block_size
    max_tokens = blocks * block + data.draw(st.integers(0, block - 1))
    (found,), hit_tokens = manager_class(spec).find_longest_cache_hit(
        block_hashes=list(range(blocks + 1)), max_length=max_tokens, kv_cache_group_ids=[0],
        block_pool=FakePool(block, cached), kv_cache_spec=spec, drop_eagle_block=False, alignment_tokens=block,
    )  # fmt: skip
    plan = GroupPlan(0, rule_of(spec), block, block)
    resumable = [boundary for boundary in range(blocks + 1) if set(plan.needed_blocks(boundary)) <= cached]
    assert hit_tokens == resumable[-1] * block
    assert {index for index, item in enumerate(found) if not item.is_null} == set(plan.needed_blocks(resumable[-1]))


def test_rules() -> None:
    assert served_rule(make_spec("FullAttentionSpec")) == WholePrefix()
    assert served_rule(make_spec("MLAAttentionSpec", cache_dtype_str="fp8")) == WholePrefix()
    assert served_rule(make_spec("SlidingWindowSpec", sliding_window=512)) == LastWindow(512)
    assert served_rule(make_spec("ChunkedLocalAttentionSpec", attention_chunk_size=512)) == LocalChunk(512)
    assert served_rule(make_spec("MambaSpec")) == StateAtBoundary()


def test_every_class_is_served_or_says_why_not() -> None:
    served = set()
    for name in set(KIND_BY_CLASS) & set(spec_classes()):
        short = name.rpartition(".")[2]
        found = classify(make_spec(short))
        assert found.kind is KIND_BY_CLASS[name]
        if found.refusals:
            assert any(short in line for line in found.refusals)
        else:
            served.add(short)
    assert served == {
        "FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MambaSpec",
    }  # fmt: skip


def quantised(name: str) -> Any:
    from vllm.v1.kv_cache_interface import KVQuantMode

    return KVQuantMode[name]


def role(name: str, value: str) -> Any:
    import vllm.v1.kv_cache_interface as interface

    return getattr(interface, name)(value)


def cache_role(value: str) -> Any:
    return role("SparseCacheRole", value)


def mamba_type(name: str) -> Any:
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    return MambaAttentionBackendEnum[name]


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("FullAttentionSpec", {"sliding_window": 64}, "FullAttentionSpec.sliding_window is 64"),
        ("FullAttentionSpec", {"attention_chunk_size": 64}, "FullAttentionSpec.attention_chunk_size is 64"),
        ("FullAttentionSpec", {"non_causal": True}, "depends on later tokens"),
        ("FullAttentionSpec", {"tokens_per_state": 4}, "FullAttentionSpec.tokens_per_state is 4"),
        ("FullAttentionSpec", {"kv_quant_mode": "INT8_PER_TOKEN_HEAD"}, "'INT8_PER_TOKEN_HEAD', whose scales may lie"),
        ("MLAAttentionSpec", {"sliding_window": 64}, "MLAAttentionSpec.sliding_window is 64"),
        ("MLAAttentionSpec", {"cache_dtype_str": "fp8_ds_mla"}, "cache_dtype_str is 'fp8_ds_mla'"),
        ("MLAAttentionSpec", {"model_version": "deepseek_v4"}, "model_version is 'deepseek_v4'"),
        ("MLAAttentionSpec", {"cache_role": "indexer"}, "sparse indexer"),
        ("MLAAttentionSpec", {"non_causal_multi_token_decode": True}, "non_causal_multi_token_decode is True"),
        ("SlidingWindowSpec", {"extra_retained_tokens": 3}, "extra_retained_tokens is 3"),
        ("SlidingWindowSpec", {"kv_quant_mode": "NVFP4"}, "kv_quant_mode.name is 'NVFP4'"),
        ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 24}, "is 24, not whole blocks of 16"),
        ("ChunkedLocalAttentionSpec", {"tokens_per_state": 2}, "tokens_per_state is 2"),
        ("MambaSpec", {"mamba_cache_mode": "none"}, "MambaSpec.mamba_cache_mode is 'none'"),
        ("MambaSpec", {"mamba_cache_mode": "all"}, "MambaSpec.mamba_cache_mode is 'all'"),
        ("MambaSpec", {"num_speculative_blocks": 1}, "num_speculative_blocks is 1"),
        ("MambaSpec", {"num_prefill_checkpoint_blocks": 1}, "num_prefill_checkpoint_blocks is 1"),
        ("MambaSpec", {"mamba_type": "CUSTOM"}, "mamba_type.name is 'CUSTOM'"),
        ("SinkFullAttentionSpec", {}, "its manager does not take the arguments"),
        ("RSWASpec", {}, "block hashes do not tell prompt tokens"),
        ("SlidingWindowMLASpec", {}, "no model that has it ran"),
        ("CrossAttentionSpec", {}, "corresponds to no prefix"),
        ("EncoderOnlyAttentionSpec", {}, "depends on later tokens"),
        ("CircularBufferSpec", {}, "overwritten in place"),
        ("HiddenStateCacheSpec", {}, "side channel"),
        ("HiSparseHotSpec", {}, "rebuilds it from its source group"),
    ],
)
def test_refused_with_the_reason(name: str, fields: dict[str, Any], expected: str) -> None:
    made = {"kv_quant_mode": quantised, "mamba_type": mamba_type, "cache_role": cache_role}
    spec = make_spec(name, **{field: made[field](value) if field in made else value for field, value in fields.items()})
    with pytest.raises(UnsupportedError) as caught:
        served_rule(spec)
    assert expected in caught.value.message
    for line in spec_refusals(spec):
        thing, _, way_out = line.partition("; ")
        assert thing
        assert way_out


def test_bounded_replay_is_told_of_where_the_engine_has_it() -> None:
    spec = make_spec("SlidingWindowMLASpec")
    if hasattr(spec, "bounded_replay"):
        spec = make_spec("SlidingWindowMLASpec", bounded_replay=True)
        assert any("bounded_replay is True" in line for line in spec_refusals(spec))
    assert not any("bounded_replay cannot be read" in line for line in spec_refusals(spec))


def test_a_sink_cannot_be_started() -> None:
    """When this fails, the engine was repaired: see the kind attention_sink."""
    with pytest.raises(TypeError, match="needs_kv_cache_zeroing"):
        make_manager(make_spec("SinkFullAttentionSpec"))
    assert "cannot start" in ATTENTION_SINK.unserved


def test_where_an_attention_chunk_begins_inside_a_block_the_engine_itself_is_wrong() -> None:
    """It calls block 0 unneeded to resume at token 4, whose attention chunk [0, 6) it holds: why we refuse that."""
    spec = make_spec("ChunkedLocalAttentionSpec", block_size=4, attention_chunk_size=6)
    (found,), hit_tokens = manager_class(spec).find_longest_cache_hit(
        block_hashes=[0], max_length=7, kv_cache_group_ids=[0], block_pool=FakePool(4, frozenset()),
        kv_cache_spec=spec, drop_eagle_block=False, alignment_tokens=4,
    )  # fmt: skip
    assert (hit_tokens, found) == (4, [NULL])
    assert GroupPlan(0, LocalChunk(6), 4, 4).needed_blocks(1) == range(0, 1)


def test_a_derived_class_is_not_its_base() -> None:
    base = type(make_spec("FullAttentionSpec"))
    derived = type("PluginSpec", (base,), {"__module__": "a_plugin.specs"})
    spec = derived(block_size=16, num_kv_heads=2, head_size=16, dtype=make_spec("FullAttentionSpec").dtype)
    with pytest.raises(UnsupportedError, match=r"a_plugin\.specs\.PluginSpec is not known"):
        classify(spec)
    assert "a_plugin.specs.PluginSpec is not known" in spec_refusals(spec)[0]


def test_an_unknown_role_stops_and_names_itself() -> None:
    spec = make_spec("MLAAttentionSpec")
    object.__setattr__(spec, "cache_role", SimpleNamespace(value="oracle"))
    with pytest.raises(UnsupportedError, match=r"MLAAttentionSpec\.cache_role\.value is 'oracle'"):
        classify(spec)


def test_a_missing_attribute_is_named() -> None:
    bare = type("FullAttentionSpec", (), {"__module__": "vllm.v1.kv_cache_interface", "tokens_per_state": 1})()
    refusals = spec_refusals(bare)
    assert any("FullAttentionSpec.kv_quant_mode.name cannot be read" in line for line in refusals)
    assert any("FullAttentionSpec.non_causal cannot be read" in line for line in refusals)
    window = type(
        "SlidingWindowSpec", (),
        {
            "__module__": "vllm.v1.kv_cache_interface", "tokens_per_state": 1, "extra_retained_tokens": 0,
            "kv_quant_mode": SimpleNamespace(name="NONE"),
        },
    )()  # fmt: skip
    assert "SlidingWindowSpec.sliding_window is missing" in spec_refusals(window)[0]


def uniform(*members: Any) -> Any:
    return make_container({f"layer.{index}": member for index, member in enumerate(members)})


def make_container(members: dict[str, Any]) -> Any:
    cls = spec_classes()["vllm.v1.kv_cache_interface.UniformTypeKVCacheSpecs"]
    return cls(block_size=16, kv_cache_specs=members)


def test_a_container_is_judged_by_its_members() -> None:
    full, latent = make_spec("FullAttentionSpec"), make_spec("MLAAttentionSpec")
    assert served_rule(uniform(full, full, latent)) == WholePrefix()
    assert "need different things" in spec_refusals(uniform(full, make_spec("MambaSpec")))[0]
    assert "non_causal is True" in spec_refusals(uniform(full, make_spec("FullAttentionSpec", non_causal=True)))[0]
    assert "describes no layer" in spec_refusals(make_container({}))[0]
    with pytest.raises(UnsupportedError, match="stands for no layer"):
        classify(uniform(full))


def group(spec: Any, **fields: Any) -> Any:
    import vllm.v1.kv_cache_interface as interface

    return interface.KVCacheGroupSpec(layer_names=["a"], kv_cache_spec=spec, **fields)


def test_groups() -> None:
    spec = make_spec("FullAttentionSpec")
    assert group_refusals(group(spec)) == ()
    assert "is_eagle_group is True" in group_refusals(group(spec, is_eagle_group=True))[0]
    assert "host_resident is True" in group_refusals(group(spec, host_resident=True))[0]
    assert "enable_kv_transfer is False" in group_refusals(group(spec, enable_kv_transfer=False))[0]
    hisparse = group(spec, role=role("KVCacheGroupRole", "hisparse_source"))
    assert "'hisparse_source', KV in host memory" in group_refusals(hisparse)[0]
    unknown = group(spec, role=SimpleNamespace(value="oracle"))
    assert "role is 'oracle', which is not known" in group_refusals(unknown)[0]
    assert any("kv_cache_spec cannot be read" in line for line in group_refusals(SimpleNamespace()))


def test_roles_of_the_engine_are_all_judged() -> None:
    import vllm.v1.kv_cache_interface as interface

    for value in interface.KVCacheGroupRole:
        lines = group_refusals(group(make_spec("FullAttentionSpec"), role=value))
        assert not any("not known" in line for line in lines)
    for value in interface.SparseCacheRole:
        assert classify(make_spec("MLAAttentionSpec", cache_role=value)).kind.name == "mla"


def test_the_cache_dtypes_are_those_that_a_start_accepts() -> None:
    assert PLAIN_CACHE_DTYPES == CACHE_DTYPES
