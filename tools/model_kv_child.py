"""The child of :mod:`meshfusion.tools.model_kv`: builds the engine's configuration and the model's skeleton.

The skeleton has no memory (torch's meta device), so that a model of any size is built in the time its modules take.
Grouping and page sizes come from the same functions that a start of the engine runs (vLLM, v1/engine/core.py,
``_initialize_kv_caches``); only the memory is made up.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from meshfusion.host.kv.classify import classify, group_refusals, kind_of, member_specs, served_rule
from meshfusion.host.kv.identity import installed_engine_version
from meshfusion.host.kv.kinds import RECURRENT_STATE
from meshfusion.host.kv.page_size import page_size
from meshfusion.host.kv.resume import ResumeRule
from meshfusion.host.kv.sharding import ranks_per_shard
from meshfusion.jbof.errors import UnsupportedError
from meshfusion.tools.model_kv import (
    DEFAULT_SETTINGS,
    EngineSettings,
    GroupKv,
    LayerKv,
    ModelKv,
    limit_tokens,
    rule_in_words,
    to_object,
)

_MADE_UP_MEMORY_BYTES = 1 << 46
_EXPERT_PARAMETERS = ("w13_", "w2_")


def describe(model: str, settings: EngineSettings = DEFAULT_SETTINGS) -> ModelKv:
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform

    started_s = time.monotonic()
    config = _engine_config(model, settings)
    with tempfile.TemporaryDirectory() as scratch, set_current_vllm_config(config):
        skeleton = _build(config, Path(scratch))
        current_platform.update_block_size_for_backend(config)
        groups = _groups(config)
    parameters, active = _parameters(config, skeleton)
    refusals = []
    if not config.cache_config.enable_prefix_caching:
        refusals.append(
            "the engine turns prefix caching off for this model on this platform; "
            "run it where vLLM supports prefix caching for it"
        )
    if not groups:
        refusals.append("the model keeps no KV; start the engine without this connector")
    return ModelKv(
        engine=installed_engine_version(),
        platform=str(current_platform.device_type),
        groups=tuple(_describe_group(group, settings.tensor_parallel_size) for group in groups),
        parameters=parameters,
        active_parameters=active,
        refusals=tuple(refusals),
        elapsed_s=round(time.monotonic() - started_s, 1),
    )


def _engine_config(model: str, settings: EngineSettings) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        model=model, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, enable_prefix_caching=True,
        block_size=settings.block_size, dtype=settings.dtype, kv_cache_dtype=settings.kv_cache_dtype,
        max_model_len=settings.max_model_len,
    ).create_engine_config()  # fmt: skip
    # Told afterwards: the engine wants as many devices as ranks, and this machine need not be the one that serves.
    config.parallel_config.tensor_parallel_size = settings.tensor_parallel_size
    config.parallel_config.world_size = settings.tensor_parallel_size
    config.model_config.verify_with_parallel_config(config.parallel_config)
    return config


def _build(config: Any, scratch: Path) -> Any:
    """The model's modules, which register their attention layers with the configuration."""
    import torch
    from vllm.distributed import get_tp_group, init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    init_distributed_environment(1, 0, f"file://{scratch / 'rendezvous'}", 0, "gloo")
    initialize_model_parallel(1, 1)
    # This is rank 0 of the ranks that layers divide themselves by; building them exchanges nothing.
    get_tp_group().world_size = config.parallel_config.tensor_parallel_size
    with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
        return initialize_model(config)


def _groups(config: Any) -> list[Any]:
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerBase

    # The two methods read nothing of a worker but these.
    worker: Any = SimpleNamespace(vllm_config=config, shared_kv_cache_layers={})
    specs = GPUModelRunner.get_kv_cache_spec(worker)
    if not specs:
        return []
    if any(getattr(spec, "non_causal", False) for spec in specs.values()):
        config.cache_config.enable_prefix_caching = False
    layouts = WorkerBase.get_supported_kv_cache_layouts(worker)
    config.cache_config.kv_cache_layout = resolve_kv_cache_layout(config, [layouts], list(specs.values())).name
    (made,) = get_kv_cache_configs(config, [specs], [_MADE_UP_MEMORY_BYTES])
    return list(made.kv_cache_groups)


def _describe_group(group: Any, rank_count: int) -> GroupKv:
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None) or dict.fromkeys(
        group.layer_names, group.kv_cache_spec
    )
    members = []
    for spec in member_specs(group.kv_cache_spec):
        names = [name for name in group.layer_names if per_layer[name] == spec]
        members.append(_describe_layers(spec, names))
    refusals = group_refusals(group)
    if refusals:
        return GroupKv(tuple(members), refusals)
    spec = group.kv_cache_spec
    return GroupKv(tuple(members), (), served_rule(spec), ranks_per_shard(spec, rank_count))


def _describe_layers(spec: Any, names: list[str]) -> LayerKv:
    rule: ResumeRule | None = None
    kind, real, held = "", 0, int(spec.page_size_bytes)
    try:
        kind, size = kind_of(spec).name, page_size(spec)
        real, held, rule = size.real_bytes, size.held_bytes, classify(spec).rule
    except UnsupportedError:
        pass  # among the group's refusals
    assert held == spec.page_size_bytes, (type(spec).__name__, held, spec.page_size_bytes)
    return LayerKv(
        spec_class=type(spec).__name__,
        kind=kind,
        layers=len(names),
        first_layer=names[0],
        rule="" if rule is None else rule_in_words(rule),
        block_tokens=int(spec.block_size),
        real_bytes=real,
        held_bytes=held,
        limit_tokens=limit_tokens(rule),
        is_state=kind == RECURRENT_STATE.name,
    )


def _parameters(config: Any, skeleton: Any) -> tuple[int, int]:
    """All, and those that one token is multiplied with: of experts the share that is chosen, no embeddings, no head."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    text_config, experts = config.model_config.hf_text_config, config.model_config.get_num_experts()
    chosen = getattr(text_config, "num_experts_per_tok", getattr(text_config, "num_experts_per_token", None))
    share = chosen / experts if chosen and experts else 1.0
    vocabulary = {
        id(parameter)
        for module in skeleton.modules()
        if isinstance(module, VocabParallelEmbedding)
        for parameter in module.parameters()
    }
    total, active = 0, 0.0
    for name, parameter in skeleton.named_parameters():
        total += parameter.numel()
        if id(parameter) not in vocabulary:
            is_expert = name.rpartition(".")[2].startswith(_EXPERT_PARAMETERS)
            active += parameter.numel() * (share if is_expert else 1.0)
    return total, round(active)


def main(model: str, answer: Path, settings: EngineSettings) -> None:
    """Writes a :class:`ModelKv` as JSON to ``answer``, or ``{"error": MESSAGE}``."""
    try:
        body = to_object(describe(model, settings))
    except Exception as error:  # the engine raises anything at all about a model that it cannot build
        body = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    answer.write_text(json.dumps(body), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), EngineSettings(**json.loads(sys.argv[3])))
