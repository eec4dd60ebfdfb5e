"""The engine's KV memory at start: where it lies, how it is laid out, and the proof of both (rule 6)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from meshfusion.host.kv.group_layout import GroupLayout
from meshfusion.host.kv.layout import backing_memory, derive_layouts
from meshfusion.host.kv.selftest import SelftestReport, run_selftest
from meshfusion.host.memory.kv_memory import KvMemory
from meshfusion.host.memory.opening import kv_memory_of
from meshfusion.host.path.block_layout import Runs, check_runs_at_all
from meshfusion.host.path.path_kind import PathKind
from meshfusion.host.path.probe import KvTarget, choose, look_for_rdma, report_paths
from meshfusion.host.path.staging_mover import StagingMover
from meshfusion.jbof.digest import DigestKernels, load_kernels
from meshfusion.jbof.errors import MediaError, MeshFusionError


@dataclass(frozen=True, slots=True, eq=False)
class ProvenMemory:
    """``memory`` is its owner's to close. A layout and a report for each KV group."""

    memory: KvMemory
    layouts: tuple[GroupLayout, ...]
    reports: tuple[SelftestReport, ...]


def prove_memory(
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
    wanted: PathKind | None,
    *,
    memory_of: Callable[[torch.Tensor, DigestKernels], KvMemory] = kv_memory_of,
) -> ProvenMemory:
    """``wanted``: the path that is asked for, if one is.

    Raises :class:`~meshfusion.jbof.errors.UnsupportedError` at any doubt, and
    :class:`~meshfusion.jbof.errors.MediaError` when a device fails.
    """
    layouts = derive_layouts(kv_cache_config, kv_caches)
    unit_bytes_max = max(layout.unit_bytes for layout in layouts)
    backing = backing_memory(kv_caches)
    kernels = load_kernels(unit_bytes_max)
    memory = memory_of(backing, kernels)
    try:
        check_path(wanted, KvTarget(memory.place, layouts))
        with contextlib.closing(StagingMover(memory, unit_bytes_max, kernels)) as mover:
            reports = tuple(run_selftest(kv_caches, layout, backing, mover) for layout in layouts)
    except BaseException:
        with contextlib.suppress(MeshFusionError):
            memory.close()
        raise
    return ProvenMemory(memory, layouts, reports)


def check_path(wanted: PathKind | None, target: KvTarget) -> None:
    """Can this machine take the path that is asked for to this memory, as far as it shows before a pool is attached?

    Raises :class:`~meshfusion.jbof.errors.UnsupportedError`.
    """
    if wanted is PathKind.BLOCK and not target.place.device:
        check_runs_at_all(Runs.of(target.place.address, target.layouts))
    if wanted is PathKind.RDMA or (wanted is PathKind.BLOCK and target.place.device):
        not_yet = MediaError("no pool is attached yet", next_step="-")
        choose(report_paths(not_yet, target, look_for_rdma()), wanted)
