"""What a worker proves when it starts: how its memory is laid out, how that is cut into chunks, and its identity."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from meshfusion.host.connector.config import ConnectorConfig
from meshfusion.host.connector.vllm.messages import WorkerFacts
from meshfusion.host.connector.vllm.proven_memory import ProvenMemory, prove_memory
from meshfusion.host.kv.chunk_form import ChunkForm, form_of
from meshfusion.host.kv.drift import UnitNumbers, numbers_of
from meshfusion.host.kv.freshness import process_started_ns
from meshfusion.host.kv.identity import Identity, build_identity, hash_block_tokens
from meshfusion.host.kv.sharding import ranks_per_shard
from meshfusion.host.kv.support import served_rules
from meshfusion.host.kv.weights import FileDigester, processor_fact, weights_fact
from meshfusion.host.path.block_layout import Runs
from meshfusion.host.path.opening import access_of
from meshfusion.jbof.errors import MeshFusionError

logger = logging.getLogger("meshfusion.worker")


@dataclass(frozen=True, slots=True, eq=False)
class WorkerProof:
    """``memory`` is its owner's to close; ``numbers``: what it holds, for audits, empty without them."""

    memory: ProvenMemory
    numbers: tuple[UnitNumbers, ...]
    facts: WorkerFacts


def prove_worker(
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
    config: ConnectorConfig,
    *,
    rank: int,
) -> WorkerProof:
    """Raises :class:`~meshfusion.jbof.errors.UnsupportedError` at any doubt (rule 6), and
    :class:`~meshfusion.jbof.errors.MediaError` when a device fails."""
    proven = prove_memory(kv_cache_config, kv_caches, config.path.kind)
    try:
        form = _form(vllm_config, kv_cache_config, proven, config)
        numbers = numbers_of(kv_cache_config, kv_caches, proven.layouts) if config.audit.share else ()
        identity = _identity(vllm_config, kv_cache_config, kv_caches, proven, form, config)
        facts = WorkerFacts(
            identity=identity.digest,
            identity_json=identity.canonical_json,
            form=form,
            hash_block_tokens=hash_block_tokens(vllm_config, kv_cache_config),
            block_count=proven.layouts[0].block_count,
            runs=Runs.of(proven.memory.place.address, proven.layouts),
            rank=rank,
            access=access_of(config.path.kind).value,
            selftest_bytes=sum(report.bytes_moved for report in proven.reports),
        )
    except BaseException:
        with contextlib.suppress(MeshFusionError):
            proven.memory.close()
        raise
    logger.info(
        "layout %s proven for %d KV group(s) on %d blocks each of %s; identity %s; %d tokens a chunk; %s",
        kv_cache_config.kv_cache_layout,
        len(proven.layouts),
        len(proven.reports[0].blocks),
        proven.memory.place.device or "the host",
        identity.digest.hex()[:16],
        form.chunk_tokens,
        ", ".join(
            f"{type(plan.rule).__name__}: {layout.unit_bytes} bytes a block of {plan.block_tokens} tokens, "
            f"in {layout.run_count} run(s)"
            for plan, layout in zip(form.plans, proven.layouts, strict=True)
        ),
    )
    return WorkerProof(proven, numbers, facts)


def _form(vllm_config: Any, kv_cache_config: Any, proven: ProvenMemory, config: ConnectorConfig) -> ChunkForm:
    rank_count = vllm_config.parallel_config.tensor_parallel_size
    return form_of(
        proven.layouts,
        served_rules(kv_cache_config),
        chunk_min_bytes=config.chunk_min_bytes,
        rank_count=rank_count,
        ranks_per_shard=[ranks_per_shard(group.kv_cache_spec, rank_count) for group in kv_cache_config.kv_cache_groups],
    )


def _identity(
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
    proven: ProvenMemory,
    form: ChunkForm,
    config: ConnectorConfig,
) -> Identity:
    model_config, load_config = vllm_config.model_config, vllm_config.load_config
    return build_identity(
        vllm_config,
        kv_cache_config,
        kv_caches,
        proven.layouts,
        weights_fact(
            model_config,
            load_config,
            weights_id=config.weights_id,
            digester=FileDigester(),
            engine_started_ns=process_started_ns(),
        ),
        form=form,
        processor=processor_fact(model_config, load_config),
    )
