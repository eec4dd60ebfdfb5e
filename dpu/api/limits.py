"""Bounds of the chunk service API, and the checks that a received message keeps them.

Every bound exists so that one message cannot make the other side allocate or work without end (rule 8).
A message that breaks one is refused with :class:`MalformedMessageError`, which names field, value and bound.
"""

from __future__ import annotations

import math
from collections.abc import Sized

from meshfusion.dpu.api.types import IDENTITY_BYTES, KEY_BYTES
from meshfusion.jbof.errors import ServiceError

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_KEYS_PER_MATCH = 65_536
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
