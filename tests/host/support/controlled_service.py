"""A chunk service that does as it is told: slow, absent, forgetful, or telling lies."""

from __future__ import annotations

import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.liveness import create_liveness
from meshfusion.jbof.errors import ServiceError, ServiceUnavailableError, StaleHolderError


def unavailable() -> ServiceUnavailableError:
    return ServiceUnavailableError("the service is away", next_step="start it")


def stale() -> StaleHolderError:
    return StaleHolderError("who are you?", next_step="attach again")


def refusal() -> ServiceError:
    return ServiceError("I would rather not", next_step="ask for something else")


class ControlledService:
    """``fails[name]`` is raised by that call; ``holds[name]`` is waited for, at most as long as the deadline allows
    unless ``ignores_deadlines``. Holders are forgotten by :meth:`restart`."""

    def __init__(self, directory: Path, *, heartbeat_s: float = 60.0) -> None:
        self.directory = directory
        self.heartbeat_s = heartbeat_s
        self.epoch = 1
        self.holders: dict[str, api.AttachRequest] = {}
        self.former: dict[str, api.AttachRequest] = {}
        self.chunks: dict[bytes, api.ChunkRecord] = {}
        self.leases: dict[str, str] = {}
        self.grants: dict[str, str] = {}
        self.calls: dict[str, list[Any]] = defaultdict(list)
        self.fails: dict[str, Exception] = {}
        self.holds: dict[str, threading.Event] = {}
        self.ignores_deadlines = False
        self.reserve_reply: api.ReserveReply | None = None
        self.match_chunks: tuple[api.ChunkRecord, ...] | None = None
        self.export: api.Export | None = None  # of those that attach from now on
        self.new_key = ""  # told with each heartbeat
        self.is_closed = False
        self._count = 0
        self._mutex = threading.Lock()

    def restart(self) -> None:
        with self._mutex:
            self.epoch += 1
            self.former |= self.holders
            self.holders.clear()
            self.leases.clear()
            self.grants.clear()

    def _enter(self, name: str, request: Any, deadline_s: float) -> None:
        self.calls[name].append(request)
        hold = self.holds.get(name)
        if hold is not None and not hold.wait(30 if self.ignores_deadlines else deadline_s):
            raise unavailable()
        if name in self.fails:
            raise self.fails[name]

    def _next(self, stem: str) -> str:
        with self._mutex:
            self._count += 1
            return f"{stem}-{self._count}"

    def _check(self, holder_id: str, epoch: int | None = None) -> None:
        if holder_id not in self.holders or epoch not in (None, self.epoch):
            raise stale()

    def attach(self, request: api.AttachRequest, *, deadline_s: float) -> api.Attachment:
        self._enter("attach", request, deadline_s)
        holder_id = request.incarnation
        assert holder_id not in self.holders | self.former, "an incarnation was used twice"
        liveness = self.directory / f"{holder_id}.alive"
        create_liveness(liveness)
        self.holders[holder_id] = request
        namespace = api.Namespace(1, "/nowhere", 4096, 1 << 20)
        path = str(liveness) if self.export is None else ""
        return api.Attachment(
            "pool", holder_id, self.epoch, (namespace,), path, 30.0, 60.0, self.heartbeat_s, self.export
        )

    def match(self, request: api.MatchRequest, *, deadline_s: float) -> api.MatchReply:
        self._enter("match", request, deadline_s)
        self._check(request.holder_id)
        found: list[api.ChunkRecord] = []
        (group,) = request.groups
        assert group == api.GroupKeys(0, group.keys, (0,) * len(group.keys)), "one full-attention group so far"
        for key in group.keys:
            if key not in self.chunks:
                break
            found.append(self.chunks[key])
        if self.match_chunks is not None:
            found = list(self.match_chunks)
        if not found:
            return api.MatchReply("", 0, ())
        lease_id = self._next("lease")
        self.leases[lease_id] = request.holder_id
        return api.MatchReply(lease_id, len(found), tuple(found))

    def release(self, request: api.ReleaseRequest, *, deadline_s: float) -> None:
        self._enter("release", request, deadline_s)
        for lease_id in request.lease_ids:
            if self.leases.get(lease_id) == request.holder_id:
                del self.leases[lease_id]

    def reserve(self, request: api.ReserveRequest, *, deadline_s: float) -> api.ReserveReply:
        self._enter("reserve", request, deadline_s)
        self._check(request.holder_id, request.epoch)
        if self.reserve_reply is not None:
            return self.reserve_reply
        results = []
        for _ in request.items:
            grant_id = self._next("grant")
            self.grants[grant_id] = request.holder_id
            extent = api.Extent(1, 0, 256, 9, 1)
            results.append(api.ReserveResult(api.ReserveOutcome.GRANTED, grant_id, (extent,)))
        return api.ReserveReply(tuple(results))

    def commit(self, request: api.CommitRequest, *, deadline_s: float) -> api.CommitReply:
        self._enter("commit", request, deadline_s)
        self._check(request.holder_id, request.epoch)
        return api.CommitReply(tuple(self.grants.pop(item.grant_id, None) is not None for item in request.items))

    def abort(self, request: api.AbortRequest, *, deadline_s: float) -> None:
        self._enter("abort", request, deadline_s)
        for grant_id in request.grant_ids:
            self.grants.pop(grant_id, None)

    def heartbeat(self, request: api.HeartbeatRequest, *, deadline_s: float) -> api.HeartbeatReply:
        self._enter("heartbeat", request, deadline_s)
        self._check(request.holder_id, request.epoch)
        lost = tuple(i for i in request.lease_ids if self.leases.get(i) != request.holder_id)
        return api.HeartbeatReply(lost, host_key=self.new_key)

    def drop(self, request: api.DropRequest, *, deadline_s: float) -> bool:
        self._enter("drop", request, deadline_s)
        return self.chunks.pop(request.key, None) is not None

    def detach(self, request: api.DetachRequest, *, deadline_s: float) -> None:
        self._enter("detach", request, deadline_s)
        self.former[request.holder_id] = self.holders.pop(request.holder_id)

    def status(self, *, deadline_s: float) -> api.PoolStatus:
        raise NotImplementedError

    def list_chunks(self, request: api.ListRequest, *, deadline_s: float) -> api.ListReply:
        raise NotImplementedError

    def get_chunk(self, key: bytes, *, deadline_s: float) -> api.ChunkRecord | None:
        raise NotImplementedError

    def close(self) -> None:
        self.is_closed = True
