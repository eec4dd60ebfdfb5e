"""The boundary of a lookup whose groups all need everything from the start, found for all chunks at once. No I/O, no
clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from meshfusion.dpu.api import types as api
from meshfusion.dpu.store.boundary import Boundary, Find
from meshfusion.dpu.store.segments import Segments
from meshfusion.dpu.store.stored_chunks import StoredChunks

SurePrefix = Callable[[api.GroupKeys], list[tuple[int, ...]]]  # see StoredChunks.sure_prefix


def whole_prefix(
    groups: Sequence[api.GroupKeys],
    found: StoredChunks,
    sure_prefix: SurePrefix,
    find: Find,
    segments: Segments,
    pinned_max: int,
) -> Boundary | None:
    """What :func:`~meshfusion.dpu.store.boundary.longest_boundary` finds, for a small part of the time. None where it
    is to be asked: something is needed from further on, prefixes have chunks that are not made alike, or leases pin
    too much. ``find`` is asked where a prefix ends."""
    if not groups or not groups[0].keys or any(group.first_needed[-1] for group in groups):
        return None
    boundary, prefixes = len(groups[0].keys), []
    for group in groups:
        prefix = sure_prefix(group)
        if len(prefix) < boundary:
            boundary = len(prefix)
            if find(group, boundary) is not None:
                return None
        prefixes.append(prefix)
    places = set(chain.from_iterable(chain.from_iterable(prefix[:boundary] for prefix in prefixes)))
    if sum(1 for segment in places if not segments.pins(segment)[0]) > pinned_max - segments.read_pinned_count:
        return None
    chunks = found.packed(chain.from_iterable(group.keys[:boundary] for group in groups))
    return Boundary(boundary, chunks, places, is_shortened=False)
