"""How far two units of KV are from each other, as numbers: what the audit compares, layer by layer.

Two computations of the same tokens need not give the same bytes: batches of another shape add up in another order. The
measure is the largest difference of two numbers of a layer's page, as a part of the largest number of that page. For
KV of other tokens, or of another model, it is about one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from meshfusion.host.kv.group_layout import GroupLayout
from meshfusion.host.kv.layout import layer_specs
from meshfusion.jbof.errors import UnsupportedError

U8 = NDArray[np.uint8]

ROUNDING_STEPS: Final = 8
_STEPS: Final[Mapping[torch.dtype, float]] = {
    torch.float32: 2.0**-10,  # not its own 2^-23: devices multiply float32 as TF32, which has ten bits
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
    torch.float8_e4m3fn: 2.0**-3,
    torch.float8_e5m2: 2.0**-2,
}
"""From 1 to the next number: a rounded value is off by half of that, and so is everything computed from it."""


class Numbers(NamedTuple):
    """Part of a page: ``length_bytes`` of numbers of ``dtype``."""

    dtype: torch.dtype
    length_bytes: int


@dataclass(frozen=True, slots=True)
class LayerNumbers:
    """What the real bytes of a layer's page are, in their order."""

    name: str
    parts: tuple[Numbers, ...]

    @property
    def page_bytes(self) -> int:
        return sum(part.length_bytes for part in self.parts)


UnitNumbers = tuple[LayerNumbers, ...]
"""Of a unit: its layers in canonical order."""


class Drift(NamedTuple):
    """Of the layer of a unit that stands out most. ``difference``: see the module; infinite where one of the numbers is
    none. ``floor``: what the rounding of its dtype alone may make of it."""

    layer: str
    difference: float
    floor: float


def numbers_of(
    kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor], layouts: Sequence[GroupLayout]
) -> tuple[UnitNumbers, ...]:
    """Of each KV group. Raises UnsupportedError where it is not known what numbers a page holds: quantised ones have
    their scales elsewhere, and differ by what nobody has measured."""
    return tuple(
        tuple(
            LayerNumbers(name, _parts(name, spec, kv_caches[name].dtype, page_bytes))
            for (name, spec), page_bytes in zip(layer_specs(group).items(), layout.page_bytes, strict=True)
        )
        for group, layout in zip(kv_cache_config.kv_cache_groups, layouts, strict=True)
    )


def _parts(name: str, spec: Any, dtype: torch.dtype, page_bytes: int) -> tuple[Numbers, ...]:
    shapes = getattr(spec, "shapes", None)
    if shapes is not None:  # a state: several tensors, one behind the other (vLLM 0.32, MambaSpec)
        parts = tuple(Numbers(d, math.prod(s) * d.itemsize) for s, d in zip(shapes, spec.dtypes, strict=True))
    else:
        parts = (Numbers(dtype, page_bytes),)
    known = all(part.dtype in _STEPS for part in parts)
    if not known or sum(part.length_bytes for part in parts) != page_bytes:
        held = ", ".join(str(part.dtype).removeprefix("torch.") for part in parts)
        raise UnsupportedError(
            f"audit: the KV of layer {name!r} ({page_bytes} bytes a block of {held}) cannot be compared as numbers",
            next_step="remove audit from the connector's configuration, or use a kv_cache_dtype that is not quantised",
        )
    return parts


def drift_of(one: U8, other: U8, numbers: UnitNumbers) -> Drift:
    """``one`` and ``other``: the bytes of a unit, twice."""
    assert one.size == other.size == sum(layer.page_bytes for layer in numbers), (one.size, other.size)
    worst, at = Drift(numbers[0].name, 0.0, _floor(numbers[0].parts[0].dtype)), 0
    for layer in numbers:
        for part in layer.parts:
            end = at + part.length_bytes
            difference = _difference(one[at:end], other[at:end], part.dtype)
            drift, at = Drift(layer.name, difference, _floor(part.dtype)), end
            if drift.difference * worst.floor > worst.difference * drift.floor:  # in terms of what is usual there
                worst = drift
    return worst


def _floor(dtype: torch.dtype) -> float:
    return ROUNDING_STEPS * _STEPS[dtype]


def _difference(one: U8, other: U8, dtype: torch.dtype) -> float:
    if np.array_equal(one, other):
        return 0.0  # also where they are no numbers
    mine, theirs = (torch.from_numpy(raw.copy()).view(dtype).to(torch.float64) for raw in (one, other))
    largest = max(float(mine.abs().max()), float(theirs.abs().max()))
    difference = float((mine - theirs).abs().max())
    if not math.isfinite(largest) or not math.isfinite(difference):
        return math.inf
    return difference / largest if largest else 0.0
