"""Bounds of the chunk service API, and the checks that a received message keeps them.

Every bound exists so that one message cannot make the other side allocate or work without end (rule 8).
A message that breaks one is refused with :class:`MalformedMessageError`, which names field, value and bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from operator import gt
from typing import Final

from meshfusion.dpu.api.types import IDENTITY_BYTES, KEY_BYTES, GroupKeys
from meshfusion.jbof.errors import ServiceError

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_KEYS_PER_MATCH = 65_536  # of all groups together
MAX_GROUPS = 64
MAX_ITEMS = 4_096
MAX_LIST_LIMIT = 1_000
MAX_SHARDS = 1_024
MAX_UNITS_PER_SHARD = 65_536
MAX_NAMESPACES = 1_024
MAX_PORTALS = 1_024
MAX_ID_CHARS = 200
MAX_TEXT_CHARS = 4_096
MAX_UINT32 = 2**32 - 1
# Signed: what the index, numpy and O_DIRECT offsets can hold.
MAX_INT = 2**63 - 1

# What, how many of it, where: for docs/mfctl.md.
LIMITS: Final[tuple[tuple[str, int, str], ...]] = (
    ("bytes of a message", MAX_MESSAGE_BYTES, "of every request and answer"),
    (
        "chunks of a lookup",
        MAX_KEYS_PER_MATCH,
        "of all its KV groups together; a release may name as many leases",
    ),
    ("KV groups of a lookup", MAX_GROUPS, "each may be asked for once"),
    ("chunks of a reservation", MAX_ITEMS, "as many in a commit; one of each KV group counts"),
    ("shards of a chunk", MAX_SHARDS, "one for each rank that holds other bytes"),
    ("units of a shard", MAX_UNITS_PER_SHARD, "blocks, or snapshots of a state"),
    ("chunks of a listing", MAX_LIST_LIMIT, "`mfctl chunk list` asks as often as it needs"),
    ("namespaces, portals", MAX_NAMESPACES, "in the answer to an engine that attaches"),
    ("characters of a name", MAX_ID_CHARS, "of a holder, a request, a tenant, a version"),
    ("characters of a text", MAX_TEXT_CHARS, "a path, a reason"),
)


class MalformedMessageError(ServiceError):
    """A message breaks a bound of the API: the sender is broken or of another version."""


def malformed(field: str, problem: str) -> MalformedMessageError:
    """The error for one bad field, ready to raise."""
    return MalformedMessageError(
        f"malformed message: {field} {problem}",
        next_step="Use a client and a service of the same MeshFusion version; if they are, report this as a bug.",
    )


def check_key(field: str, value: bytes) -> bytes:
    if len(value) != KEY_BYTES:
        raise malformed(field, f"has {len(value)} bytes, not {KEY_BYTES}")
    return value


def check_identity(field: str, value: bytes) -> bytes:
    if len(value) != IDENTITY_BYTES:
        raise malformed(field, f"has {len(value)} bytes, not {IDENTITY_BYTES}")
    return value


def check_id(field: str, value: str, *, allow_empty: bool = False) -> str:
    """A short name: an id, a tenant, a version."""
    if len(value) > MAX_ID_CHARS:
        raise malformed(field, f"is {len(value)} characters long; at most {MAX_ID_CHARS} are allowed")
    if not value and not allow_empty:
        raise malformed(field, "is empty")
    return value


def check_text(field: str, value: str) -> str:
    """A longer free text: a path, a reason, a token."""
    if len(value) > MAX_TEXT_CHARS:
        raise malformed(field, f"is {len(value)} characters long; at most {MAX_TEXT_CHARS} are allowed")
    return value


def check_int(field: str, value: int, low: int = 0, high: int = MAX_INT) -> int:
    if not low <= value <= high:
        raise malformed(field, f"is {value}; it must lie between {low} and {high}")
    return value


def check_seconds(field: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise malformed(field, f"is {value} s; it must be finite and not negative")
    return value


def check_count(field: str, values: Sized, high: int) -> None:
    if len(values) > high:
        raise malformed(field, f"has {len(values)} entries; at most {high} are allowed")


def check_group_counts(key_counts: Sequence[int]) -> None:
    """How many groups a lookup may ask for, and how many keys for all of them."""
    check_count("groups", key_counts, MAX_GROUPS)
    if sum(key_counts) > MAX_KEYS_PER_MATCH:
        raise malformed("groups", f"have {sum(key_counts)} keys together; at most {MAX_KEYS_PER_MATCH} are allowed")


def check_groups(groups: Sequence[GroupKeys]) -> None:
    """What a lookup asks for: each group once, with as many chunks as the others, and needs that never decrease."""
    check_group_counts([len(group.keys) for group in groups])
    numbers = [group.group for group in groups]
    for at, group in enumerate(groups):
        field = f"groups[{at}]"
        check_int(f"{field}.group", group.group, 0, MAX_UINT32)
        if group.group in numbers[:at]:
            raise malformed(f"{field}.group", f"is {group.group} once more; each group may be asked for once")
        if len(group.keys) != len(groups[0].keys):
            raise malformed(
                f"{field}.keys",
                f"has {len(group.keys)} entries; it must have those of the first, {len(groups[0].keys)}",
            )
        for wrong in set(map(len, group.keys)) - {0, KEY_BYTES}:
            raise malformed(f"{field}.keys", f"has a key of {wrong} bytes, not {KEY_BYTES} (or 0: nothing is stored)")
        _check_first_needed(f"{field}.first_needed", group.first_needed, len(group.keys))
        _check_needed_have_keys(field, group)


def _check_needed_have_keys(field: str, group: GroupKeys) -> None:
    """A chunk without a key cannot be looked for, and a boundary that needs it would be said to be there. Since needs
    never begin earlier, no boundary needs a chunk that the first one after it does not."""
    if all(group.keys):
        return  # most
    for i, key in enumerate(group.keys):
        if not key and group.first_needed[i] != i + 1:
            raise malformed(
                f"{field}.first_needed[{i}]",
                f"is {group.first_needed[i]}; chunk {i} has no key, so it must be {i + 1}: nothing needs that chunk",
            )


def _check_first_needed(field: str, first_needed: tuple[int, ...], chunk_count: int) -> None:
    if len(first_needed) != chunk_count:
        raise malformed(field, f"has {len(first_needed)} entries; it must have one for each key, {chunk_count}")
    if not any(first_needed):
        return  # most: it always needs everything
    is_decreasing = any(map(gt, first_needed, first_needed[1:]))
    if first_needed[0] >= 0 and not is_decreasing and not any(map(gt, first_needed, range(1, chunk_count + 1))):
        return
    before = 0
    for i, first in enumerate(first_needed):
        check_int(f"{field}[{i}]", first, before, i + 1)
        before = first
