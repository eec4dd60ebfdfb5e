from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshfusion.host.kv.resume import LastWindow, WholePrefix
from meshfusion.host.kv.support import check_supported, environment_refusals, refusals, served_rules
from meshfusion.jbof.errors import UnsupportedError

Factory = Callable[..., Any]
Change = Callable[[Any, Any], None]


def good_config() -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            is_multimodal_model=False, enable_sleep_mode=False, is_encoder_decoder=False, runner_type="generate"
        ),
        cache_config=SimpleNamespace(
            enable_prefix_caching=True, cache_dtype="auto", kv_sharing_fast_prefill=False,
            prefix_caching_hash_algo="sha256", block_size=32, prefix_match_unit=None,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1,
            prefill_context_parallel_size=1, data_parallel_size=1, enable_elastic_ep=False,
        ),
        kv_transfer_config=SimpleNamespace(
            kv_role="kv_both", enable_permute_local_kv=False, kv_load_failure_policy="recompute"
        ),
        compilation_config=SimpleNamespace(static_forward_context={"a": SimpleNamespace()}),
        speculative_config=None, diffusion_config=None, weight_transfer_config=None, use_v2_model_runner=False,
    )  # fmt: skip


@pytest.fixture
def state(engine_factory: Factory) -> tuple[Any, Any]:
    return good_config(), engine_factory().config


def test_a_plain_engine_is_supported(state: tuple[Any, Any]) -> None:
    for version in ("0.30.0", "0.31.2", "0.32.0", "0.32.0+cpu", "0.32.1rc1"):
        assert refusals(*state, version=version) == ()
    check_supported(*state, version="0.32.0", environ={"PYTHONHASHSEED": "3"})


@pytest.mark.parametrize("version", ["0.29.9", "0.33.0", "0.3.2", "1.32.0", "dev", "0.320.0"])
def test_other_versions_are_named(state: tuple[Any, Any], version: str) -> None:
    (line,) = refusals(*state, version=version)
    assert version in line
    assert "0.30 to 0.32" in line


def config(path: str, value: Any) -> Change:
    def change(vllm_config: Any, kv_config: Any) -> None:
        *sections, name = path.split(".")
        target = vllm_config
        for section in sections:
            target = getattr(target, section)
        setattr(target, name, value)

    return change


def group(name: str, value: Any) -> Change:
    return lambda vllm_config, kv_config: setattr(kv_config.kv_cache_groups[0], name, value)


def spec(**fields: Any) -> Change:
    def change(vllm_config: Any, kv_config: Any) -> None:
        kv_config.kv_cache_groups[0].kv_cache_spec = replace(kv_config.kv_cache_groups[0].kv_cache_spec, **fields)

    return change


def quant_mode(name: str) -> Change:
    def change(vllm_config: Any, kv_config: Any) -> None:
        from vllm.v1.kv_cache_interface import KVQuantMode

        spec(kv_quant_mode=KVQuantMode[name])(vllm_config, kv_config)

    return change


def spec_of_class(name: str, **more: Any) -> Change:
    def change(vllm_config: Any, kv_config: Any) -> None:
        import vllm.v1.kv_cache_interface as interface

        made = getattr(interface, name)(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.bfloat16, **more)
        kv_config.kv_cache_groups[0].kv_cache_spec = made

    return change


def mixed_group_with_a_window(vllm_config: Any, kv_config: Any) -> None:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec, UniformTypeKVCacheSpecs

    plain = kv_config.kv_cache_groups[0]
    specs = dict.fromkeys(plain.layer_names, plain.kv_cache_spec)
    specs[plain.layer_names[1]] = SlidingWindowSpec(
        block_size=32, num_kv_heads=2, head_size=16, dtype=torch.bfloat16, sliding_window=64
    )
    plain.kv_cache_spec = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs)


def mixed_group_that_forgets_a_layer(vllm_config: Any, kv_config: Any) -> None:
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    plain = kv_config.kv_cache_groups[0]
    plain.kv_cache_spec = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"x": plain.kv_cache_spec})


def role(vllm_config: Any, kv_config: Any) -> None:
    from vllm.v1.kv_cache_interface import KVCacheGroupRole

    kv_config.kv_cache_groups[0].role = KVCacheGroupRole.HISPARSE_SOURCE


def no_layout(vllm_config: Any, kv_config: Any) -> None:
    kv_config.kv_cache_layout = None


def multimodal(vllm_config: Any, kv_config: Any) -> None:
    vllm_config.model_config.is_multimodal_model = True


def shared_layer(vllm_config: Any, kv_config: Any) -> None:
    vllm_config.compilation_config.static_forward_context["b"] = SimpleNamespace(kv_sharing_target_layer_name="a")


def spec_block_size(vllm_config: Any, kv_config: Any) -> None:
    vllm_config.cache_config.block_size = 64


def hash_unit(vllm_config: Any, kv_config: Any) -> None:
    vllm_config.cache_config.prefix_match_unit = 8


REFUSED: dict[str, tuple[Change, str]] = {
    "prefix caching off": (config("cache_config.enable_prefix_caching", False), "enable_prefix_caching is False"),
    "xxhash": (config("cache_config.prefix_caching_hash_algo", "xxhash"), "'xxhash' is not collision resistant"),
    "xxhash_cbor": (config("cache_config.prefix_caching_hash_algo", "xxhash_cbor"), "sha256_cbor"),
    "multimodal pickle": (multimodal, "use --prefix-caching-hash-algo sha256_cbor"),
    "pp": (config("parallel_config.pipeline_parallel_size", 2), "pipeline_parallel_size is 2"),
    "pcp": (config("parallel_config.prefill_context_parallel_size", 2), "prefill_context_parallel_size is 2"),
    "dp": (config("parallel_config.data_parallel_size", 2), "data_parallel_size is 2"),
    "elastic": (config("parallel_config.enable_elastic_ep", True), "enable_elastic_ep"),
    "speculative": (config("speculative_config", object()), "speculative decoding is not served yet"),
    "diffusion": (config("diffusion_config", object()), "diffusion_config"),
    "weights swapped": (config("weight_transfer_config", object()), "weight_transfer_config"),
    "sleep": (config("model_config.enable_sleep_mode", True), "enable_sleep_mode"),
    "encoder": (config("model_config.is_encoder_decoder", True), "is_encoder_decoder"),
    "pooling": (config("model_config.runner_type", "pooling"), "'pooling'"),
    "runner v2": (config("use_v2_model_runner", True), "use_v2_model_runner"),
    "kv sharing prefill": (config("cache_config.kv_sharing_fast_prefill", True), "kv_sharing_fast_prefill"),
    "kv sharing": (shared_layer, "['b'] use the KV of other layers"),
    "int8 scales": (config("cache_config.cache_dtype", "int8_per_token_head"), "'int8_per_token_head'"),
    "quant mode": (quant_mode("INT4_PER_TOKEN_HEAD"), "'INT4_PER_TOKEN_HEAD'"),
    "nvfp4": (quant_mode("NVFP4"), "'NVFP4'"),
    "policy": (config("kv_transfer_config.kv_load_failure_policy", "fail"), "set it to recompute"),
    "producer": (config("kv_transfer_config.kv_role", "kv_producer"), "set kv_role to kv_both"),
    "permute": (config("kv_transfer_config.enable_permute_local_kv", True), "enable_permute_local_kv"),
    "no layout": (no_layout, "layout is unresolved"),
    "eagle": (group("is_eagle_group", True), "is_eagle_group"),
    "host": (group("host_resident", True), "host_resident"),
    "no transfer": (group("enable_kv_transfer", False), "enable_kv_transfer"),
    "role": (role, "role is 'hisparse_source'"),
    "window": (spec(sliding_window=512), "sliding_window is 512"),
    "chunked": (spec(attention_chunk_size=512), "attention_chunk_size is 512"),
    "non causal": (spec(non_causal=True), "non_causal"),
    "compressed states": (spec(tokens_per_state=4), "tokens_per_state is 4"),
    "rswa": (spec_of_class("RSWASpec", rswa_window=9), "class RSWASpec"),
    "hidden state": (spec_of_class("HiddenStateCacheSpec"), "class HiddenStateCacheSpec"),
    "mixed": (mixed_group_with_a_window, "need different things to resume"),
    "incomplete": (mixed_group_that_forgets_a_layer, "layers that its spec does not describe"),
    "scheduler block": (spec_block_size, "blocks of 64 tokens, the KV groups of [32]"),
    "hash unit": (hash_unit, "prefix_match_unit=8"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_refused_by_name(state: tuple[Any, Any], case: str) -> None:
    change, text = REFUSED[case]
    change(*state)
    found = refusals(*state, version="0.32.0")
    assert len(found) == 1, found
    assert text in found[0]
    assert ";" in found[0]


def test_context_parallel_decoding_is_refused(state: tuple[Any, Any]) -> None:
    config("parallel_config.decode_context_parallel_size", 2)(*state)
    assert any("decode_context_parallel_size is 2" in line for line in refusals(*state, version="0.32.0"))


def test_several_groups(state: tuple[Any, Any]) -> None:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, SlidingWindowSpec

    window = SlidingWindowSpec(block_size=64, num_kv_heads=2, head_size=16, dtype=torch.bfloat16, sliding_window=100)
    state[1].kv_cache_groups.append(KVCacheGroupSpec(layer_names=["w"], kv_cache_spec=window))
    assert refusals(*state, version="0.32.0") == ()
    assert served_rules(state[1]) == (WholePrefix(), LastWindow(100))
    state[1].kv_cache_groups[1].kv_cache_spec = replace(window, extra_retained_tokens=3)
    (line,) = refusals(*state, version="0.32.0")
    assert line.startswith("kv_cache_groups[1]: SlidingWindowSpec.extra_retained_tokens is 3")
    state[1].kv_cache_groups.clear()
    assert refusals(*state, version="0.32.0") == ("the engine keeps no KV; start the engine without this connector",)


def test_more_groups_than_the_service_takes(state: tuple[Any, Any]) -> None:
    state[1].kv_cache_groups *= 64
    assert refusals(*state, version="0.32.0") == ()
    state[1].kv_cache_groups.append(state[1].kv_cache_groups[0])
    assert refusals(*state, version="0.32.0") == (
        "the engine has 65 KV groups and the service knows 64 at most; start the engine without this connector",
    )


def test_allowed_variants(state: tuple[Any, Any]) -> None:
    multimodal(*state)
    config("cache_config.prefix_caching_hash_algo", "sha256_cbor")(*state)
    config("cache_config.cache_dtype", "fp8")(*state)
    quant_mode("FP8_PER_TENSOR")(*state)
    config("parallel_config.tensor_parallel_size", 8)(*state)
    config("kv_transfer_config.kv_load_failure_policy", "fail")(*state)
    assert refusals(*state, version="0.32.0", force_load_failure_policy=True) == ()


@pytest.mark.parametrize(
    ("ranks", "version", "is_served"), [(1, "0.31.2", True), (2, "0.31.2", False), (2, "0.32.1", True)]
)
def test_several_ranks_with_the_versions_they_were_tried_with(
    state: tuple[Any, Any], ranks: int, version: str, is_served: bool
) -> None:
    config("parallel_config.tensor_parallel_size", ranks)(*state)
    refused = (
        "vllm_config.parallel_config.tensor_parallel_size is 2, not proven with vLLM 0.31.2; set it to 1, or install "
        "vLLM 0.32",
    )
    assert refusals(*state, version=version) == (() if is_served else refused)


def test_everything_is_listed_at_once(state: tuple[Any, Any]) -> None:
    config("parallel_config.pipeline_parallel_size", 2)(*state)
    config("cache_config.enable_prefix_caching", False)(*state)
    with pytest.raises(UnsupportedError) as refused:
        check_supported(*state, version="0.99.0", environ={"VLLM_USE_V2_MODEL_RUNNER": "1"})
    text = str(refused.value)
    for part in (
        "0.99.0",
        "pipeline_parallel_size",
        "enable_prefix_caching",
        "VLLM_USE_V2_MODEL_RUNNER",
        "4 reason(s)",
    ):
        assert part in text
    assert "set on_unsupported: serve_without_cache" in refused.value.next_step
    with pytest.raises(UnsupportedError) as refused:
        check_supported(*state, version="0.99.0", serves_without_cache=True)
    assert refused.value.next_step == "change what is named"


def attribute_paths(thing: Any, prefix: str = "") -> list[str]:
    paths = []
    for name, value in vars(thing).items():
        paths.append(prefix + name)
        if isinstance(value, SimpleNamespace):
            paths += attribute_paths(value, prefix + name + ".")
    return paths


@pytest.mark.parametrize("path", attribute_paths(good_config()))
def test_a_missing_attribute_is_a_refusal_that_names_it(state: tuple[Any, Any], path: str) -> None:
    *sections, name = path.split(".")
    target = state[0]
    for section in sections:
        target = getattr(target, section)
    delattr(target, name)
    found = refusals(*state, version="0.32.0")
    assert found
    assert any(name in line for line in found)


@pytest.mark.parametrize("name", ["kv_cache_groups", "kv_cache_layout"])
def test_missing_kv_config_is_a_refusal(state: tuple[Any, Any], name: str) -> None:
    bare = SimpleNamespace(**{k: v for k, v in vars(state[1]).items() if k != name})
    assert any(name in line for line in refusals(state[0], bare, version="0.32.0"))


def test_environment() -> None:
    assert environment_refusals({"VLLM_USE_V2_MODEL_RUNNER": "0", "PYTHONHASHSEED": "0"}) == ()
    assert "unset it" in environment_refusals({"VLLM_USE_V2_MODEL_RUNNER": "1"})[0]


@pytest.mark.parametrize(("default", "is_told"), [("fail", True), ("recompute", False)])
def test_a_policy_that_may_be_nobodys_choice_is_told(state: tuple[Any, Any], default: str, is_told: bool) -> None:
    described = dataclasses.make_dataclass(
        "KVTransferConfig",
        [(name, object, default if name == "kv_load_failure_policy" else None) for name in TRANSFER_FIELDS],
    )
    state[0].kv_transfer_config = described("kv_both", False, "fail")
    (line,) = refusals(*state, version="0.32.0")
    assert "kv_load_failure_policy is 'fail'; set it to recompute" in line
    hint = "; 'fail' is vLLM's default, which counts when kv_load_failure_policy is not set"
    assert line.endswith(hint) is is_told


TRANSFER_FIELDS = ("kv_role", "enable_permute_local_kv", "kv_load_failure_policy")
