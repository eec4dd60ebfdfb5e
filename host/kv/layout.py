"""Layout: where each byte of a block lies in the engine's one KV allocation.

The canonical byte order of a unit (one block, all layers of a group) on the medium is: layers in the
order of the engine's group, each layer's page as its bytes lie inside the page. The order *inside* a
page belongs to the identity; the distance between pages does not, so a layer-outermost and a
block-outermost engine may share a pool.

Nothing is taken on trust: the placement that the engine's configuration states and the one its tensors
have must agree, otherwise :class:`~meshfusion.jbof.errors.UnsupportedError`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from meshfusion.host.kv.group_layout import GroupLayout
from meshfusion.jbof.errors import UnsupportedError

_REPORT = "start the engine without this connector, or report the engine version, model and KV layout"


class _Run(NamedTuple):
    start: int
    stride: int
    length: int


class _Placement(NamedTuple):
    """What the engine's configuration says about one layer."""

    offset: int
    block_stride: int
    memory_bytes: int


def layer_specs(group: Any) -> dict[str, Any]:
    """The KV spec of each layer of a ``KVCacheGroupSpec``, in the group's order.

    A group of mixed specs keeps one per layer in ``kv_cache_specs``; any other spec stands for all layers.
    """
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if per_layer is None:
        return {name: group.kv_cache_spec for name in group.layer_names}
    missing = [name for name in group.layer_names if name not in per_layer]
    if missing:
        raise _refuse(f"the KV group names layers that its spec does not describe: {missing}")
    return {name: per_layer[name] for name in group.layer_names}


def derive_layouts(kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor]) -> tuple[GroupLayout, ...]:
    """The layouts of all KV groups of an engine, from its ``KVCacheConfig`` and its registered tensors.

    Groups overlay each other: a block belongs to one of them at a time (vLLM 0.32, v1/kv_cache_interface.py,
    ``KVCacheTensor``). Raises :class:`UnsupportedError` when a page is not one contiguous run, when configuration and
    tensors disagree, or when pages of a group overlap.
    """
    specs = [layer_specs(group) for group in kv_cache_config.kv_cache_groups]
    _check_names(specs, kv_caches)
    placements = _placements(kv_cache_config)
    block_count = int(kv_cache_config.num_blocks)
    return tuple(_group_layout(i, layers, placements, kv_caches, block_count) for i, layers in enumerate(specs))


def _group_layout(
    group_id: int,
    specs: Mapping[str, Any],
    placements: Mapping[str, _Placement],
    kv_caches: Mapping[str, torch.Tensor],
    block_count: int,
) -> GroupLayout:
    storage = _single_storage(kv_caches)
    runs: list[_Run] = []
    for name, spec in specs.items():
        if name not in placements:
            raise _refuse(f"layer {name!r} has no KVCacheTensor")
        page = _real_page_bytes(name, spec)
        _check_view(name, kv_caches[name], placements[name], page, block_count, storage)
        runs.append(_Run(placements[name].offset, placements[name].block_stride, page))
    _check_disjoint(list(specs), runs, block_count, storage.nbytes())
    block_tokens = {int(spec.block_size) for spec in specs.values()}
    if len(block_tokens) != 1:
        raise _refuse(f"layers of one group have different block sizes: {sorted(block_tokens)}")
    merged = _uniform(_merge(runs))
    starts = np.array([run.start for run in merged], dtype=np.int64)
    strides = np.array([run.stride for run in merged], dtype=np.int64)
    starts.flags.writeable = strides.flags.writeable = False
    return GroupLayout(
        group=group_id,
        block_tokens=block_tokens.pop(),
        block_count=block_count,
        layer_names=tuple(specs),
        page_bytes=tuple(run.length for run in runs),
        unit_bytes=sum(run.length for run in runs),
        run_bytes=merged[0].length,
        run_starts=starts,
        run_strides=strides,
        memory_bytes=storage.nbytes(),
    )


def backing_memory(kv_caches: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The whole backing allocation as bytes, uint8 ``[memory_bytes]``, on the engine's device and sharing its memory.

    Memory of the host and of CUDA devices; the tensor keeps the allocation alive.
    """
    devices = sorted({str(view.device) for view in kv_caches.values() if view.device.type not in ("cpu", "cuda")})
    if devices:
        raise UnsupportedError(
            f"the KV cache lies on {', '.join(devices)}; only memory of CUDA devices and of the host is served",
            next_step="run vLLM for CUDA or for CPU, or start the engine without this connector",
        )
    storage = _single_storage(kv_caches)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def page_order(view: torch.Tensor) -> tuple[int, ...]:
    """Axes of a ``[B, H, N, C]`` view in memory order, outermost first, block axis kept in front."""
    strides = view.stride()
    return (0, *sorted(range(1, view.dim()), key=lambda axis: (-strides[axis], axis)))


def _refuse(message: str) -> UnsupportedError:
    return UnsupportedError(f"KV layout: {message}", next_step=_REPORT)


def _real_page_bytes(name: str, spec: Any) -> int:
    """Without the padding that makes pages of several groups equal. Attention and states each have a name for it."""
    for attribute in ("unpadded_page_size_bytes", "real_page_size_bytes"):
        size_bytes = getattr(spec, attribute, None)
        if size_bytes is not None:
            return int(size_bytes)
    raise _refuse(f"layer {name!r}: {type(spec).__name__} does not say how many bytes its page has without padding")


def _check_names(groups: Sequence[Mapping[str, Any]], kv_caches: Mapping[str, torch.Tensor]) -> None:
    if not groups or not all(groups):
        raise _refuse("a KV group has no layers")
    names = [name for specs in groups for name in specs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise _refuse(f"layers in several KV groups: {twice}")
    missing = [name for name in names if name not in kv_caches]
    if missing:
        raise _refuse(f"the engine registered no tensor for layers {missing}")
    extra = [name for name in kv_caches if name not in names]
    if extra:
        raise _refuse(f"tensors of layers outside all KV groups (cross-layer KV sharing?): {extra}")
    odd = [name for name, view in kv_caches.items() if not isinstance(view, torch.Tensor)]
    if odd:
        raise _refuse(f"not one tensor per layer: {odd}")


def _placements(kv_cache_config: Any) -> dict[str, _Placement]:
    found: dict[str, _Placement] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        if getattr(tensor, "host_resident", False):
            raise _refuse(f"host-resident KV of layers {list(tensor.layers)}")
        for index, name in enumerate(tensor.layers):
            if name in found:
                raise _refuse(f"layer {name!r} is placed twice")
            offset = tensor.offset + index * tensor.layer_stride
            found[name] = _Placement(int(offset), int(tensor.block_stride), int(tensor.size))
    return found


def _single_storage(kv_caches: Mapping[str, torch.Tensor]) -> torch.UntypedStorage:
    storages = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in kv_caches.values()}
    if len(storages) != 1:
        raise _refuse(f"{len(storages)} backing allocations; exactly one is served")
    return next(iter(storages.values()))


def _check_view(
    name: str,
    view: torch.Tensor,
    placed: _Placement,
    page: int,
    block_count: int,
    storage: torch.UntypedStorage,
) -> None:
    """Refuses unless the tensor lies where the configuration says, each page one dense run."""
    if view.dim() != 4:
        raise _refuse(f"layer {name!r}: a view of {view.dim()} axes, expected [blocks, heads, tokens, content]")
    if view.shape[0] % block_count != 0:
        raise _refuse(f"layer {name!r}: {view.shape[0]} kernel blocks do not divide into {block_count} blocks")
    ratio, item = view.shape[0] // block_count, view.element_size()
    order = page_order(view)[1:]
    expected_stride = 1
    for axis in reversed(order):
        if view.shape[axis] != 1 and view.stride(axis) != expected_stride:
            raise _refuse(f"layer {name!r}: its page is not one contiguous run (strides {tuple(view.stride())})")
        expected_stride *= view.shape[axis]
    kernel_page, kernel_stride = expected_stride * item, view.stride(0) * item
    if kernel_page * ratio != page:
        raise _refuse(f"layer {name!r}: the tensor's page has {kernel_page * ratio} bytes, its spec says {page}")
    if ratio > 1 and kernel_stride != kernel_page:
        raise _refuse(f"layer {name!r}: the {ratio} kernel blocks of a block are not contiguous")
    got = (view.data_ptr() - storage.data_ptr(), kernel_stride * ratio)
    if got != (placed.offset, placed.block_stride):
        raise _refuse(
            f"layer {name!r}: the tensor starts at byte {got[0]} with block stride {got[1]}, "
            f"the configuration says {placed.offset} and {placed.block_stride}"
        )
    if placed.memory_bytes > storage.nbytes():
        raise _refuse(f"the configuration states {placed.memory_bytes} bytes, the allocation has {storage.nbytes()}")


def _check_disjoint(names: list[str], runs: list[_Run], block_count: int, memory_bytes: int) -> None:
    """Exact: every page of every block, sorted; each must end before the next one starts."""
    blocks = np.arange(block_count, dtype=np.int64)
    starts = np.concatenate([run.start + blocks * run.stride for run in runs])
    lengths = np.repeat(np.array([run.length for run in runs], dtype=np.int64), block_count)
    order = np.argsort(starts, kind="stable")
    ends = starts[order] + lengths[order]
    if starts.min() < 0 or ends.max() > memory_bytes:
        raise _refuse(f"pages reach outside the allocation of {memory_bytes} bytes")
    clash = np.nonzero(ends[:-1] > starts[order][1:])[0]
    if clash.size:
        first, second = (
            divmod(int(order[clash[0]]), block_count),
            divmod(int(order[clash[0] + 1]), block_count),
        )
        raise _refuse(
            f"pages overlap: layer {names[first[0]]!r} block {first[1]} and "
            f"layer {names[second[0]]!r} block {second[1]}"
        )


def _merge(runs: list[_Run]) -> list[_Run]:
    """Joins neighbours in canonical order that are also neighbours in memory, in every block."""
    merged = [runs[0]]
    for run in runs[1:]:
        last = merged[-1]
        if run.stride == last.stride and run.start == last.start + last.length:
            merged[-1] = last._replace(length=last.length + run.length)
        else:
            merged.append(run)
    return merged


def _uniform(runs: list[_Run]) -> list[_Run]:
    """Cuts runs of unequal length into pieces of their greatest common divisor: one length for all."""
    piece = math.gcd(*(run.length for run in runs))
    return [_Run(run.start + cut, run.stride, piece) for run in runs for cut in range(0, run.length, piece)]
