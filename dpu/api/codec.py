"""Between wire messages and the value types of the chunk service. Pure functions.

``X_to_pb`` trusts its argument. ``X_from_pb`` checks lengths and bounds (:mod:`meshfusion.dpu.api.limits`)
and raises :class:`~meshfusion.dpu.api.limits.MalformedMessageError`. Here: what is shared, and what readers exchange
but for lookups (:mod:`meshfusion.dpu.api.codec_match`); the writers' messages are in
:mod:`meshfusion.dpu.api.codec_writes`, status in :mod:`meshfusion.dpu.api.codec_status`.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshfusion.dpu.api import types as t
from meshfusion.dpu.api.limits import (
    MAX_KEYS_PER_MATCH,
    MAX_LIST_LIMIT,
    MAX_NAMESPACES,
    MAX_PORTALS,
    MAX_SHARDS,
    MAX_UINT32,
    MAX_UNITS_PER_SHARD,
    check_count,
    check_id,
    check_identity,
    check_int,
    check_key,
    check_seconds,
    check_text,
    malformed,
)
from meshfusion.dpu.api.v1 import chunk_pb2 as pb


def extent_to_pb(extent: t.Extent) -> pb.Extent:
    return pb.Extent(
        namespace=extent.namespace,
        segment=extent.segment,
        lba=extent.lba,
        lba_count=extent.lba_count,
        generation=extent.generation,
    )


def extent_from_pb(m: pb.Extent) -> t.Extent:
    extent = t.Extent(
        namespace=m.namespace, segment=m.segment, lba=m.lba, lba_count=m.lba_count, generation=m.generation
    )
    return check_extent(extent)


def check_extent(extent: t.Extent) -> t.Extent:
    """The same, which keeps all bounds."""
    check_int("extent.lba", extent.lba)
    check_int("extent.lba_count", extent.lba_count, 1)
    check_int("extent.generation", extent.generation)
    return extent


def digests_to_pb(digests: Iterable[bytes]) -> bytes:
    """Back to back: a third smaller than a list, and one object to parse."""
    return b"".join(digests)


def digests_from_pb(packed: bytes) -> tuple[bytes, ...]:
    size = t.UNIT_DIGEST_BYTES
    if len(packed) % size or len(packed) > size * MAX_UNITS_PER_SHARD:
        raise malformed("unit_digests", f"has {len(packed)} bytes, not up to {MAX_UNITS_PER_SHARD} times {size}")
    return tuple(packed[i : i + size] for i in range(0, len(packed), size))


def chunk_to_pb(chunk: t.ChunkRecord) -> pb.ChunkRecord:
    return pb.ChunkRecord(
        key=chunk.key,
        identity=chunk.identity,
        tenant=chunk.tenant,
        group=chunk.group,
        position_tokens=chunk.position_tokens,
        token_count=chunk.token_count,
        shards=[
            pb.Shard(
                rank=s.rank,
                extent=extent_to_pb(s.extent),
                payload_lba_offset=s.payload_lba_offset,
                unit_lba_count=s.unit_lba_count,
                unit_bytes=s.unit_bytes,
                unit_digests=digests_to_pb(s.unit_digests),
            )
            for s in chunk.shards
        ],
    )


def chunk_from_pb(m: pb.ChunkRecord) -> t.ChunkRecord:
    check_count("chunk.shards", m.shards, MAX_SHARDS)
    record = t.ChunkRecord(
        key=m.key,
        identity=m.identity,
        tenant=m.tenant,
        group=m.group,
        position_tokens=m.position_tokens,
        token_count=m.token_count,
        shards=tuple(_shard_from_pb(s) for s in m.shards),
    )
    return check_chunk(record)


def _shard_from_pb(m: pb.Shard) -> t.Shard:
    return t.Shard(
        rank=m.rank,
        extent=extent_from_pb(m.extent),
        payload_lba_offset=m.payload_lba_offset,
        unit_lba_count=m.unit_lba_count,
        unit_bytes=m.unit_bytes,
        unit_digests=digests_from_pb(m.unit_digests),
    )


def check_chunk(chunk: t.ChunkRecord) -> t.ChunkRecord:
    """The same, which keeps all bounds."""
    check_count("chunk.shards", chunk.shards, MAX_SHARDS)
    check_key("chunk.key", chunk.key)
    check_identity("chunk.identity", chunk.identity)
    check_id("chunk.tenant", chunk.tenant)
    check_int("chunk.position_tokens", chunk.position_tokens)
    check_int("chunk.token_count", chunk.token_count, 1)
    for shard in chunk.shards:
        check_extent(shard.extent)
        check_int("shard.payload_lba_offset", shard.payload_lba_offset)
        check_int("shard.unit_lba_count", shard.unit_lba_count, 1)
        check_int("shard.unit_bytes", shard.unit_bytes, 1)
        check_count("shard.unit_digests", shard.unit_digests, MAX_UNITS_PER_SHARD)
    return chunk


def attach_request_to_pb(r: t.AttachRequest) -> pb.AttachRequest:
    return pb.AttachRequest(
        incarnation=r.incarnation,
        engine_kind=r.engine_kind,
        engine_version=r.engine_version,
        host=r.host,
        pid=r.pid,
        identity=r.identity,
        rank_count=r.rank_count,
        tenant=r.tenant,
        api_version=r.api_version,
        handoff_token=r.handoff_token,
        access=r.access.value,
    )


def attach_request_from_pb(m: pb.AttachRequest) -> t.AttachRequest:
    return t.AttachRequest(
        incarnation=check_id("incarnation", m.incarnation),
        engine_kind=check_id("engine_kind", m.engine_kind),
        engine_version=check_id("engine_version", m.engine_version, allow_empty=True),
        host=check_text("host", m.host),
        pid=m.pid,
        identity=check_identity("identity", m.identity),
        rank_count=check_int("rank_count", m.rank_count, 1, MAX_SHARDS),
        tenant=check_id("tenant", m.tenant),
        api_version=m.api_version,
        handoff_token=check_text("handoff_token", m.handoff_token),
        access=access_from_pb("access", m.access),
    )


def access_from_pb(field: str, value: str) -> t.Access:
    """Empty: local, as those who do not know of others mean it."""
    try:
        return t.Access(value or t.Access.LOCAL.value)
    except ValueError:
        raise malformed(field, f"is {value[:40]!r}, which this version does not know") from None


def export_to_pb(e: t.Export) -> pb.Export:
    return pb.Export(
        subsystem_nqn=e.subsystem_nqn,
        host_nqn=e.host_nqn,
        portals=[pb.Portal(transport=p.transport, address=p.address, service=p.service) for p in e.portals],
        host_key=e.host_key,
        tls_psk=e.tls_psk,
    )


def export_from_pb(m: pb.Export) -> t.Export:
    check_count("export.portals", m.portals, MAX_PORTALS)
    return t.Export(
        subsystem_nqn=check_text("export.subsystem_nqn", m.subsystem_nqn),
        host_nqn=check_text("export.host_nqn", m.host_nqn),
        portals=tuple(
            t.Portal(
                transport=check_id("portal.transport", p.transport),
                address=check_id("portal.address", p.address),
                service=check_int("portal.service", p.service, 1, 65_535),
            )
            for p in m.portals
        ),
        host_key=check_text("export.host_key", m.host_key),
        tls_psk=check_text("export.tls_psk", m.tls_psk),
    )


def attachment_to_pb(a: t.Attachment) -> pb.Attachment:
    return pb.Attachment(
        pool_uuid=a.pool_uuid,
        holder_id=a.holder_id,
        epoch=a.epoch,
        namespaces=[
            pb.Namespace(nsid=n.nsid, path=n.path, lba_bytes=n.lba_bytes, lba_count=n.lba_count) for n in a.namespaces
        ],
        liveness_path=a.liveness_path,
        lease_ttl_s=a.lease_ttl_s,
        grant_ttl_s=a.grant_ttl_s,
        heartbeat_s=a.heartbeat_s,
        export=None if a.export is None else export_to_pb(a.export),
        drives_version=a.drives_version,
    )


def attachment_from_pb(m: pb.Attachment) -> t.Attachment:
    check_count("namespaces", m.namespaces, MAX_NAMESPACES)
    return t.Attachment(
        pool_uuid=check_id("pool_uuid", m.pool_uuid),
        holder_id=check_id("holder_id", m.holder_id),
        epoch=check_int("epoch", m.epoch),
        namespaces=tuple(
            t.Namespace(
                nsid=n.nsid,
                path=check_text("namespace.path", n.path),
                lba_bytes=check_int("namespace.lba_bytes", n.lba_bytes, 1, MAX_UINT32),
                lba_count=check_int("namespace.lba_count", n.lba_count),
            )
            for n in m.namespaces
        ),
        liveness_path=check_text("liveness_path", m.liveness_path),
        lease_ttl_s=check_seconds("lease_ttl_s", m.lease_ttl_s),
        grant_ttl_s=check_seconds("grant_ttl_s", m.grant_ttl_s),
        heartbeat_s=check_seconds("heartbeat_s", m.heartbeat_s),
        export=export_from_pb(m.export) if m.HasField("export") else None,
        drives_version=check_int("drives_version", m.drives_version),
    )


def release_request_to_pb(r: t.ReleaseRequest) -> pb.ReleaseRequest:
    return pb.ReleaseRequest(holder_id=r.holder_id, lease_ids=r.lease_ids)


def release_request_from_pb(m: pb.ReleaseRequest) -> t.ReleaseRequest:
    return t.ReleaseRequest(
        holder_id=check_id("holder_id", m.holder_id), lease_ids=ids_from_pb("lease_ids", m.lease_ids)
    )


def ids_from_pb(field: str, values: Iterable[str]) -> tuple[str, ...]:
    """A list of lease or grant ids."""
    ids = tuple(check_id(field, value) for value in values)
    # As many leases as keys may be named at once: a heartbeat speaks for every request of an engine.
    check_count(field, ids, MAX_KEYS_PER_MATCH)
    return ids


def heartbeat_request_to_pb(r: t.HeartbeatRequest) -> pb.HeartbeatRequest:
    reached = r.reached
    return pb.HeartbeatRequest(
        holder_id=r.holder_id,
        epoch=r.epoch,
        lease_ids=r.lease_ids,
        reached=None
        if reached is None
        else pb.Reached(drives_version=reached.drives_version, namespaces=reached.namespaces),
        host_key_id=r.host_key_id,
    )


def heartbeat_request_from_pb(m: pb.HeartbeatRequest) -> t.HeartbeatRequest:
    return t.HeartbeatRequest(
        holder_id=check_id("holder_id", m.holder_id),
        epoch=check_int("epoch", m.epoch),
        lease_ids=ids_from_pb("lease_ids", m.lease_ids),
        reached=_reached_from_pb(m.reached) if m.HasField("reached") else None,
        host_key_id=check_id("host_key_id", m.host_key_id, allow_empty=True),
    )


def _reached_from_pb(m: pb.Reached) -> t.Reached:
    check_count("reached.namespaces", m.namespaces, MAX_NAMESPACES)
    namespaces = tuple(check_int("reached.namespaces", nsid, 1, MAX_UINT32) for nsid in m.namespaces)
    return t.Reached(check_int("reached.drives_version", m.drives_version), namespaces)


def heartbeat_reply_to_pb(r: t.HeartbeatReply) -> pb.HeartbeatReply:
    return pb.HeartbeatReply(
        lost_lease_ids=r.lost_lease_ids,
        drives_version=r.drives_version,
        is_draining=r.is_draining,
        host_key=r.host_key,
    )


def heartbeat_reply_from_pb(m: pb.HeartbeatReply) -> t.HeartbeatReply:
    return t.HeartbeatReply(
        lost_lease_ids=ids_from_pb("lost_lease_ids", m.lost_lease_ids),
        drives_version=check_int("drives_version", m.drives_version),
        is_draining=m.is_draining,
        host_key=check_text("host_key", m.host_key),
    )


def drop_request_to_pb(r: t.DropRequest) -> pb.DropRequest:
    return pb.DropRequest(holder_id=r.holder_id, key=r.key, extent=extent_to_pb(r.extent), reason=r.reason)


def drop_request_from_pb(m: pb.DropRequest) -> t.DropRequest:
    return t.DropRequest(
        holder_id=check_id("holder_id", m.holder_id),
        key=check_key("key", m.key),
        extent=extent_from_pb(m.extent),
        reason=check_text("reason", m.reason),
    )


def list_request_to_pb(r: t.ListRequest) -> pb.ListRequest:
    return pb.ListRequest(after_key=r.after_key, limit=r.limit, identity=r.identity)


def list_request_from_pb(m: pb.ListRequest) -> t.ListRequest:
    return t.ListRequest(
        after_key=check_key("after_key", m.after_key) if m.after_key else b"",
        limit=check_int("limit", m.limit, 1, MAX_LIST_LIMIT),
        identity=check_identity("identity", m.identity) if m.identity else b"",
    )


def list_reply_to_pb(r: t.ListReply) -> pb.ListReply:
    return pb.ListReply(chunks=map(chunk_to_pb, r.chunks), next_after_key=r.next_after_key)


def list_reply_from_pb(m: pb.ListReply) -> t.ListReply:
    check_count("chunks", m.chunks, MAX_LIST_LIMIT)
    return t.ListReply(
        chunks=tuple(map(chunk_from_pb, m.chunks)),
        next_after_key=check_key("next_after_key", m.next_after_key) if m.next_after_key else b"",
    )
