"""How many bytes one page of a layer has: by the formulas of the kinds, from the fields of its spec."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from meshfusion.host.kv.classify import kind_of
from meshfusion.host.kv.kinds import RECURRENT_STATE, REPLICA


@dataclass(frozen=True, slots=True)
class PageSize:
    """``real_bytes``: what the layer writes. ``held_bytes``: with the padding that makes pages of layers alike."""

    real_bytes: int
    held_bytes: int


def page_size(spec: Any) -> PageSize:
    """Of one layer's spec: a page of attention holds ``block_size`` tokens, one of a recurrent layer one state.

    Raises :class:`~meshfusion.jbof.errors.UnsupportedError` for a class that is not known.
    """
    kind = kind_of(spec)
    if kind is REPLICA:
        return PageSize(spec.page_size, spec.page_size)
    real = _state_bytes(spec) if kind is RECURRENT_STATE else _tokens_bytes(spec)
    return PageSize(real, real if spec.page_size_padded is None else spec.page_size_padded)


def _state_bytes(spec: Any) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))


def _tokens_bytes(spec: Any) -> int:
    """Heads times states times the bytes of one state of one head. ``head_size_v`` is 0 where there is one latent."""
    heads = spec.num_kv_heads if spec.num_head_slots is None else spec.num_head_slots
    states = int(spec.block_size // spec.tokens_per_state)
    content = spec.state_content_bytes
    if content is None:
        content = (spec.head_size + spec.head_size_v) * spec.dtype.itemsize
    return int(heads * states * content)
