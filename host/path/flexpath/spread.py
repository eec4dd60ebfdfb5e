"""Requests in, attempts on paths out: which path, what after a failure, and when it is over. No I/O, no clock.

- A read goes elsewhere when its path fails it, but not before nobody can touch its memory any more: an attempt that is
  given up may still land, and after the replay is done the memory is its owner's again.
- A write goes elsewhere only if it is known that the failed attempt is over. One in doubt is told as such, at once:
  repeated, it could land a second time on an extent that is another's by then (rule 3).
- A request ends by its deadline, except that its memory is free only when the path says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshfusion.host.path.flexpath.backlog import Backlog
from meshfusion.host.path.flexpath.choice import choose
from meshfusion.host.path.flexpath.health import PathState
from meshfusion.host.path.flexpath.lane import Lane
from meshfusion.host.path.flexpath.requests import (
    Attempt,
    Begin,
    Kind,
    NoPathError,
    PathChanged,
    Request,
    RequestLateError,
    SpreadEffect,
    TooManyRequestsError,
)
from meshfusion.host.path.flexpath.settings import SpreadSettings
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.nvme.logs import AnaState
from meshfusion.jbof.nvme.queue_effects import CommandDeadlineError, QueueLostError
from meshfusion.jbof.nvme.status import NvmeCommandError, is_path_error
from meshfusion.jbof.nvme.transfer_effects import (
    PathUnusableError,
    TransferDone,
    TransferEffect,
    TransferFailed,
    TransferInDoubt,
    TransferMemoryFree,
)

Effects = list[SpreadEffect]
_ANA_STATUS_CODES = frozenset({0x01, 0x02, 0x03})  # of the path related ones (Base Figure 107)


class Spread:
    """Over paths 0, 1, … with these ``weights`` (1: the best way to the memory; twice the time counts as 2).

    ``names``: of the paths, in what people are told.
    """

    def __init__(self, settings: SpreadSettings, weights: Sequence[float], names: Sequence[str] = ()) -> None:
        self._settings = settings
        names = names or [f"path {path}" for path in range(len(weights))]
        named = zip(names, weights, strict=True)
        self._lanes = [Lane(path, name, weight, settings) for path, (name, weight) in enumerate(named)]
        self._backlog = Backlog()
        self._doubtful: dict[Attempt, None] = {}  # reads whose memory is not free
        self._told_states = [PathState.QUARANTINED] * len(self._lanes)
        self._open_count = 0
        self._is_closed = False

    # ---- reading -------------------------------------------------------------------------------------------------

    @property
    def lanes(self) -> Sequence[Lane]:
        return self._lanes

    @property
    def open_count(self) -> int:
        """Requests that have not ended, or whose memory is not free."""
        return self._open_count

    # ---- asking --------------------------------------------------------------------------------------------------

    def begin(
        self, now_s: float, owner: object, kind: Kind, nsid: int, length_bytes: int, deadline_s: float
    ) -> Effects:
        """Ends with one transfer effect for ``owner``, or two: in doubt, then with its memory free."""
        request = Request(owner, kind, nsid, length_bytes, deadline_s)
        self._open_count += 1
        if len(self._backlog) >= self._settings.max_waiting:
            step = "Transfer less at a time, or look at why the paths are slow."
            return self._fail(request, TooManyRequestsError(f"{len(self._backlog)} requests wait", next_step=step))
        self._backlog.add(request)
        return self._send(now_s)

    def close(self, now_s: float) -> Effects:
        """Nothing begins any more. What is under way ends as its path says."""
        self._is_closed = True
        effects: Effects = []
        for attempt in list(self._doubtful):
            effects += self._tell_doubt(attempt.request)
        return effects + self._send(now_s)

    # ---- what operators say --------------------------------------------------------------------------------------

    def disable(self, now_s: float, path: int) -> Effects:
        """It gets nothing new until it is enabled; what is under way on it ends as it would have. It has not failed.

        Again is no error. What no other path can take fails now.
        """
        self._lanes[path].is_disabled = True
        return self._send(now_s)

    def enable(self, now_s: float, path: int) -> Effects:
        """It is what it would be if it had never been disabled."""
        self._lanes[path].is_disabled = False
        return self._send(now_s)

    # ---- what paths say ------------------------------------------------------------------------------------------

    def connected(self, now_s: float, path: int, access: Mapping[int, AnaState]) -> Effects:
        """``access``: of each namespace that it has, for use by us."""
        self._lanes[path].set_access(access)
        self._lanes[path].health.connected(now_s)
        return self._send(now_s)

    def access_changed(self, now_s: float, path: int, access: Mapping[int, AnaState]) -> Effects:
        self._lanes[path].set_access(access)
        return self._send(now_s)

    def lost(self, now_s: float, path: int) -> Effects:
        """Its connection. What is under way on it ends by itself."""
        self._lanes[path].lost(now_s)
        return self._send(now_s)

    def on_transfer(self, now_s: float, effect: TransferEffect) -> Effects:
        """What became of an attempt."""
        attempt = effect.owner
        assert isinstance(attempt, Attempt)
        request, lane = attempt.request, self._lanes[attempt.path]
        effects: Effects = []
        match effect:
            case TransferDone():
                lane.answered(now_s, attempt)
                lane.memory_free(attempt)
                effects = self._end(TransferDone(request.owner))
            case TransferFailed(_, error, may_retry):
                self._blame(now_s, lane, attempt, error)
                lane.memory_free(attempt)
                effects = self._again(now_s, request, error, may_retry=may_retry)
            case TransferInDoubt(_, error):
                lane.failed(now_s, attempt)
                request.error = error
                if request.kind is Kind.WRITE or self._is_closed or now_s >= request.deadline_s:
                    effects = self._tell_doubt(request)
                if request.kind is Kind.READ:
                    self._doubtful[attempt] = None
            case TransferMemoryFree():
                lane.memory_free(attempt)
                self._doubtful.pop(attempt, None)
                if request.is_told:
                    effects = self._end(TransferMemoryFree(request.owner))
                else:
                    assert request.error is not None
                    effects = self._again(now_s, request, request.error, may_retry=True)
        return effects + self._send(now_s)

    def tick(self, now_s: float) -> Effects:
        """Whatever is due. To be called every few milliseconds while requests are open, now and then otherwise."""
        for lane in self._lanes:
            if lane.health.state is PathState.QUARANTINED and self._is_needed(now_s, lane):
                lane.health.needed()
            lane.tick(now_s)
        effects: Effects = []
        for request in self._backlog.take(lambda waiting: self._is_late(now_s, waiting)):
            effects += self._fail(request, _late(request))
        for attempt in list(self._doubtful):
            if now_s >= attempt.request.deadline_s:
                effects += self._tell_doubt(attempt.request)
        return effects + self._send(now_s)

    # ---- one request ---------------------------------------------------------------------------------------------

    def _blame(self, now_s: float, lane: Lane, attempt: Attempt, error: MeshFusionError) -> None:
        """What the failure says of the path."""
        match error:
            case PathUnusableError():
                lane.refused(now_s, attempt.request.nsid)
                lane.erred(now_s, attempt, is_path_error=False)
            case NvmeCommandError() if is_path_error(error.status) and error.status.sc in _ANA_STATUS_CODES:
                lane.refused(now_s, attempt.request.nsid)
                lane.erred(now_s, attempt, is_path_error=False)
            case NvmeCommandError():
                lane.erred(now_s, attempt, is_path_error=is_path_error(error.status))
            case QueueLostError() | CommandDeadlineError():
                lane.failed(now_s, attempt)
            case _:
                lane.erred(now_s, attempt, is_path_error=False)

    def _again(self, now_s: float, request: Request, error: MeshFusionError, *, may_retry: bool) -> Effects:
        """Nobody touches its memory: another attempt, unless it is pointless."""
        request.error = error
        is_late = self._is_late(now_s, request)
        if not may_retry or is_late or self._is_closed or request.attempts >= self._settings.max_attempts:
            return self._fail(request, error, is_retryable=may_retry)
        self._backlog.add_first(request)
        return []

    def _fail(self, request: Request, error: MeshFusionError, *, is_retryable: bool = True) -> Effects:
        return self._end(TransferFailed(request.owner, error, is_retryable))

    def _tell_doubt(self, request: Request) -> Effects:
        if request.is_told:
            return []
        request.is_told = True
        assert request.error is not None
        return [TransferInDoubt(request.owner, request.error)]

    def _end(self, effect: TransferEffect) -> Effects:
        self._open_count -= 1
        assert self._open_count >= 0
        return [effect]

    # ---- sending -------------------------------------------------------------------------------------------------

    def _send(self, now_s: float) -> Effects:
        """As much as the paths have room for."""
        effects = self._changes()
        for nsid in self._backlog.nsids():
            while (request := self._backlog.first(nsid)) is not None:
                if (reason := self._hopeless(now_s, request)) is not None:
                    self._backlog.pop(nsid)
                    effects += self._fail(request, reason)
                    continue
                sent = self._send_one(now_s, request)
                if sent is None:
                    break
                effects += sent
        return effects

    def _hopeless(self, now_s: float, request: Request) -> MeshFusionError | None:
        """Why it will not be sent any more."""
        if self._is_closed:
            return NoPathError("the paths are closed", next_step="Nothing, if the engine is shutting down.")
        if self._is_late(now_s, request):
            return _late(request)
        if self._reaching(now_s, request.nsid):
            return None
        ways = ", ".join(f"{lane.name}: {lane.words(now_s, request.nsid)}" for lane in self._lanes)
        cause = f"; the last one said: {request.error.message}" if request.error is not None else ""
        step = "See why the connections were lost, and which access state the target gives them."
        if any(lane.is_disabled for lane in self._lanes):
            step = f"Enable what was disabled: `mfctl path enable`. {step}"
        return NoPathError(f"no path reaches namespace {request.nsid} now ({ways}){cause}", next_step=step)

    def _is_late(self, now_s: float, request: Request) -> bool:
        return now_s >= request.deadline_s - self._settings.least_time_s

    def _reaching(self, now_s: float, nsid: int) -> list[Lane]:
        """Paths to the namespace that may be used, or perhaps soon."""
        return [lane for lane in self._lanes if (lane.is_usable or lane.may_recover) and lane.reaches(now_s, nsid)]

    def _is_needed(self, now_s: float, lane: Lane) -> bool:
        """Does no other lead to a namespace that it reaches? After a target was killed all its paths are out."""
        return any(not self._reaching(now_s, nsid) for nsid in lane.reached(now_s))

    def _send_one(self, now_s: float, request: Request) -> Effects | None:
        """None: it has to wait."""
        usable = [lane for lane in self._reaching(now_s, request.nsid) if lane.is_usable]
        path = choose(
            [lane.candidate(now_s, request) for lane in usable],
            request.length_bytes,
            backlog_bytes=self._backlog.length_bytes(request.nsid),
            time_left_s=request.deadline_s - now_s,
            is_probe_allowed=request.kind is Kind.READ,  # what a probe may cost is a repetition, never a doubt
            settings=self._settings,
        )
        if path is None:
            return None
        self._backlog.pop(request.nsid)
        request.attempts += 1
        request.tried.add(path)
        return [Begin(self._lanes[path].begin(now_s, request, is_only_one=len(usable) == 1))]

    def _changes(self) -> Effects:
        effects: Effects = []
        for lane in self._lanes:
            state = lane.health.state
            if state is not self._told_states[lane.path]:
                self._told_states[lane.path] = state
                effects.append(PathChanged(lane.path, state))
        return effects


def _late(request: Request) -> MeshFusionError:
    cause = f"; the last path said: {request.error.message}" if request.error is not None else ""
    return RequestLateError(
        f"it has too little time left to be sent{cause}",
        next_step="Look at the load of the paths and of the target, or transfer less at a time.",
    )
