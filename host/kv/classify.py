"""The kind of one KV spec, and what must be there of it to resume; or why this version does not serve it (rule 6).

A spec is judged by its exact class first and then by facts that cut across classes: a window on a class that keeps
every block, scales beside the pages, a state without snapshots. A fact that is not known to be harmless refuses, and so
does one that cannot be read. Nothing of the engine is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshfusion.host.kv.kinds import (
    ATTENTION_SINK,
    BASE_CLASSES,
    CHUNKED_LOCAL,
    CONTAINER_CLASS,
    FULL_ATTENTION,
    KIND_BY_CLASS,
    MLA,
    RECURRENT_STATE,
    SLIDING_WINDOW,
    SLIDING_WINDOW_MLA,
    KvKind,
)
from meshfusion.host.kv.resume import LastWindow, LocalChunk, ResumeRule, StateAtBoundary, WholePrefix
from meshfusion.host.kv.versions import SUPPORTED_MINORS
from meshfusion.jbof.errors import UnsupportedError

PLAIN_CACHE_DTYPES = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")
"""Values of kv_cache_dtype whose pages hold the whole state, but for per-tensor scales, which the identity records."""

_WITHOUT = "start the engine without this connector"
_VERSIONS = f"use vLLM {SUPPORTED_MINORS[0]} to {SUPPORTED_MINORS[-1]}"
_MANAGER_OFF = f"leave the hybrid KV cache manager on, or {_WITHOUT}"
_SPECULATION = f"leave speculative decoding out, or {_WITHOUT}"
_PLAIN = f"use a kv_cache_dtype of {', '.join(PLAIN_CACHE_DTYPES)}"
_MISSING = object()


class _Fact(NamedTuple):
    """``good``: the values of attribute ``path`` that are known to be harmless. ``since``: the engine version it came
    with, if later than the oldest supported one; before that its absence is harmless."""

    path: str
    good: tuple[object, ...]
    why: str
    way_out: str
    since: str = ""


_UNPROVEN = "which is not proven"
_ATTENTION = (
    _Fact("tokens_per_state", (1,), "so that blocks do not hold one state for each token", _WITHOUT),
    _Fact("kv_quant_mode.name", ("NONE", "FP8_PER_TENSOR"), "whose scales may lie beside the pages", _PLAIN),
)
_FULL = (
    *_ATTENTION,
    _Fact("sliding_window", (None,), "on a layer that keeps every block", _MANAGER_OFF),
    _Fact("attention_chunk_size", (None,), "on a layer that keeps every block", _MANAGER_OFF),
    _Fact("non_causal", (False,), "so that its KV depends on later tokens and cannot be reused", _WITHOUT),
)
_LATENT = (
    _Fact("cache_dtype_str", (None, *PLAIN_CACHE_DTYPES), "a page format that is not proven", _PLAIN),
    _Fact("model_version", (None,), "a page format that is not proven", _WITHOUT),
)
_WINDOW = (
    *_ATTENTION,
    _Fact("extra_retained_tokens", (0,), "so that more than the window must be there", _SPECULATION),
)
_FACTS: dict[str, tuple[_Fact, ...]] = {
    FULL_ATTENTION.name: _FULL,
    MLA.name: (
        *_FULL,
        *_LATENT,
        _Fact("non_causal_multi_token_decode", (False,), "so that KV may depend on later tokens", _SPECULATION),
        _Fact("cache_role.value", ("sparse",), "keys of a sparse indexer, which are not proven", _WITHOUT),
        _Fact("is_index_group_leader", (False,), "a sparse indexer, which is not proven", _WITHOUT),
    ),
    SLIDING_WINDOW.name: _WINDOW,
    SLIDING_WINDOW_MLA.name: (
        *_WINDOW,
        *_LATENT,
        _Fact("bounded_replay", (False,), "so that the engine recomputes the window", _WITHOUT, since="0.31"),
    ),
    CHUNKED_LOCAL.name: _ATTENTION,
    ATTENTION_SINK.name: _FULL,
    RECURRENT_STATE.name: (
        _Fact(
            "mamba_cache_mode",
            ("align",),
            "and only in mode align do snapshots of the state outlast the next token",
            "start with --enable-prefix-caching and --mamba-cache-mode align; where a model or platform turns that "
            f"off, {_WITHOUT}",
        ),
        _Fact("mamba_type.name", ("MAMBA1", "MAMBA2", "SHORT_CONV", "LINEAR", "GDN_ATTN"), _UNPROVEN, _WITHOUT),
        _Fact("tokens_per_state", (-1,), "so that a block holds more than one state", _WITHOUT),
        _Fact("num_speculative_blocks", (0,), "so that states of rejected tokens lie among the blocks", _SPECULATION),
        # All Mamba2 layers of 0.32 have one, whatever the settings. The engine names the boundary of such a snapshot
        # exactly (boundary_state_offloads), so 1 may be added once end-to-end tests ran with it.
        _Fact("num_prefill_checkpoint_blocks", (0,), "snapshots from within a step, which are not proven", _WITHOUT),
    ),
}
_KNOWN_ROLES = {"cache_role.value": ("sparse", "indexer")}
_GROUP = (
    _Fact("is_eagle_group", (False,), "so that draft layers share its blocks", _SPECULATION),
    _Fact("host_resident", (False,), "so that its blocks are not in the device's pool", _WITHOUT),
    _Fact("enable_kv_transfer", (True,), "so that the engine keeps it from connectors", _WITHOUT),
)
_GROUP_ROLES = {
    "default": "",
    "hisparse_source": "KV in host memory with copies on the device",
    "hisparse_indexer": "the keys by which KV in host memory is chosen",
}


@dataclass(frozen=True, slots=True)
class Classification:
    """``refusals``: why this spec is not served, each a sentence "thing; way out"; empty: it is. ``rule``: what must be
    there to resume; never None when it is served, and known of some that are not."""

    kind: KvKind
    rule: ResumeRule | None
    refusals: tuple[str, ...]

    def __post_init__(self) -> None:
        assert self.refusals or self.rule is not None, self.kind.name


def class_name(spec: object) -> str:
    """The module-qualified name of the spec's exact class."""
    return f"{type(spec).__module__}.{type(spec).__qualname__}"


def member_specs(spec: Any) -> tuple[Any, ...]:
    """The layers' own specs: of a container those inside it, each once; of any other that one."""
    if class_name(spec) != CONTAINER_CLASS:
        return (spec,)
    members: list[Any] = []
    for member in spec.kv_cache_specs.values():
        if member not in members:
            members.append(member)
    return tuple(members)


def kind_of(spec: Any) -> KvKind:
    """The kind of one layer's spec. Raises :class:`UnsupportedError` that names a class, or a role, we do not know."""
    name = class_name(spec)
    kind = KIND_BY_CLASS.get(name)
    if kind is None:
        about = "stands for no layer" if name in {*BASE_CLASSES, CONTAINER_CLASS} else "is not known"
        raise UnsupportedError(f"KV spec class {name} {about}", next_step=f"{_VERSIONS}, or {_WITHOUT}")
    for path, known in _KNOWN_ROLES.items():
        value = _read(spec, path)
        if value is not _MISSING and value not in known:
            raise UnsupportedError(
                f"{type(spec).__name__}.{path} is {value!r}, a role that is not known",
                next_step=f"{_VERSIONS}, or {_WITHOUT}",
            )
    return kind


def classify(spec: Any) -> Classification:
    """Judges one layer's spec. Raises as :func:`kind_of`; whatever else is wrong is a refusal in the answer."""
    kind, name = kind_of(spec), type(spec).__name__
    if not kind.is_reusable:
        return Classification(kind, None, (f"KV of class {name} cannot be reused: {kind.why}; {_WITHOUT}",))
    refusals = list(_fact_refusals(spec, name, _FACTS.get(kind.name, ())))
    rule: ResumeRule | None = None
    if not refusals:
        try:
            rule = _rule(kind, spec)
        except _UnfitError as error:
            refusals.append(f"{name}.{error}; {_WITHOUT}")
    if kind.unserved:
        refusals.insert(0, f"KV of class {name} is not served: {kind.unserved}; {_WITHOUT}")
    return Classification(kind, rule, tuple(refusals))


def spec_refusals(spec: Any) -> tuple[str, ...]:
    """Why a group with this spec, of one layer or a container, is not served; empty: it is. Never raises."""
    lines: list[str] = []
    rules: list[ResumeRule] = []
    try:
        members = member_specs(spec)
    except AttributeError as error:
        return (f"{type(spec).__name__} cannot be read in this engine ({error}); {_VERSIONS}",)
    for member in members:
        try:
            found = classify(member)
        except UnsupportedError as error:
            lines.append(f"{error.message}; {error.next_step}")
            continue
        lines += found.refusals
        if found.rule is not None and found.rule not in rules:
            rules.append(found.rule)
    if not members:
        lines.append(f"{type(spec).__name__} describes no layer; {_WITHOUT}")
    if len(rules) > 1:
        lines.append(f"layers of one KV group need different things to resume: {rules}; {_WITHOUT}")
    return tuple(dict.fromkeys(lines))


def served_rule(spec: Any) -> ResumeRule:
    """What must be there to resume with a group of this spec, of one layer or a container.

    Raises :class:`UnsupportedError` that lists every refusal.
    """
    refusals = spec_refusals(spec)
    if refusals:
        raise UnsupportedError(f"a KV group is not served: {' / '.join(refusals)}", next_step=_WITHOUT)
    rule = classify(member_specs(spec)[0]).rule
    assert rule is not None
    return rule


def group_refusals(group: Any) -> tuple[str, ...]:
    """Why a ``KVCacheGroupSpec`` is not served, by its own facts and by its spec; empty: it is. Never raises."""
    lines = list(_fact_refusals(group, "KV group", _GROUP))
    role = _read(group, "role.value")
    if role is _MISSING:
        lines.append(f"KV group.role.value cannot be read in this engine; {_VERSIONS}")
    elif role not in _GROUP_ROLES:
        lines.append(f"KV group.role is {role!r}, which is not known; {_VERSIONS}, or {_WITHOUT}")
    elif _GROUP_ROLES[role]:
        lines.append(f"KV group.role is {role!r}, {_GROUP_ROLES[role]}; {_WITHOUT}")
    spec = _read(group, "kv_cache_spec")
    if spec is _MISSING:
        return (*lines, f"KV group.kv_cache_spec cannot be read in this engine; {_VERSIONS}")
    return (*lines, *spec_refusals(spec))


class _UnfitError(Exception):
    """What an attribute is that a rule cannot be made of: ``name is value, reason``."""


def _rule(kind: KvKind, spec: Any) -> ResumeRule | None:
    if kind in (SLIDING_WINDOW, SLIDING_WINDOW_MLA):
        return LastWindow(_count(spec, "sliding_window"))
    if kind is CHUNKED_LOCAL:
        stretch, block = _count(spec, "attention_chunk_size"), _count(spec, "block_size")
        if stretch % block != 0:
            # There the engine's own lookup forgets the blocks before an attention chunk that begins inside of one.
            raise _UnfitError(f"attention_chunk_size is {stretch}, not whole blocks of {block} tokens")
        return LocalChunk(stretch)
    if kind is RECURRENT_STATE:
        return StateAtBoundary()
    return WholePrefix() if kind in (FULL_ATTENTION, MLA, ATTENTION_SINK) else None


def _count(spec: Any, name: str) -> int:
    value = getattr(spec, name, _MISSING)
    if not isinstance(value, int) or value < 1:
        raise _UnfitError(f"{name} {'is missing' if value is _MISSING else f'is {value!r}'}, not a count of tokens")
    return value


def _fact_refusals(root: Any, label: str, facts: tuple[_Fact, ...]) -> Iterator[str]:
    for path, good, why, way_out, since in facts:
        value = _read(root, path)
        if value is _MISSING:
            if not since:
                yield f"{label}.{path} cannot be read in this engine; {_VERSIONS}"
        elif not any(value == item for item in good):
            yield f"{label}.{path} is {value!r}, {why}; {way_out}"


def _read(root: Any, path: str) -> Any:
    value = root
    for name in path.split("."):
        value = getattr(value, name, _MISSING)
        if value is _MISSING:
            break
    return value
