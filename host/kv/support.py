"""What this version knows to be right; everything else refuses to start (rule 6).

Each check adds sentences "thing; way out". Nothing here crashes on an engine that lacks an attribute: a
missing attribute that a check relies on is itself a refusal that names it.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshfusion.dpu.api.limits import MAX_GROUPS
from meshfusion.host.kv.classify import PLAIN_CACHE_DTYPES, group_refusals, served_rule
from meshfusion.host.kv.identity import installed_engine_version
from meshfusion.host.kv.layout import layer_specs
from meshfusion.host.kv.resume import ResumeRule
from meshfusion.host.kv.versions import SEVERAL_RANKS_MINORS, SUPPORTED_MINORS
from meshfusion.jbof.errors import UnsupportedError

HASH_ALGORITHMS = ("sha256", "sha256_cbor")  # the others are not collision resistant

_WITHOUT = "start the engine without this connector"
_VERSIONS = f"vLLM {SUPPORTED_MINORS[0]} to {SUPPORTED_MINORS[-1]}"
_ONE_RANK = "set it to 1: of several ranks only tensor-parallel ones are served yet"
_SERVE_ANYWAY = "on_unsupported: serve_without_cache"
_MISSING = object()


class _Expected(NamedTuple):
    path: str
    good: tuple[object, ...]
    way_out: str


_CONFIG = (
    _Expected(
        "cache_config.enable_prefix_caching",
        (True,),
        "start with --enable-prefix-caching; where a model or platform turns it off, " + _WITHOUT,
    ),
    _Expected("cache_config.cache_dtype", PLAIN_CACHE_DTYPES, f"use one of {', '.join(PLAIN_CACHE_DTYPES)}"),
    _Expected("cache_config.kv_sharing_fast_prefill", (False,), "turn it off"),
    *(
        _Expected(f"parallel_config.{name}_parallel_size", (1,), _ONE_RANK)
        for name in ("pipeline", "decode_context", "prefill_context", "data")
    ),
    _Expected("parallel_config.enable_elastic_ep", (False,), "turn it off"),
    _Expected("speculative_config", (None,), "leave it out: speculative decoding is not served yet"),
    _Expected("diffusion_config", (None,), f"diffusion rewrites KV in place: {_WITHOUT}"),
    _Expected("weight_transfer_config", (None,), f"weights may change while the engine runs: {_WITHOUT}"),
    _Expected(
        "model_config.enable_sleep_mode",
        (False,),
        "turn it off: sleeping drops KV memory and weights under the connector",
    ),
    _Expected("model_config.is_encoder_decoder", (False,), f"use a decoder-only model, or {_WITHOUT}"),
    _Expected("model_config.runner_type", ("generate",), "start with --runner generate"),
    _Expected("use_v2_model_runner", (False,), "start with VLLM_USE_V2_MODEL_RUNNER=0: that runner is not proven"),
    _Expected("kv_transfer_config.kv_role", ("kv_both",), "set kv_role to kv_both"),
    _Expected(
        "kv_transfer_config.enable_permute_local_kv", (False,), "set it to false: loaded bytes must stay as they are"
    ),
)
_LOAD_FAILURE_POLICY = _Expected(
    "kv_transfer_config.kv_load_failure_policy",
    ("recompute",),
    "set it to recompute, so that a failed load costs time and not the request "
    "(or set force_load_failure_policy in kv_connector_extra_config)",
)


@dataclass(slots=True)
class _Findings:
    lines: list[str] = field(default_factory=list)

    def refuse(self, thing: str, way_out: str) -> None:
        self.lines.append(f"{thing}; {way_out}")

    def module(self, name: str) -> Any:
        try:
            return importlib.import_module(name)
        except ImportError:
            self.refuse(f"module {name} is missing in this engine", f"use {_VERSIONS}")
            return _MISSING

    def read(self, root: Any, path: str, label: str) -> Any:
        """Attribute ``path`` of ``root``, or ``_MISSING`` after refusing."""
        value = root
        if root is _MISSING:
            return _MISSING  # refused already
        for name in path.split("."):
            try:
                value = getattr(value, name)
            except Exception as error:
                self.refuse(
                    f"{label}.{path} cannot be read in this engine ({type(error).__name__})",
                    f"use {_VERSIONS}",
                )
                return _MISSING
        return value

    def expect(self, root: Any, label: str, expected: Iterable[_Expected]) -> None:
        for path, good, way_out in expected:
            value = self.read(root, path, label)
            if value is not _MISSING and not any(value == item for item in good):
                self.refuse(f"{label}.{path} is {value!r}", way_out + _default_hint(root, path, value))


def _default_hint(root: Any, path: str, value: object) -> str:
    """Says so when ``value`` is what vLLM takes for a setting of the transfer that nobody made: the user may look
    for it in vain. (vLLM does not tell whether it was set.)"""
    owner, _, name = path.rpartition(".")
    if owner != "kv_transfer_config":
        return ""
    described = getattr(type(getattr(root, owner)), "__dataclass_fields__", {}).get(name)
    if described is None or described.default != value:
        return ""
    return f"; {value!r} is vLLM's default, which counts when {name} is not set"


def check_supported(
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    force_load_failure_policy: bool = False,
    serves_without_cache: bool = False,
    version: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Raises one :class:`UnsupportedError` that lists every refusal. ``serves_without_cache``: that is set already and
    need not be advised."""
    found = (
        *refusals(
            vllm_config,
            kv_cache_config,
            force_load_failure_policy=force_load_failure_policy,
            version=version,
        ),
        *environment_refusals(environ),
    )
    if found:
        listed = "".join(f"\n  - {line}" for line in found)
        raise UnsupportedError(
            f"MeshFusion has not been proven right with this engine, for {len(found)} reason(s):{listed}",
            next_step="change what is named"
            + ("" if serves_without_cache else f", or set {_SERVE_ANYWAY} to start without the cache"),
        )


def refusals(
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    force_load_failure_policy: bool = False,
    version: str | None = None,
) -> tuple[str, ...]:
    """Everything about the engine that is not known to be right; empty means go. May be called in both roles."""
    findings = _Findings()
    version = version or installed_engine_version()
    _check_version(findings, version)
    _check_groups(findings, kv_cache_config)
    findings.expect(vllm_config, "vllm_config", _CONFIG)
    if not force_load_failure_policy:
        findings.expect(vllm_config, "vllm_config", (_LOAD_FAILURE_POLICY,))
    _check_hashing(findings, vllm_config)
    _check_block_sizes(findings, vllm_config, kv_cache_config)
    _check_shared_layers(findings, vllm_config)
    _check_ranks(findings, vllm_config, version)
    return tuple(findings.lines)


def environment_refusals(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Environment variables that make the engine one we have not proven. PYTHONHASHSEED is fine: see identity."""
    findings = _Findings()
    if environ.get("VLLM_USE_V2_MODEL_RUNNER", "0").lower() not in ("", "0", "false"):
        findings.refuse("VLLM_USE_V2_MODEL_RUNNER is set and that runner is not proven", "unset it")
    return tuple(findings.lines)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _check_version(findings: _Findings, version: str) -> None:
    if _minor(version) not in SUPPORTED_MINORS:
        findings.refuse(
            f"vLLM {version} is not one of the proven versions",
            f"install {_VERSIONS}",
        )


def _check_groups(findings: _Findings, config: Any) -> None:
    layout = findings.read(config, "kv_cache_layout", "kv_cache_config")
    if layout is None:
        findings.refuse(
            "the KV cache layout is unresolved",
            "report the engine version and platform",
        )
    groups = findings.read(config, "kv_cache_groups", "kv_cache_config")
    if groups is _MISSING:
        return
    if not groups:
        findings.refuse("the engine keeps no KV", _WITHOUT)
    if len(groups) > MAX_GROUPS:
        findings.refuse(f"the engine has {len(groups)} KV groups and the service knows {MAX_GROUPS} at most", _WITHOUT)
    for index, group in enumerate(groups):
        label = f"kv_cache_groups[{index}]"
        found = group_refusals(group)
        findings.lines += [f"{label}: {line}" for line in found]
        if not found:
            try:
                layer_specs(group)
            except UnsupportedError as error:
                findings.refuse(f"{label}: {error.message}", _WITHOUT)


def _check_hashing(findings: _Findings, config: Any) -> None:
    algorithm = findings.read(config, "cache_config.prefix_caching_hash_algo", "vllm_config")
    multimodal = findings.read(config, "model_config.is_multimodal_model", "vllm_config")
    if algorithm is not _MISSING and algorithm not in HASH_ALGORITHMS:
        findings.refuse(
            f"prefix_caching_hash_algo {algorithm!r} is not collision resistant, so a pool could serve foreign KV",
            "use --prefix-caching-hash-algo sha256_cbor",
        )
    if multimodal is True and algorithm == "sha256":
        findings.refuse(
            "prefix_caching_hash_algo 'sha256' depends on object identity for multimodal models",
            "use --prefix-caching-hash-algo sha256_cbor",
        )


def _check_block_sizes(findings: _Findings, config: Any, kv_cache_config: Any) -> None:
    """Boundaries must be the same for the engine and for us: the least common multiple of what its groups count in."""
    resolve = findings.read(findings.module("vllm.v1.core.kv_cache_utils"), "resolve_kv_cache_block_sizes", "vllm")
    groups = getattr(kv_cache_config, "kv_cache_groups", None)
    if resolve is _MISSING or not groups:
        return
    try:
        scheduler_tokens, hash_tokens = resolve(kv_cache_config, config)
        sizes = [int(group.kv_cache_spec.block_size) for group in groups]
    except Exception as error:
        findings.refuse(
            f"the engine cannot resolve its block sizes ({type(error).__name__}: {error})",
            _WITHOUT,
        )
        return
    if scheduler_tokens != math.lcm(*sizes):
        findings.refuse(f"the scheduler counts blocks of {scheduler_tokens} tokens, the KV groups of {sizes}", _WITHOUT)
    elif hash_tokens < 1 or any(size % hash_tokens for size in sizes):
        findings.refuse(f"blocks of {sizes} tokens are not whole hash blocks of {hash_tokens}", _WITHOUT)


def _check_shared_layers(findings: _Findings, config: Any) -> None:
    layers = findings.read(config, "compilation_config.static_forward_context", "vllm_config")
    if layers is _MISSING:
        return
    shared = [name for name, layer in layers.items() if getattr(layer, "kv_sharing_target_layer_name", None)]
    if shared:
        findings.refuse(f"layers {shared} use the KV of other layers (cross-layer KV sharing)", _WITHOUT)


def _check_ranks(findings: _Findings, config: Any, version: str) -> None:
    ranks = findings.read(config, "parallel_config.tensor_parallel_size", "vllm_config")
    if ranks is _MISSING:
        return
    if not (isinstance(ranks, int) and ranks >= 1):
        findings.refuse(f"vllm_config.parallel_config.tensor_parallel_size is {ranks!r}", "set it to a count of ranks")
    elif ranks > 1 and _minor(version) not in SEVERAL_RANKS_MINORS:
        findings.refuse(
            f"vllm_config.parallel_config.tensor_parallel_size is {ranks}, not proven with vLLM {version}",
            f"set it to 1, or install vLLM {' or '.join(SEVERAL_RANKS_MINORS)}",
        )


def served_rules(kv_cache_config: Any) -> tuple[ResumeRule, ...]:
    """What each KV group needs to resume, in the engine's order. Raises :class:`UnsupportedError` for one that is not
    served."""
    return tuple(served_rule(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups)
