"""Between wire messages and value types: what writers exchange (reserve, commit, abort). Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from meshfusion.dpu.api import types as t
from meshfusion.dpu.api.codec import digests_from_pb, digests_to_pb, extent_from_pb, extent_to_pb, ids_from_pb
from meshfusion.dpu.api.limits import (
    MAX_ITEMS,
    MAX_SHARDS,
    MAX_UNITS_PER_SHARD,
    check_count,
    check_id,
    check_int,
    check_key,
    malformed,
)
from meshfusion.dpu.api.v1 import chunk_pb2 as pb

_OUTCOME_TO_PB: dict[t.ReserveOutcome, pb.ReserveOutcome] = {
    t.ReserveOutcome.GRANTED: pb.RESERVE_OUTCOME_GRANTED,
    t.ReserveOutcome.EXISTS: pb.RESERVE_OUTCOME_EXISTS,
    t.ReserveOutcome.BUSY: pb.RESERVE_OUTCOME_BUSY,
    t.ReserveOutcome.NO_SPACE: pb.RESERVE_OUTCOME_NO_SPACE,
    t.ReserveOutcome.DECLINED: pb.RESERVE_OUTCOME_DECLINED,
}
_OUTCOME_FROM_PB: dict[int, t.ReserveOutcome] = {int(wire): outcome for outcome, wire in _OUTCOME_TO_PB.items()}


def reserve_request_to_pb(r: t.ReserveRequest) -> pb.ReserveRequest:
    # Many items are of one request: its name is sent once.
    request_ids = list(dict.fromkeys(i.request_id for i in r.items if i.request_id))
    number_of = {name: number for number, name in enumerate(request_ids, start=1)}
    return pb.ReserveRequest(
        holder_id=r.holder_id,
        epoch=r.epoch,
        request_ids=request_ids,
        items=[
            pb.ReserveItem(
                key=i.key,
                group=i.group,
                position_tokens=i.position_tokens,
                token_count=i.token_count,
                shards=[pb.ShardSize(rank=s.rank, unit_bytes=s.unit_bytes, unit_count=s.unit_count) for s in i.shards],
                copies=i.copies,
                request=number_of.get(i.request_id, 0),
            )
            for i in r.items
        ],
    )


def reserve_request_from_pb(m: pb.ReserveRequest) -> t.ReserveRequest:
    check_count("items", m.items, MAX_ITEMS)
    check_count("request_ids", m.request_ids, MAX_ITEMS)
    request_ids = ["", *(check_id("request_ids", name) for name in m.request_ids)]
    return t.ReserveRequest(
        holder_id=check_id("holder_id", m.holder_id),
        epoch=check_int("epoch", m.epoch),
        items=tuple(_reserve_item_from_pb(item, request_ids) for item in m.items),
    )


def _reserve_item_from_pb(m: pb.ReserveItem, request_ids: Sequence[str]) -> t.ReserveItem:
    """``request_ids``: the first one is for items of an unknown request."""
    check_count("item.shards", m.shards, MAX_SHARDS)
    return t.ReserveItem(
        key=check_key("item.key", m.key),
        group=m.group,
        position_tokens=check_int("item.position_tokens", m.position_tokens),
        token_count=check_int("item.token_count", m.token_count, 1),
        shards=tuple(
            t.ShardSize(
                rank=s.rank,
                unit_bytes=check_int("shard.unit_bytes", s.unit_bytes, 1),
                unit_count=check_int("shard.unit_count", s.unit_count, 1, MAX_UNITS_PER_SHARD),
            )
            for s in m.shards
        ),
        copies=check_int("item.copies", m.copies, 1, 255),
        request_id=request_ids[check_int("item.request", m.request, 0, len(request_ids) - 1)],
    )


def reserve_reply_to_pb(r: t.ReserveReply) -> pb.ReserveReply:
    return pb.ReserveReply(
        results=[
            pb.ReserveResult(
                outcome=_OUTCOME_TO_PB[x.outcome], grant_id=x.grant_id, extents=map(extent_to_pb, x.extents)
            )
            for x in r.results
        ]
    )


def reserve_reply_from_pb(m: pb.ReserveReply) -> t.ReserveReply:
    check_count("results", m.results, MAX_ITEMS)
    return t.ReserveReply(results=tuple(map(_reserve_result_from_pb, m.results)))


def _reserve_result_from_pb(m: pb.ReserveResult) -> t.ReserveResult:
    outcome = _OUTCOME_FROM_PB.get(m.outcome)
    if outcome is None:
        raise malformed("result.outcome", f"is {m.outcome}, which this version does not know")
    check_count("result.extents", m.extents, MAX_SHARDS)
    granted = outcome is t.ReserveOutcome.GRANTED
    return t.ReserveResult(
        outcome=outcome,
        grant_id=check_id("result.grant_id", m.grant_id, allow_empty=not granted),
        extents=tuple(map(extent_from_pb, m.extents)),
    )


def commit_request_to_pb(r: t.CommitRequest) -> pb.CommitRequest:
    return pb.CommitRequest(
        holder_id=r.holder_id,
        epoch=r.epoch,
        items=[
            pb.CommitItem(grant_id=i.grant_id, unit_digests=map(digests_to_pb, i.unit_digests), bundle=i.bundle)
            for i in r.items
        ],
    )


def commit_request_from_pb(m: pb.CommitRequest) -> t.CommitRequest:
    check_count("items", m.items, MAX_ITEMS)
    for item in m.items:
        check_count("item.unit_digests", item.unit_digests, MAX_SHARDS)
    return t.CommitRequest(
        holder_id=check_id("holder_id", m.holder_id),
        epoch=check_int("epoch", m.epoch),
        items=tuple(
            t.CommitItem(
                grant_id=check_id("item.grant_id", i.grant_id),
                unit_digests=tuple(map(digests_from_pb, i.unit_digests)),
                bundle=i.bundle,
            )
            for i in m.items
        ),
    )


def commit_reply_to_pb(r: t.CommitReply) -> pb.CommitReply:
    return pb.CommitReply(committed=r.committed)


def commit_reply_from_pb(m: pb.CommitReply) -> t.CommitReply:
    check_count("committed", m.committed, MAX_ITEMS)
    return t.CommitReply(committed=tuple(m.committed))


def abort_request_to_pb(r: t.AbortRequest) -> pb.AbortRequest:
    return pb.AbortRequest(
        holder_id=r.holder_id, epoch=r.epoch, grant_ids=r.grant_ids, doubtful_grant_ids=r.doubtful_grant_ids
    )


def abort_request_from_pb(m: pb.AbortRequest) -> t.AbortRequest:
    return t.AbortRequest(
        holder_id=check_id("holder_id", m.holder_id),
        epoch=check_int("epoch", m.epoch),
        grant_ids=ids_from_pb("grant_ids", m.grant_ids),
        doubtful_grant_ids=ids_from_pb("doubtful_grant_ids", m.doubtful_grant_ids),
    )
