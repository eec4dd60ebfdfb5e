"""What the store refuses before it changes anything, and the record it makes of a commit. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from operator import lt

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.limits import MAX_GROUPS, MAX_ID_CHARS, MAX_INT, MAX_SHARDS
from meshfusion.dpu.api.tenant import CHUNK_TENANT
from meshfusion.dpu.store.effects import HolderRecord
from meshfusion.dpu.store.grants import Grant
from meshfusion.dpu.store.segments import SegmentSizes
from meshfusion.jbof.errors import ConfigError, ServiceError, UnsupportedError
from meshfusion.jbof.format import header_lba_count, shard_lba_count, unit_lba_count

PROBE_KIND = "probe"  # the service's own: it attaches, looks up and writes as engines do, and does not count as one
SERVED_KINDS = ("vllm", PROBE_KIND)
UNSERVED_STEP = (
    "change these values (the connector's tenant is one that the service's configuration names), or use a newer service"
)

_INCARNATION = re.compile(r"[0-9A-Za-z_-]{1,64}")  # it names a file

_U32_MAX = 2**32 - 1  # what an index record and a chunk header can hold


def refuse_unserved(request: api.AttachRequest, tenants: Collection[str]) -> None:
    """What the API can say and this version does not serve, all at once. ``tenants``: whose the pool is; an engine is
    not told who they are."""
    unserved = []
    if not _INCARNATION.fullmatch(request.incarnation):
        unserved.append(f"incarnation {request.incarnation!r} (served: 1 to 64 letters, digits, '-' and '_')")
    if "\0" in request.engine_version + request.host:
        unserved.append("a NUL character in engine_version or host")
    if request.api_version != api.API_VERSION:
        unserved.append(f"api_version {request.api_version} (served: {api.API_VERSION})")
    if request.tenant not in tenants:
        unserved.append(f"tenant {request.tenant[:MAX_ID_CHARS]!r}")
    if not 1 <= request.rank_count <= MAX_SHARDS:
        unserved.append(f"rank_count {request.rank_count} (served: 1 to {MAX_SHARDS})")
    if request.handoff_token:
        unserved.append("a hand-off token")
    if request.engine_kind not in SERVED_KINDS:
        served = ", ".join(map(repr, SERVED_KINDS))
        unserved.append(f"engine_kind {request.engine_kind!r} (served: {served})")
    if len(request.identity) != api.IDENTITY_BYTES:
        unserved.append(f"an identity of {len(request.identity)} bytes (served: {api.IDENTITY_BYTES})")
    if unserved:
        raise UnsupportedError("not served here: " + "; ".join(unserved), next_step=UNSERVED_STEP)


def refuse_other_exports(former: Iterable[HolderRecord], exported_as: str) -> None:
    """What is exported as ``exported_as`` says nothing of hosts that reach the data in another way (rule 3)."""
    others = sorted({h.exported_as for h in former if h.access is api.Access.NVMEOF and not h.fenced} - {exported_as})
    if others:
        raise ConfigError(
            f"exports = {exported_as}: hosts that may still write to this pool were given access as "
            f"{'; '.join(others)}, and only there can they be cut off",
            next_step="serve the pool with the exports of before until `mfctl pool status` shows none of these hosts, "
            "then change them; or create the pool anew",
        )


def refuse_item(item: api.ReserveItem, geometry: SegmentSizes) -> None:
    """Raises for a chunk that is not served yet or cannot fit a segment."""
    ranks = [shard.rank for shard in item.shards]
    if item.copies != 1 or not 0 <= item.group < MAX_GROUPS or not _are_shards(ranks):
        raise UnsupportedError(
            f"a chunk with copies={item.copies}, group={item.group}, ranks={ranks} is not served yet",
            next_step=f"use one copy, a group from 0 to {MAX_GROUPS - 1}, and shards of rank 0 and rising ranks below "
            f"{MAX_SHARDS}",
        )
    if not (0 < item.token_count <= _U32_MAX and 0 <= item.position_tokens <= MAX_INT):
        raise ServiceError(
            f"token_count {item.token_count} or position_tokens {item.position_tokens} is out of range",
            next_step=f"use 1 to {_U32_MAX} tokens at a position from 0",
        )
    for shard in item.shards:
        lba_count = shard_lba_count(shard.unit_bytes, shard.unit_count, geometry.lba_bytes)
        if lba_count > geometry.max_extent_lba_count:
            raise ServiceError(
                f"a chunk shard of {lba_count} logical blocks does not fit a segment, which has room for "
                f"{geometry.max_extent_lba_count}",
                next_step="create the pool with a larger --segment-size, or lower chunk_min_bytes in the connector",
            )


def _are_shards(ranks: Sequence[int]) -> bool:
    """Each once, in order, from rank 0 on; a rank that is left out reads the shard of the one before."""
    return bool(ranks) and ranks[0] == 0 and all(map(lt, ranks, ranks[1:])) and ranks[-1] < MAX_SHARDS


def refuse_commit(grant: Grant, item: api.CommitItem) -> None:
    """Raises when the digests are not those of the grant's shards."""
    wanted = tuple(shard.unit_count for shard in grant.item.shards)
    got = tuple(len(digests) for digests in item.unit_digests)
    if wanted != got or any(len(d) != api.UNIT_DIGEST_BYTES for digests in item.unit_digests for d in digests):
        raise ServiceError(
            f"commit of grant {grant.grant_id} carries {got} unit digests, its shards have {wanted}",
            next_step="send one 8-byte digest per unit of every shard",
        )


def record_of(grant: Grant, item: api.CommitItem, holder: HolderRecord, lba_bytes: int) -> api.ChunkRecord:
    """The index entry of a chunk that was written under ``grant``."""
    shards = tuple(
        api.Shard(
            rank=size.rank,
            extent=extent,
            payload_lba_offset=header_lba_count(size.unit_count, lba_bytes),
            unit_lba_count=unit_lba_count(size.unit_bytes, lba_bytes),
            unit_bytes=size.unit_bytes,
            unit_digests=digests,
        )
        for size, extent, digests in zip(grant.item.shards, grant.extents, item.unit_digests, strict=True)
    )
    return api.ChunkRecord(
        key=grant.item.key,
        identity=holder.identity,
        tenant=CHUNK_TENANT,
        group=grant.item.group,
        position_tokens=grant.item.position_tokens,
        token_count=grant.item.token_count,
        shards=shards,
    )
