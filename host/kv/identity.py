"""Identity: the digest of everything that must be equal for KV bytes to be exchangeable (rule 5).

In: the causes of the bytes (weights, configuration, backends) and the canonical byte order of a page.
Out: what one process happens to have (addresses, strides between pages, number of blocks, model path), so
that resizing the engine's cache or moving the model keeps its hits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshfusion.host.kv.canonical import canonical_json, normalised_hf_config
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.kv.group_layout import GroupLayout
from meshfusion.host.kv.layout import layer_specs, page_order
from meshfusion.host.kv.resume import GroupPlan, StateAtBoundary
from meshfusion.jbof.errors import UnsupportedError

IDENTITY_SCHEMA = 2  # 2: several KV groups
ENGINE_KIND = "vllm"

# Distance between pages, not content.
_SPEC_PLACEMENT_FIELDS = frozenset({"page_size_padded", "block_stride_alignment"})
# For these the rotary table depends on the model's configuration alone. Others may also look at max_model_len.
_STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "mrope"})
_MULTIMODAL_FIELDS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_hasher_algorithm",
    "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "interleave_mm_strings",
    "video_pruning_rate",
    "video_pruning_method",
    "language_model_only",
)


@dataclass(frozen=True, slots=True)
class Identity:
    """``canonical_json`` says everything; ``digest`` (32 bytes) is its SHA-256. Safe to send between processes."""

    canonical_json: str

    @property
    def facts(self) -> Mapping[str, object]:
        facts: dict[str, object] = json.loads(self.canonical_json)
        return facts

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.canonical_json.encode()).digest()


def build_identity(
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
    layouts: Sequence[GroupLayout],
    weights: str,
    *,
    form: ChunkForm,
    processor: str = "",
    engine_version: str | None = None,
) -> Identity:
    """Identity of a worker after its KV tensors are registered. ``weights``: from ``weights_fact``.

    Raises :class:`UnsupportedError` naming a fact that cannot be read or written down exactly.
    """
    version = minor_version(engine_version or installed_engine_version())
    try:
        facts = _facts(vllm_config, kv_cache_config, kv_caches, layouts, form)
    except AttributeError as error:
        raise UnsupportedError(
            f"identity: vLLM {version} lacks something that the identity needs: {error}",
            next_step="use a supported vLLM version, or start the engine without this connector",
        ) from error
    return Identity(
        canonical_json(
            {
                "schema": IDENTITY_SCHEMA,
                "engine": {"kind": ENGINE_KIND, "minor": version},
                "weights": weights,
                "processor": processor,
                **facts,
            }
        )
    )


def _facts(
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
    layouts: Sequence[GroupLayout],
    form: ChunkForm,
) -> dict[str, object]:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    attention_layers = vllm_config.compilation_config.static_forward_context
    hf_config = normalised_hf_config(model.hf_config.to_dict())
    return {
        "model": {
            "architecture": model.architecture,
            "implementation": model.model_impl,
            "class_overrides": model.model_class_overrides,
            "hf_config_sha256": _sha256_hex(hf_config),
            "rope_max_model_len": model.max_model_len if _rope_depends_on_length(hf_config) else None,
            "disable_sliding_window": model.disable_sliding_window,
            "dtype": model.dtype,
            "quantization": model.quantization,
            "quantization_config": model.quantization_config,
            "quantization_class": type(vllm_config.quant_config).__name__,
        },
        "load_format": str(vllm_config.load_config.load_format),  # says which of a folder's files count
        "multimodal": _multimodal_facts(model),
        "attention_config": vllm_config.attention_config,
        "parallel": _parallel_facts(vllm_config.parallel_config),
        "hash": hash_facts(vllm_config, kv_cache_config),
        "kv": {
            "cache_dtype": cache.cache_dtype,
            "dtype_skip_layers": cache.kv_cache_dtype_skip_layers,
            "chunk_tokens": form.chunk_tokens,
            "groups": [
                _group_facts(kv_cache_config.kv_cache_groups[layout.group], kv_caches, layout, plan, attention_layers)
                for layout, plan in zip(layouts, form.plans, strict=True)
            ],
            **_shard_facts(form),
        },
    }


def _shard_facts(form: ChunkForm) -> dict[str, object]:
    """Nothing for one rank, so that pools from before there were several keep their hits."""
    return {} if form.rank_count == 1 else {"shards": [form.shard_count(plan.group) for plan in form.plans]}


def _group_facts(
    group: Any,
    kv_caches: Mapping[str, torch.Tensor],
    layout: GroupLayout,
    plan: GroupPlan,
    attention_layers: Mapping[str, Any],
) -> dict[str, object]:
    specs = layer_specs(group)
    return {
        "resumes_with": {"rule": type(plan.rule).__name__, **dataclasses.asdict(plan.rule)},
        "block_tokens": layout.block_tokens,
        "unit_bytes": layout.unit_bytes,
        "layers": [
            _layer_facts(name, specs[name], kv_caches[name], layout, plan, attention_layers)
            for name in layout.layer_names
        ],
    }


def chunk_key(
    identity_digest: bytes,
    group: int,
    adapter_digest: bytes,
    position_tokens: int,
    block_hash: bytes,
) -> bytes:
    """Key (32 bytes) of the chunk that ends with the block ``block_hash`` and starts at ``position_tokens``.

    The engine's block hash chains over all tokens before it, media, salt and adapter name. ``adapter_digest``
    is ``b""`` without an adapter.
    """
    assert len(identity_digest) == 32, len(identity_digest)
    assert len(adapter_digest) in (0, 32), len(adapter_digest)
    head = struct.pack(
        "<16sIQBH",
        b"meshfusion-chunk",
        group,
        position_tokens,
        len(adapter_digest),
        len(block_hash),
    )
    return hashlib.sha256(head + identity_digest + adapter_digest + block_hash).digest()


def changed_facts(first: Identity, second: Identity) -> tuple[str, ...]:
    """Dotted names of the facts in which two identities differ, to explain why engines do not share."""
    ours, theirs = dict(_leaves("", first.facts)), dict(_leaves("", second.facts))
    missing = object()
    return tuple(sorted(n for n in ours.keys() | theirs.keys() if ours.get(n, missing) != theirs.get(n, missing)))


def installed_engine_version() -> str:
    return str(importlib.import_module("vllm").__version__)


def minor_version(version: str) -> str:
    return ".".join(version.split(".")[:2])


def hash_facts(vllm_config: Any, kv_cache_config: Any) -> dict[str, object]:
    """How block hashes come about. The chain's first value is derived from the seed, which PYTHONHASHSEED sets.

    The seed is resolved as the engine will (its own value is set only after connectors are made).
    """
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    hashing = importlib.import_module("vllm.utils.hashing")
    return {
        "algorithm": algorithm,
        "block_tokens": hash_block_tokens(vllm_config, kv_cache_config),
        "seed": utils.resolve_none_hash_seed(hashing.get_hash_fn_by_name(algorithm)),
    }


def hash_block_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens per block hash; a KV block is one or more of them."""
    utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    _, tokens = utils.resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return int(tokens)


def _sha256_hex(value: Any) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def _leaves(name: str, value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(f"{name}.{key}" if name else key, item)
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(f"{name}[{index}]", item)
    else:
        yield name, value


def _parallel_facts(parallel: Any) -> dict[str, object]:
    return {
        "tensor": parallel.tensor_parallel_size,
        "pipeline": parallel.pipeline_parallel_size,
        "decode_context": parallel.decode_context_parallel_size,
        "prefill_context": parallel.prefill_context_parallel_size,
        "interleave_tokens": [
            parallel.dcp_kv_cache_interleave_size,
            parallel.cp_kv_cache_interleave_size,
        ],
    }


def _multimodal_facts(model: Any) -> dict[str, object] | None:
    if not model.is_multimodal_model:
        return None
    config = model.multimodal_config
    return {name: getattr(config, name, None) for name in _MULTIMODAL_FIELDS}


def _layer_facts(
    name: str,
    spec: Any,
    view: torch.Tensor,
    layout: GroupLayout,
    plan: GroupPlan,
    attention_layers: Mapping[str, Any],
) -> dict[str, object]:
    if name not in attention_layers:
        raise UnsupportedError(
            f"identity: the engine does not say which attention backend serves layer {name!r}",
            next_step="start the engine without this connector and report the model",
        )
    layer = attention_layers[name]
    backend = layer.get_attn_backend()
    facts: dict[str, object] = {
        "name": name,
        "spec": type(spec).__name__,
        "spec_fields": {
            f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.name not in _SPEC_PLACEMENT_FIELDS
        },
        "backend": [backend.get_name(), f"{backend.__module__}.{backend.__qualname__}"],
        "device": view.device.type,
        "view": {
            "dtype": view.dtype,
            "shape": list(view.shape[1:]),
            # Axes of one element have no order.
            "order": [axis for axis in page_order(view)[1:] if view.shape[axis] > 1],
            "kernel_blocks_per_block": view.shape[0] // layout.block_count,
        },
    }
    if isinstance(plan.rule, StateAtBoundary):
        return facts  # states are kept as computed: no packing for an instruction set, no quantisation
    if view.device.type == "cpu":
        # Each instruction set packs keys its own way inside a page.
        facts["isa"] = _required(layer, "isa", name)
    if int(_required(spec, "kv_quant_mode", name)) != 0:
        facts["kv_scales"] = [float(_required(layer, field, name)) for field in ("_k_scale_float", "_v_scale_float")]
    return facts


def _required(thing: Any, attribute: str, layer: str) -> Any:
    value = getattr(thing, attribute, None)
    if value is None:
        raise UnsupportedError(
            f"identity: layer {layer!r}: {type(thing).__name__}.{attribute} is missing in this engine",
            next_step="start the engine without this connector and report the engine version and model",
        )
    return value


def _rope_depends_on_length(hf_config: Any) -> bool:
    return not set(_rope_types(hf_config, inside=False)) <= _STATIC_ROPE_TYPES


def _rope_types(value: Any, *, inside: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        kind = value.get("rope_type", value.get("type")) if inside else None
        if isinstance(kind, str):
            yield kind
        for key, item in value.items():
            yield from _rope_types(item, inside=inside or key in ("rope_scaling", "rope_parameters"))
    elif isinstance(value, list):
        for item in value:
            yield from _rope_types(item, inside=inside)
