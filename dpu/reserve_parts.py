"""A large reservation in parts, so that no lookup waits for all of it (rule 8).

An item takes some tens of microseconds under the pool's mutex, and a request may have thousands. Each is granted or
refused on its own, but chunks of several KV groups at one position are judged together, and along a request in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from meshfusion.dpu.api import types as api

PART_ITEMS: Final = 64


def in_parts(items: Sequence[api.ReserveItem], part_items: int = PART_ITEMS) -> list[list[int]]:
    """Indices of ``items``, each once: about ``part_items`` a part, and those that begin at one position of a request
    together. Positions keep the order in which they first appear."""
    places: dict[tuple[str, int], list[int]] = {}
    for i, item in enumerate(items):
        places.setdefault((item.request_id, item.position_tokens), []).append(i)
    parts: list[list[int]] = [[]]
    for indices in places.values():
        if parts[-1] and len(parts[-1]) + len(indices) > part_items:
            parts.append([])
        parts[-1] += indices
    return parts


def part_of(request: api.ReserveRequest, indices: Sequence[int]) -> api.ReserveRequest:
    return replace(request, items=tuple(request.items[i] for i in indices))


def joined(parts: Sequence[Sequence[int]], replies: Sequence[api.ReserveReply]) -> api.ReserveReply:
    """The replies to the parts as one, in the order of the request's items."""
    results = {
        i: result
        for indices, reply in zip(parts, replies, strict=True)
        for i, result in zip(indices, reply.results, strict=True)
    }
    return api.ReserveReply(tuple(results[i] for i in sorted(results)))
