"""Formulas of what the service and its target need of the DPU or storage server.

What the service needs was measured on a shared virtual machine (docs/medium-performance.md), not on a DPU.
"""

from __future__ import annotations

from typing import Any, Final

from meshfusion.dpu.export.spdk.sizing import Sizing
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.tools.plan.formula import Unit, formula

INDEX_BYTES_PER_RECORD: Final = 419
SERVICE_BYTES: Final = 36_000_000
"""Of the 100 MB of a service with ten million chunks, what is not the pool's 64 MB."""
SERVICE_BYTES_PER_SEGMENT: Final = 403
"""64 MB for 158 731 segments."""
POLICY_BYTES_PER_RECORD: Final = 14
HISTORY_BYTES_PER_RECORD: Final = 20
HISTORY_RECORDS_MAX: Final = 1 << 23
LOOKED_UP_RECORDS_PER_S: Final = 68_000
COMMIT_S: Final = 0.00059
"""Of one chunk at a time; 400 at once take an eighth of that each."""

_MEASURED: Final = "measured on a shared virtual machine (docs/medium-performance.md)"


@formula("chunks in the index", Unit.COUNT, "of a full pool")
def index_records(kept_tokens: float, chunk_tokens: int, records_per_chunk: float) -> Any:
    return kept_tokens / chunk_tokens * records_per_chunk


@formula(
    "index",
    Unit.BYTES,
    f"{INDEX_BYTES_PER_RECORD} bytes a chunk in LMDB, {_MEASURED}; a file, of which memory holds what is used",
)
def index_bytes(index_records: float) -> Any:
    return index_records * INDEX_BYTES_PER_RECORD


@formula("memory of the service", Unit.BYTES, f"{_MEASURED}; what the policy takes is reckoned there")
def service_memory(form: ChunkForm, segments: int, index_records: float) -> Any:
    return (
        SERVICE_BYTES
        + segments * SERVICE_BYTES_PER_SEGMENT
        + index_records * POLICY_BYTES_PER_RECORD
        + len(form.plans) * min(index_records, HISTORY_RECORDS_MAX) * HISTORY_BYTES_PER_RECORD
    )


@formula("memory in all", Unit.BYTES, "service, index and nvmf_tgt; without the system itself")
def memory_needed(service_memory: float, index_bytes: float, target_memory: int) -> Any:
    return service_memory + index_bytes + target_memory


@formula(
    "connections of the target",
    Unit.COUNT,
    "each rank of each engine over each port, from one port of its own, and one for the controller "
    "(jbof/nvme/settings.py)",
)
def target_connections(form: ChunkForm, engines: int, nics: int, queues_per_path: int) -> Any:
    return engines * form.rank_count * nics * (queues_per_path + 1)


@formula("I/Os at once in the target", Unit.COUNT, "dpu/export/spdk/sizing.py: buffers of nvmf_tgt; more wait in it")
def target_ios(target: Sizing) -> Any:
    return target.ios_at_once


@formula("stall of the drives that these bear", Unit.SECONDS, "dpu/export/spdk/sizing.py: then all buffers are in use")
def target_stall_s(target: Sizing, loaded_bytes_per_s: float, saved_bytes_per_s: float) -> Any:
    return target.ios_at_once * target.max_io_bytes / (loaded_bytes_per_s + saved_bytes_per_s or float("inf"))


@formula("chunks looked up", Unit.PER_S, "every chunk of every prompt, of each KV group")
def lookups_per_s(form: ChunkForm, requests_per_s: float, prompt_tokens: float, chunk_tokens: int) -> Any:
    return requests_per_s * prompt_tokens / chunk_tokens * len(form.plans)


@formula("chunks committed", Unit.PER_S, "what is saved, in chunks of each KV group")
def commits_per_s(
    computed_tokens_per_s: float, written_share: float, chunk_tokens: int, records_per_chunk: float
) -> Any:
    return computed_tokens_per_s * written_share / chunk_tokens * records_per_chunk


@formula(
    "processors of the service",
    Unit.COUNT,
    f"{LOOKED_UP_RECORDS_PER_S:,} lookups a second and processor, {COMMIT_S * 1e3:g} ms for a commit with its "
    f"reservation, {_MEASURED}; Arm cores were not measured",
)
def service_processors(lookups_per_s: float, commits_per_s: float) -> Any:
    return lookups_per_s / LOOKED_UP_RECORDS_PER_S + commits_per_s * COMMIT_S


@formula("leases at once", Unit.COUNT, "arrivals times the time each is held: until its load has ended")
def leases_at_once(requests_per_s: float, queue_s: float, load_s: float) -> Any:
    return requests_per_s * (queue_s + load_s)


SERVICE: Final = (
    index_records, index_bytes, service_memory, memory_needed, target_connections, target_ios, target_stall_s,
    lookups_per_s, commits_per_s, service_processors, leases_at_once,
)  # fmt: skip
