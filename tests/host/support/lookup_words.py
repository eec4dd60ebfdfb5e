"""Short words for lookups of an engine with full attention alone."""

from __future__ import annotations

from meshfusion.host.connector.load_parts import LoadPart
from meshfusion.host.connector.lookups import LookupOptions, StartLoad
from meshfusion.host.pool_events import StoredBoundary
from tests.host.support.chunk_records import make_stored, one_group

BLOCK = 16
PER_CHUNK = 4
CHUNK = BLOCK * PER_CHUNK
FORM = one_group(block_tokens=BLOCK, blocks_per_chunk=PER_CHUNK)
OPTIONS = LookupOptions(deadline_s=0.02, soft_lease_max_s=10.0, early_lookups_max=3)


def stored(count: int, first_number: int = 0) -> StoredBoundary:
    return make_stored(count, block_tokens=BLOCK, blocks_per_chunk=PER_CHUNK, first_number=first_number)


def part_of(load: StartLoad) -> LoadPart:
    (part,) = load.parts
    assert part.group == 0
    return part


def always(tokens: int, load_bytes: int) -> bool:
    return True


def never(tokens: int, load_bytes: int) -> bool:
    return False
