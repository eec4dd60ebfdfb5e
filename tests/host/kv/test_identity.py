from __future__ import annotations

import copy
import enum
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.host.kv.canonical import canonical_json, normalised_hf_config
from meshfusion.host.kv.chunk_form import form_of
from meshfusion.host.kv.identity import Identity, build_identity, changed_facts, chunk_key
from meshfusion.host.kv.layout import derive_layouts
from meshfusion.host.kv.resume import LastWindow, ResumeRule, WholePrefix
from meshfusion.host.kv.support import served_rules
from meshfusion.jbof.errors import UnsupportedError

Factory = Callable[..., Any]


class Backend:
    __module__ = "backends"  # whatever name this file is imported under

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"


class OtherBackend(Backend):
    pass


class HfConfig:
    def __init__(self) -> None:
        self.values: dict[str, Any] = {
            "_name_or_path": "/somewhere/model",
            "transformers_version": "5.0",
            "torch_dtype": "bfloat16",
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "sliding_window": None,
            "hidden_size": 64,
        }

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.values)


def make_vllm_config(layer_names: list[str]) -> Any:
    layer = SimpleNamespace(isa="amx", _k_scale_float=1.0, _v_scale_float=1.0, get_attn_backend=lambda: Backend)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="/somewhere/model", architecture="LlamaForCausalLM", model_impl="auto", model_class_overrides={},
            hf_config=HfConfig(), max_model_len=1024, disable_sliding_window=False, dtype=torch.bfloat16,
            quantization=None, quantization_config=None, is_multimodal_model=False, multimodal_config=None,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", kv_cache_dtype_skip_layers=[], prefix_caching_hash_algo="sha256", block_size=32,
            prefix_match_unit=None, enable_prefix_caching=True,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1,
            prefill_context_parallel_size=1, dcp_kv_cache_interleave_size=1, cp_kv_cache_interleave_size=1,
        ),
        load_config=SimpleNamespace(load_format="auto"),
        attention_config=SimpleNamespace(),
        quant_config=None,
        kv_transfer_config=object(),
        compilation_config=SimpleNamespace(static_forward_context={name: copy.copy(layer) for name in layer_names}),
    )  # fmt: skip


@dataclass
class AttentionConfig:
    flash_attn_version: int | None = None


@dataclass
class Case:
    """Everything build_identity looks at, to be changed one by one."""

    engine: Any
    vllm_config: Any
    weights: str = "files:00"
    chunk_min_bytes: int = 20_000
    rules: tuple[ResumeRule, ...] | None = None
    processor: str = ""
    version: str = "0.32.0"

    def identity(self) -> Identity:
        layouts = derive_layouts(self.engine.config, self.engine.caches)
        form = form_of(layouts, self.rules or served_rules(self.engine.config), chunk_min_bytes=self.chunk_min_bytes)
        return build_identity(
            self.vllm_config, self.engine.config, self.engine.caches, layouts, self.weights,
            form=form, processor=self.processor, engine_version=self.version,
        )  # fmt: skip


def make_case(engine: Any) -> Case:
    config = make_vllm_config(list(engine.caches))
    config.attention_config = AttentionConfig()
    return Case(engine, config)


@pytest.fixture
def case(engine_factory: Factory, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    return make_case(engine_factory())


def first_layer(case: Case) -> Any:
    return next(iter(case.vllm_config.compilation_config.static_forward_context.values()))


def set_hf(key: str, value: Any) -> Callable[[Case], None]:
    return lambda case: case.vllm_config.model_config.hf_config.values.update({key: value})


def set_config(path: str, value: Any) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        section, name = path.split(".")
        setattr(getattr(case.vllm_config, section), name, value)

    return change


def set_spec(**fields: Any) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        group = case.engine.config.kv_cache_groups[0]
        group.kv_cache_spec = replace(group.kv_cache_spec, **fields)

    return change


def with_rule(change: Callable[[Case], None]) -> Callable[[Case], None]:
    """For specs that are not served: by which rule they would resume does not follow from them."""

    def change_both(case: Case) -> None:
        change(case)
        case.rules = (WholePrefix(),)

    return change_both


def rename_layer(case: Case) -> None:
    old = next(iter(case.engine.caches))
    group, tensor = case.engine.config.kv_cache_groups[0], case.engine.config.kv_cache_tensors[0]
    group.layer_names = ["renamed" if name == old else name for name in group.layer_names]
    tensor.layers = ["renamed" if name == old else name for name in tensor.layers]
    case.engine.caches = {"renamed" if n == old else n: v for n, v in case.engine.caches.items()}
    layers = case.vllm_config.compilation_config.static_forward_context
    layers["renamed"] = layers.pop(old)


def reorder_layers(case: Case) -> None:
    group = case.engine.config.kv_cache_groups[0]
    group.layer_names = group.layer_names[::-1]


def view_as_half(case: Case) -> None:
    case.engine.caches = {name: view.view(torch.float16) for name, view in case.engine.caches.items()}


def multimodal(case: Case) -> None:
    case.vllm_config.model_config.is_multimodal_model = True


def subclass_of_the_backend(case: Case) -> None:
    first_layer(case).get_attn_backend = lambda: OtherBackend


CHANGES: dict[str, Callable[[Case], None]] = {
    "weights": lambda case: setattr(case, "weights", "files:01"),
    "chunk size": lambda case: setattr(case, "chunk_min_bytes", 40_000),
    "rule": lambda case: setattr(case, "rules", (LastWindow(64),)),
    "rule's number": lambda case: setattr(case, "rules", (LastWindow(65),)),
    "processor": lambda case: setattr(case, "processor", "x"),
    "engine minor": lambda case: setattr(case, "version", "0.31.1"),
    "architecture": set_config("model_config.architecture", "Other"),
    "implementation": set_config("model_config.model_impl", "transformers"),
    "class overrides": set_config("model_config.model_class_overrides", {"A": "m:B"}),
    "dtype": set_config("model_config.dtype", torch.float16),
    "quantization": set_config("model_config.quantization", "fp8"),
    "quantization_config": set_config("model_config.quantization_config", {"linear": "x"}),
    "quant class": lambda case: setattr(case.vllm_config, "quant_config", object()),
    "sliding window off": set_config("model_config.disable_sliding_window", True),
    "multimodal": multimodal,
    "rope theta": set_hf("rope_parameters", {"rope_type": "default", "rope_theta": 1e6}),
    "rope scaling": set_hf("rope_scaling", {"type": "linear", "factor": 2.0}),
    "window": set_hf("sliding_window", 512),
    "hf dtype": set_hf("torch_dtype", "float16"),
    "any hf key": set_hf("new_key", 1),
    "load_format": set_config("load_config.load_format", "pt"),
    "cache_dtype": set_config("cache_config.cache_dtype", "bfloat16"),
    "skip layers": set_config("cache_config.kv_cache_dtype_skip_layers", ["0"]),
    "hash algorithm": set_config("cache_config.prefix_caching_hash_algo", "sha256_cbor"),
    "hash block": set_config("cache_config.block_size", 64),
    "tp": set_config("parallel_config.tensor_parallel_size", 2),
    "pp": set_config("parallel_config.pipeline_parallel_size", 2),
    "pcp": set_config("parallel_config.prefill_context_parallel_size", 2),
    "interleave": set_config("parallel_config.cp_kv_cache_interleave_size", 2),
    "attention config": set_config("attention_config.flash_attn_version", 3),
    "backend": subclass_of_the_backend,
    "isa": lambda case: setattr(first_layer(case), "isa", "vec"),
    "spec field": set_spec(max_tp_shards=2),
    "spec window": with_rule(set_spec(sliding_window=99)),
    "layer name": rename_layer,
    "layer order": reorder_layers,
    "view dtype": view_as_half,
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_changing_any_single_fact_changes_the_digest(case: Case, change: str) -> None:
    before = case.identity()
    CHANGES[change](case)
    after = case.identity()
    assert after.digest != before.digest
    assert changed_facts(before, after)


@pytest.mark.parametrize(
    "options",
    [{"layers": 4}, {"heads": 4}, {"head_size": 32}, {"dtype": torch.float32}, {"layout": "LBNHC"},
     {"block_size": 64, "kernel_block_size": 32}, {"block_size": 64}],
    ids=str,
)  # fmt: skip
def test_changing_the_shape_of_kv_changes_the_digest(
    case: Case, engine_factory: Factory, options: dict[str, Any]
) -> None:
    other = make_case(engine_factory(**options))
    other.vllm_config.cache_config.block_size = options.get("block_size", 32)
    assert other.identity().digest != case.identity().digest


def test_kernel_block_split_changes_the_digest(engine_factory: Factory) -> None:
    """The same bytes in another order inside the page."""
    digests = set()
    for kernel in (None, 32, 64):
        case = make_case(engine_factory(block_size=128, kernel_block_size=kernel))
        digests.add(case.identity().digest)
    assert len(digests) == 3


@pytest.mark.parametrize("options", [{"blocks": 40}, {"layout": "BLHNC"}, {"padded": True}], ids=str)
def test_placement_and_cache_size_do_not_change_the_digest(
    case: Case, engine_factory: Factory, options: dict[str, Any]
) -> None:
    assert make_case(engine_factory(**options)).identity().canonical_json == case.identity().canonical_json


@pytest.mark.parametrize(
    "change",
    [set_config("model_config.model", "/elsewhere"), set_hf("_name_or_path", "/elsewhere"),
     set_hf("transformers_version", "6.0"), set_hf("torch_dtype", "torch.bfloat16"),
     set_hf("dtype", "bfloat16"), set_config("model_config.max_model_len", 4096),
     lambda case: setattr(case, "version", "0.32.9"),
     lambda case: setattr(first_layer(case), "_k_scale_float", 0.5)],
)  # fmt: skip
def test_what_does_not_touch_the_bytes_does_not_change_the_digest(case: Case, change: Callable[[Case], None]) -> None:
    before = case.identity()
    change(case)
    assert changed_facts(before, case.identity()) == ()
    assert case.identity().digest == before.digest


def test_rope_that_looks_at_the_length(case: Case) -> None:
    set_hf("rope_parameters", {"full": {"rope_type": "longrope"}})(case)
    before = case.identity()
    case.vllm_config.model_config.max_model_len = 4096
    assert changed_facts(before, case.identity()) == ("model.rope_max_model_len",)


def test_quantised_kv_records_its_scales(case: Case) -> None:
    from vllm.v1.kv_cache_interface import KVQuantMode

    set_spec(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)(case)
    before = case.identity()
    first_layer(case)._v_scale_float = 0.25
    assert changed_facts(before, case.identity()) == ("kv.groups[0].layers[0].kv_scales[1]",)
    del first_layer(case)._v_scale_float
    with pytest.raises(UnsupportedError, match="_v_scale_float"):
        case.identity()


def test_hash_seed_of_the_environment_counts(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    before = case.identity()
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert changed_facts(before, case.identity()) == ("hash.seed",)


def test_the_engine_derives_its_chain_from_the_seed_recorded(case: Case) -> None:
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils.init_none_hash(sha256)
    facts: Any = case.identity().facts
    assert sha256(facts["hash"]["seed"]) == kv_cache_utils.NONE_HASH


def test_digest_is_sha256_of_the_json_and_two_processes_agree(case: Case) -> None:
    identity = case.identity()
    assert identity.digest == hashlib.sha256(identity.canonical_json.encode()).digest()
    script = (
        "import sys, torch; sys.path[:0] = [sys.argv[1]]\n"
        "from conftest import make_engine; from test_identity import make_case\n"
        "print(make_case(make_engine(blocks=7)).identity().digest.hex())"
    )
    here = __file__.rsplit("/", 1)[0]
    answer = subprocess.run([sys.executable, "-c", script, here], capture_output=True, text=True, timeout=120)
    assert answer.stdout.strip() == identity.digest.hex(), answer.stderr


def test_what_cannot_be_written_down_is_refused(case: Case) -> None:
    case.vllm_config.model_config.quantization_config = {"x": object()}
    with pytest.raises(UnsupportedError, match=r"model\.quantization_config\.x is a object"):
        case.identity()


def test_missing_things_are_named(case: Case) -> None:
    layer = first_layer(case)
    del layer.isa
    with pytest.raises(UnsupportedError, match="isa is missing"):
        case.identity()
    layer.isa = "amx"
    del case.vllm_config.model_config.architecture
    with pytest.raises(UnsupportedError, match=r"0\.32 lacks .*architecture"):
        case.identity()


def test_layer_without_a_backend_is_refused(case: Case) -> None:
    case.vllm_config.compilation_config.static_forward_context.popitem()
    with pytest.raises(UnsupportedError, match=r"model\.layers\.2"):
        case.identity()


class Colour(enum.Enum):
    RED = 1


def test_canonical_json() -> None:
    value = {"b": (1, Fraction(1, 2)), "a": [Colour.RED, torch.float16, float("inf"), {3: None}], "s": {"y", "x"}}
    assert canonical_json(value) == '{"a":["RED","float16","inf",{"3":null}],"b":[1,"1/2"],"s":["\\"x\\"","\\"y\\""]}'


NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.text() | NUMBERS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@given(JSON)
def test_canonical_json_keeps_json_values(value: Any) -> None:
    assert json.loads(canonical_json(value)) == value


def test_normalised_hf_config_is_deep() -> None:
    nested = {"text_config": {"torch_dtype": torch.bfloat16, "_name_or_path": "x", "layers": [{"_commit_hash": "y"}]}}
    assert normalised_hf_config(nested) == {"text_config": {"dtype": "bfloat16", "layers": [{}]}}


ID, HASH, LORA = b"i" * 32, b"h" * 32, b"l" * 32


def test_chunk_key_written_out_by_hand() -> None:
    head = b"meshfusion-chunk" + (3).to_bytes(4, "little") + (256).to_bytes(8, "little") + bytes([32]) + b"\x20\x00"
    assert chunk_key(ID, 3, LORA, 256, HASH) == hashlib.sha256(head + ID + LORA + HASH).digest()


def test_chunk_key_depends_on_every_part() -> None:
    keys = {
        chunk_key(ID, 0, b"", 0, HASH),
        chunk_key(b"j" * 32, 0, b"", 0, HASH),
        chunk_key(ID, 1, b"", 0, HASH),
        chunk_key(ID, 0, LORA, 0, HASH),
        chunk_key(ID, 0, b"", 1, HASH),
        chunk_key(ID, 0, b"", 0, b"g" * 32),
        chunk_key(ID, 0, b"", 0, LORA + HASH),
    }
    assert len(keys) == 7
    assert {len(key) for key in keys} == {32}
