"""What a call was to each of the requests that it served, from its messages. No I/O, no clock.

Only lookups and reservations name requests. What follows names leases and grants: it is known for a while whose these
were, so that a commit or a release is found under the request, too.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Final, NamedTuple

from google.protobuf.message import Message

from meshfusion.dpu.api.request_ids import MAX_CHARS, printable_id
from meshfusion.dpu.api.v1 import chunk_pb2 as pb

KEPT_OWNERS: Final = 16_384  # leases and grants whose request is known
MAX_PARTS: Final = 1_024  # of a call: as many requests as an engine batches, and more

_OUTCOMES: Final = {number: name.removeprefix("RESERVE_OUTCOME_").lower() for name, number in pb.ReserveOutcome.items()}


class CallPart(NamedTuple):
    """``counts``: by name, of this request alone; () where the call was refused."""

    request_id: str
    counts: tuple[tuple[str, int], ...]


_Counts = dict[str, Counter[str]]  # by request


class CallParts:
    """Not safe for several threads at once."""

    def __init__(self, *, kept_owners: int = KEPT_OWNERS) -> None:
        self._kept_owners = kept_owners
        self._request_of: OrderedDict[str, str] = OrderedDict()  # by lease or grant, the oldest first
        self._readers: dict[str, Callable[[Any, Any], _Counts]] = {
            "Match": self._match,
            "Release": self._release,
            "Reserve": self._reserve,
            "Commit": self._commit,
            "Abort": self._abort,
        }

    def of(self, call: str, request: Message, reply: Message | None) -> tuple[CallPart, ...]:
        """``reply`` None: it was refused. () for calls that belong to no request."""
        reader = self._readers.get(call)
        counts = {} if reader is None else reader(request, reply)
        parts = (
            CallPart(printable_id(request_id), () if reply is None else tuple(each.items()))
            for request_id, each in counts.items()
            if request_id
        )
        return tuple(islice(parts, MAX_PARTS))

    def _match(self, request: pb.MatchRequest, reply: pb.MatchReply | None) -> _Counts:
        asked = len(request.groups[0].keys) if request.groups else 0
        if reply is None:
            return {request.request_id: Counter()}
        self._own(reply.lease_id, request.request_id)
        return {request.request_id: Counter({"chunks_asked": asked, "chunks_matched": reply.chunk_count})}

    def _release(self, request: pb.ReleaseRequest, reply: object) -> _Counts:
        return self._counted("leases_released", request.lease_ids)

    def _reserve(self, request: pb.ReserveRequest, reply: pb.ReserveReply | None) -> _Counts:
        counts: _Counts = defaultdict(Counter)
        if reply is None:  # maybe since it is malformed
            return {request_id: Counter() for request_id in request.request_ids[:MAX_PARTS]}
        names = ("", *request.request_ids)  # as items refer to them
        for item, result in zip(request.items, reply.results, strict=True):
            counts[names[item.request]].update(("chunks_asked", f"chunks_{_OUTCOMES[result.outcome]}"))
            self._own(result.grant_id, names[item.request])
        return counts

    def _commit(self, request: pb.CommitRequest, reply: pb.CommitReply | None) -> _Counts:
        counts: _Counts = defaultdict(Counter)
        verdicts = reply.committed if reply is not None else [False] * len(request.items)
        for item, is_committed in zip(request.items, verdicts, strict=True):
            each = counts[self._request_of.get(item.grant_id, "")]
            each["chunks_asked"] += 1
            each["chunks_committed"] += is_committed
        return counts

    def _abort(self, request: pb.AbortRequest, reply: object) -> _Counts:
        counts = self._counted("chunks_aborted", request.grant_ids)
        for request_id, each in self._counted("chunks_in_doubt", request.doubtful_grant_ids).items():
            counts[request_id].update(each)
        return counts

    def _counted(self, name: str, ids: Iterable[str]) -> _Counts:
        counts: _Counts = defaultdict(Counter)
        for each in ids:
            counts[self._request_of.get(each, "")][name] += 1
        return counts

    def _own(self, lease_or_grant_id: str, request_id: str) -> None:
        if not lease_or_grant_id or not request_id:
            return
        self._request_of[lease_or_grant_id] = request_id[:MAX_CHARS]
        if len(self._request_of) > self._kept_owners:
            self._request_of.popitem(last=False)
