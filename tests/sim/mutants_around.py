"""Planted bugs around the store: in what fences, in who owns the drive, and in what answers requests that come twice,
late, or from engines of other versions. As in :mod:`tests.sim.mutants`, the simulation must find every one."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from meshfusion.dpu.api import types as api
from meshfusion.dpu.export.actual import Actual
from meshfusion.dpu.export.desired import Export, Subsystem
from meshfusion.dpu.export.errors import ExportError
from meshfusion.dpu.export.fence import Confirmed, Fence, NotYet
from meshfusion.dpu.export.keeper import FencingTarget
from meshfusion.dpu.export.reconcile import Report, reconcile
from meshfusion.dpu.store.effects import PutChunk
from meshfusion.dpu.store.grants import Grant, GrantState, GrantTable
from meshfusion.dpu.store.leases import LeaseTable
from meshfusion.dpu.store.save_gate import SaveGate
from meshfusion.dpu.store.steps import Step
from meshfusion.dpu.store.store import Store
from tests.jbof.drives.shared_drive import SharedDrive
from tests.sim.service import Rules
from tests.sim.target import NvmetOfModel, SpdkOfModel, TargetModel

# ---- requests that come twice, or late ---------------------------------------------------------------------------


class CommitsFromMemory(Store):
    """A commit that comes again is answered as the first was, and done as the first was."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._records: dict[str, api.ChunkRecord] = {}

    def commit(self, now_s: float, request: api.CommitRequest) -> Step[api.CommitReply]:
        again = [self._records[item.grant_id] for item in request.items if item.grant_id in self._records]
        if len(again) == len(request.items):
            reply = api.CommitReply((True,) * len(again))
            return self._transactions.begin(reply, tuple(map(PutChunk, again)))
        step = super().commit(now_s, request)
        if step.effects:
            committing = self._transactions._pending[step.ticket].committing
            self._records.update((grant.grant_id, record) for grant, record in committing)
        return step


class _ReleasesAgain(LeaseTable):
    """Counts the pins of a lease down for every message."""

    def release(self, holder_id: str, lease_id: str) -> bool:
        lease = self._leases.get(lease_id)
        was_there = super().release(holder_id, lease_id)
        released = self.__dict__.setdefault("released", {})
        if lease is not None:
            released[lease_id] = lease
        elif lease_id in released:
            for segment in released[lease_id].segments:
                if self._segments.pins(segment)[0]:
                    self._segments.unpin_read(segment)
        return was_there


class ReleasesAgain(Store):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.leases.__class__ = _ReleasesAgain


class AbortsAgain(Store):
    """As :class:`ReleasesAgain`, of grants."""

    def abort(self, now_s: float, request: api.AbortRequest) -> None:
        aborted: dict[str, Grant] = self.__dict__.setdefault("aborted", {})
        for grant_id in request.grant_ids:
            grant = self.grants.get(request.holder_id, grant_id)
            if grant is not None:
                aborted[grant_id] = grant
            elif grant_id in aborted:
                for extent in aborted[grant_id].extents:
                    if self.segments.pins(extent.segment)[1]:
                        self.segments.unpin_write(extent.segment)
        super().abort(now_s, request)


class DropsWhateverIsThere(Store):
    """Does not look at what the reader had read."""

    def drop(self, now_s: float, request: api.DropRequest, found: api.ChunkRecord | None) -> Step[bool]:
        extent = request.extent if found is None else found.shards[0].extent
        return super().drop(now_s, replace(request, extent=extent), found)


class NamesGrantsWithoutEpoch(Store):
    """What was sent to an earlier life names a grant of this one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.grants._epoch = 0


class _GrantsTwice(GrantTable):
    def has_writer(self, key: bytes) -> bool:
        self._writer_of.pop(key, None)
        return False


class GrantsTwice(Store):
    """A reservation that comes again gets places of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.grants.__class__ = _GrantsTwice


class _RenewsAll(LeaseTable):
    def renew(self, now_s: float, holder_id: str, lease_ids: Iterable[str]) -> tuple[str, ...]:
        own = [lease.lease_id for lease in self if lease.holder_id == holder_id]
        super().renew(now_s, holder_id, own)
        return super().renew(now_s, holder_id, lease_ids)


class RenewsAllLeases(Store):
    """Also those that their holder never heard of, since the answer was lost."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.leases.__class__ = _RenewsAll


class AdmitsOtherVersions(Store):
    def attach(self, now_s: float, request: api.AttachRequest) -> Step[str]:
        return super().attach(now_s, replace(request, api_version=api.API_VERSION))


# ---- time --------------------------------------------------------------------------------------------------------


class FreesAfterAnHour(Store):
    """Nobody is silent for that long; but a clock may leap."""

    def tick(self, now_s: float) -> None:
        super().tick(now_s)
        for grant in self.grants:
            if grant.state is GrantState.EXPIRED and now_s - grant.expires_s > 3600.0:
                self.grants.resolve(grant)


class _StopsAtOnce(SaveGate):
    def _is_quarantine_full(self) -> bool:
        return self._grants.quarantined_segment_count > 0


class StopsForOneSilentHost(Store):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gate.__class__ = _StopsAtOnce


class AsksTargetsOnce(Store):
    """Who could not be cut off at once is forgotten."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        asked: set[str] = set()
        to_cut_off = self.holders.to_cut_off

        def once() -> tuple[str, ...]:
            new = tuple(holder_id for holder_id in to_cut_off() if holder_id not in asked)
            asked.update(new)
            return new

        self.holders.to_cut_off = once  # type: ignore[method-assign]


# ---- what fences -------------------------------------------------------------------------------------------------


class _Early:
    """Confirms when access is gone, and does not wait for what is in flight."""

    _desired: Export
    read: Callable[[Export], Actual]

    def fence(self, host_nqn: str) -> Fence:
        super().fence(host_nqn)  # type: ignore[misc]
        try:
            actual = self.read(self._desired)
        except ExportError as error:
            return NotYet(error.message)
        may_connect = any(host_nqn in subsystem.host_nqns for subsystem in actual)
        return NotYet("it has access") if may_connect else Confirmed()


class EarlySpdk(_Early, SpdkOfModel):
    pass


class EarlyNvmet(_Early, NvmetOfModel):
    pass


class _TakesSilenceForTheEnd:
    """A target that does not answer has no connections any more, has it?"""

    def desire(self, desired: Export) -> Report:
        report: Report = super().desire(desired)  # type: ignore[misc]
        return replace(report, unreachable=None)

    def fence(self, host_nqn: str) -> Fence:
        verdict: Fence = super().fence(host_nqn)  # type: ignore[misc]
        return Confirmed() if verdict == NotYet("the target does not answer") else verdict


class SilentSpdk(_TakesSilenceForTheEnd, SpdkOfModel):
    pass


class SilentNvmet(_TakesSilenceForTheEnd, NvmetOfModel):
    pass


class _ReplaysAll:
    """After a restart the target is told all that it was ever told."""

    _model: TargetModel
    reconcile: Callable[[], Report]

    def desire(self, desired: Export) -> Report:
        ever: dict[str, Subsystem] = self.__dict__.setdefault("ever", {})
        for new in desired.subsystems:
            old = ever.get(new.nqn, new)
            ever[new.nqn] = replace(new, hosts=new.hosts | old.hosts)
        has_restarted = self.__dict__.get("starts", self._model.starts) != self._model.starts
        if not self._model.is_down:
            self.__dict__["starts"] = self._model.starts
        if has_restarted and not self._model.is_down:
            return reconcile(self, replace(desired, subsystems=frozenset(ever.values())))  # type: ignore[arg-type]
        return super().desire(desired)  # type: ignore[misc,no-any-return]


class ReplayingSpdk(_ReplaysAll, SpdkOfModel):
    pass


class ReplayingNvmet(_ReplaysAll, NvmetOfModel):
    pass


def _targets(spdk: Callable[..., FencingTarget], nvmet: Callable[..., FencingTarget]) -> Rules:
    return Rules(spdk=spdk, nvmet=nvmet)


# ---- who owns the drive ------------------------------------------------------------------------------------------


def reserves_nothing(drive: SharedDrive, machine: str, service: uuid.UUID, key: int) -> None:
    """The epoch on the drive is all that tells owners apart."""


MUTANTS_AROUND: Mapping[str, Rules] = {
    "commits again what it committed": Rules(store=CommitsFromMemory),
    "releases again what it released": Rules(store=ReleasesAgain),
    "gives back again what it gave back": Rules(store=AbortsAgain),
    "drops what was written anew": Rules(store=DropsWhateverIsThere),
    "names grants without the epoch": Rules(store=NamesGrantsWithoutEpoch),
    "grants one chunk twice": Rules(store=GrantsTwice),
    "renews leases that nobody knows": Rules(store=RenewsAllLeases),
    "admits engines of other versions": Rules(store=AdmitsOtherVersions),
    "frees after an hour": Rules(store=FreesAfterAnHour),
    "stops saves for one silent host": Rules(store=StopsForOneSilentHost),
    "asks a target once": Rules(store=AsksTargetsOnce),
    "does not wait for the drain": _targets(EarlySpdk, EarlyNvmet),
    "takes a target's silence for its end": _targets(SilentSpdk, SilentNvmet),
    "forgets fences when the target restarts": _targets(ReplayingSpdk, ReplayingNvmet),
    "forgets fences when it restarts itself": Rules(remembers_fences=False),
    "reserves no drive": Rules(take=reserves_nothing),
    "does not abort what the owner before began": Rules(aborts_when_preempted=False),
    "does not look at the epoch on the drive": Rules(checks_epoch=False),
}
