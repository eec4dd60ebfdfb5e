"""Between wire messages and value types: the pool's status. Pure functions."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshfusion.dpu.api import types as t
from meshfusion.dpu.api.codec import access_from_pb
from meshfusion.dpu.api.limits import check_count, check_id, check_int, check_seconds, check_text
from meshfusion.dpu.api.v1 import chunk_pb2 as pb

MAX_HOLDERS = 65_536
MAX_COUNTERS = 4_096

# The plain fields have the same names on both sides; a test holds the proto file to that.
_POOL_TEXTS = ("path", "saves_stopped_reason", "exports_problem")
_POOL_SECONDS = ("oldest_grant_s", "oldest_lease_s")
_POOL_OTHERS = {"pool_uuid", "holders", "counters", *_POOL_TEXTS, *_POOL_SECONDS}
_POOL_INTS = tuple(f.name for f in dataclasses.fields(t.PoolStatus) if f.name not in _POOL_OTHERS)


def holder_status_to_pb(h: t.HolderStatus) -> pb.HolderStatus:
    return pb.HolderStatus(
        holder_id=h.holder_id,
        engine_kind=h.engine_kind,
        engine_version=h.engine_version,
        host=h.host,
        pid=h.pid,
        lease_count=h.lease_count,
        grant_count=h.grant_count,
        silent_s=h.silent_s,
        state=h.state,
        access=h.access,
    )


def holder_status_from_pb(m: pb.HolderStatus) -> t.HolderStatus:
    return t.HolderStatus(
        holder_id=check_id("holder.holder_id", m.holder_id),
        engine_kind=check_id("holder.engine_kind", m.engine_kind, allow_empty=True),
        engine_version=check_id("holder.engine_version", m.engine_version, allow_empty=True),
        host=check_text("holder.host", m.host),
        pid=m.pid,
        lease_count=check_int("holder.lease_count", m.lease_count),
        grant_count=check_int("holder.grant_count", m.grant_count),
        silent_s=check_seconds("holder.silent_s", m.silent_s),
        state=check_id("holder.state", m.state),
        access=access_from_pb("holder.access", m.access).value,
    )


def pool_status_to_pb(s: t.PoolStatus) -> pb.PoolStatus:
    message = pb.PoolStatus(
        pool_uuid=s.pool_uuid,
        holders=map(holder_status_to_pb, s.holders),
        counters=[pb.Counter(name=name, value=value) for name, value in s.counters],
    )
    for name in (*_POOL_TEXTS, *_POOL_SECONDS, *_POOL_INTS):
        setattr(message, name, getattr(s, name))
    return message


def pool_status_from_pb(m: pb.PoolStatus) -> t.PoolStatus:
    check_count("holders", m.holders, MAX_HOLDERS)
    check_count("counters", m.counters, MAX_COUNTERS)
    texts = {name: check_text(name, getattr(m, name)) for name in _POOL_TEXTS}
    ints = {name: check_int(name, getattr(m, name)) for name in _POOL_INTS}
    seconds = {name: check_seconds(name, getattr(m, name)) for name in _POOL_SECONDS}
    plain: dict[str, Any] = {**texts, **seconds, **ints}
    return t.PoolStatus(
        pool_uuid=check_id("pool_uuid", m.pool_uuid),
        holders=tuple(map(holder_status_from_pb, m.holders)),
        counters=tuple((check_id("counter.name", c.name), check_int("counter.value", c.value)) for c in m.counters),
        **plain,
    )
