"""What a call was to each of the requests that it served, from its messages. No I/O, no clock.

Only lookups and reservations name requests. What follows names leases and grants: it is known for a while whose these
were, so that a commit or a release is found under the request, too.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import Any, Final, NamedTuple

from google.protobuf.message import Message

from meshfusion.dpu.api.request_ids import MAX_CHARS, printable_id
from meshfusion.dpu.api.v1 import chunk_pb2 as pb

KEPT_OWNERS: Final = 16_384  # leases and grants whose request is known
MAX_PARTS: Final = 1_024  # of a call: as many requests as an engine batches, and more

_OUTCOMES: Final = {
    number: f"chunks_{name.removeprefix('RESERVE_OUTCOME_').lower()}" for name, number in pb.ReserveOutcome.items()
}


class CallPart(NamedTuple):
    """``counts``: by name, of this request alone; () where the call was refused."""

    request_id: str
    counts: tuple[tuple[str, int], ...]


_Counts = dict[str, dict[str, int]]  # by request and name


class CallParts:
    """Safe for use by several threads: lookups wait for no more than a few look-ups in a table."""

    def __init__(self, *, kept_owners: int = KEPT_OWNERS) -> None:
        self._kept_owners = kept_owners
        self._mutex = threading.Lock()
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
            return {request.request_id: {}}
        self._own([(reply.lease_id, request.request_id)])
        return {request.request_id: {"chunks_asked": asked, "chunks_matched": reply.chunk_count}}

    def _release(self, request: pb.ReleaseRequest, reply: object) -> _Counts:
        return _counts_of((owner, "leases_released") for owner in self._owners(request.lease_ids))

    def _reserve(self, request: pb.ReserveRequest, reply: pb.ReserveReply | None) -> _Counts:
        if reply is None:  # maybe since it is malformed
            return {request_id: {} for request_id in request.request_ids[:MAX_PARTS]}
        names = ("", *request.request_ids)  # as items refer to them
        owners = [names[item.request] for item in request.items]
        self._own([(r.grant_id, owner) for r, owner in zip(reply.results, owners, strict=True) if r.grant_id])
        outcomes = (_OUTCOMES[result.outcome] for result in reply.results)
        asked = ((owner, "chunks_asked") for owner in owners)
        return _counts_of(chain(asked, zip(owners, outcomes, strict=True)))

    def _commit(self, request: pb.CommitRequest, reply: pb.CommitReply | None) -> _Counts:
        owners = self._owners(item.grant_id for item in request.items)
        verdicts = reply.committed if reply is not None else [False] * len(owners)
        names = ("chunks_committed" if is_so else "chunks_refused" for is_so in verdicts)
        asked = ((owner, "chunks_asked") for owner in owners)
        return _counts_of(chain(asked, zip(owners, names, strict=True)))

    def _abort(self, request: pb.AbortRequest, reply: object) -> _Counts:
        aborted = ((owner, "chunks_aborted") for owner in self._owners(request.grant_ids))
        doubtful = ((owner, "chunks_in_doubt") for owner in self._owners(request.doubtful_grant_ids))
        return _counts_of(chain(aborted, doubtful))

    def _owners(self, ids: Iterable[str]) -> list[str]:
        """ "" where it is not known."""
        with self._mutex:
            return [self._request_of.get(each, "") for each in ids]

    def _own(self, owners: Iterable[tuple[str, str]]) -> None:
        """``owners``: (lease or grant, request)."""
        known = [(each, request_id[:MAX_CHARS]) for each, request_id in owners if each and request_id]
        with self._mutex:
            self._request_of.update(known)
            while len(self._request_of) > self._kept_owners:
                self._request_of.popitem(last=False)


def _counts_of(pairs: Iterable[tuple[str, str]]) -> _Counts:
    """``pairs``: (request, what is to be counted)."""
    counts: _Counts = {}
    for (request_id, name), count in Counter(pairs).items():
        counts.setdefault(request_id, {})[name] = count
    return counts
