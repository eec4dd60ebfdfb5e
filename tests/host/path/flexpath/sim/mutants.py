"""Planted bugs. Each breaks one rule of FlexPath as a mistake would; the simulation must find every one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from meshfusion.host.path.flexpath import choice, spread
from meshfusion.host.path.flexpath.backlog import Backlog
from meshfusion.host.path.flexpath.choice import Candidate
from meshfusion.host.path.flexpath.health import Health, PathState
from meshfusion.host.path.flexpath.lane import Lane
from meshfusion.host.path.flexpath.requests import Attempt, Kind, Request
from meshfusion.host.path.flexpath.speed import Speed
from meshfusion.host.path.flexpath.spread import Spread
from meshfusion.jbof.nvme.transfer_effects import TransferEffect, TransferFailed, TransferInDoubt, TransferMemoryFree

Effects = list[Any]

_on_transfer = Spread.on_transfer
_again = Spread._again
_lane_begin = Lane.begin
_health_tick = Health.tick
_candidate = Lane.candidate
_failed = Health.failed


def _replays_before_memory_is_safe(self: Spread, now_s: float, effect: TransferEffect) -> Effects:
    attempt = effect.owner
    assert isinstance(attempt, Attempt)
    if isinstance(effect, TransferInDoubt) and attempt.request.kind is Kind.READ:
        return _on_transfer(self, now_s, TransferFailed(attempt, effect.error, is_retryable=True))
    if isinstance(effect, TransferMemoryFree) and attempt.request.kind is Kind.READ:
        return []
    return _on_transfer(self, now_s, effect)


def _repeats_doubtful_writes(self: Spread, now_s: float, effect: TransferEffect) -> Effects:
    attempt = effect.owner
    assert isinstance(attempt, Attempt)
    if attempt.request.kind is Kind.READ or not isinstance(effect, TransferInDoubt | TransferMemoryFree):
        return _on_transfer(self, now_s, effect)
    attempt.request.kind = Kind.READ
    effects = _on_transfer(self, now_s, effect)
    if attempt not in self._doubtful:
        attempt.request.kind = Kind.WRITE
    return effects


def _calls_doubtful_writes_failed(self: Spread, now_s: float, effect: TransferEffect) -> Effects:
    attempt = effect.owner
    assert isinstance(attempt, Attempt)
    if attempt.request.kind is Kind.WRITE:
        if isinstance(effect, TransferInDoubt):
            return []
        if isinstance(effect, TransferMemoryFree):
            return _on_transfer(self, now_s, TransferFailed(attempt, spread._late(attempt.request), False))
    return _on_transfer(self, now_s, effect)


def _frees_memory_with_the_doubt(self: Spread, now_s: float, effect: TransferEffect) -> Effects:
    effects = _on_transfer(self, now_s, effect)
    if isinstance(effect, TransferMemoryFree):
        return [e for e in effects if not isinstance(e, TransferMemoryFree)]
    freed = [TransferMemoryFree(e.owner) for e in effects if isinstance(e, TransferInDoubt)]
    return effects + freed


def _never_replays(self: Spread, now_s: float, request: Request, error: Any, *, may_retry: bool) -> Effects:
    return self._fail(request, error, is_retryable=may_retry)


def _repeats_what_is_refused(self: Spread, now_s: float, request: Request, error: Any, *, may_retry: bool) -> Effects:
    return _again(self, now_s, request, error, may_retry=True)


def _gives_no_attempt_up(self: Lane, now_s: float, request: Request, *, is_only_one: bool) -> Attempt:
    return _lane_begin(self, now_s, request, is_only_one=True)


def _lets_commands_grow_old(self: Lane, now_s: float, request: Request, *, is_only_one: bool) -> Attempt:
    attempt = _lane_begin(self, now_s, request, is_only_one=is_only_one)
    attempt.deadline_s = now_s + 30
    return attempt


def _enters_at_full_share(self: Health, now_s: float) -> None:
    _health_tick(self, now_s)
    if self._state is PathState.REENTERING:
        self._state = PathState.LIVE


def _stays_out(self: Health, now_s: float) -> None:
    if self._state is not PathState.QUARANTINED:
        _health_tick(self, now_s)


def _has_no_quarantine(self: Health, now_s: float) -> None:
    _failed(self, now_s)
    self._until_s = now_s


def _takes_the_not_optimized_alike(self: Lane, now_s: float, request: Request) -> Candidate:
    return replace(_candidate(self, now_s, request), is_optimized=True)


def _takes_a_stalled_path_for_idle(self: Lane, now_s: float, request: Request) -> Candidate:
    candidate = _candidate(self, now_s, request)
    if self._unanswered and now_s - self._heard_s > 0.02:
        return replace(candidate, outstanding_bytes=0)
    return candidate


def _takes_the_disabled_for_failed(self: Spread, now_s: float, path: int) -> Effects:
    self._lanes[path].is_disabled = True
    self._lanes[path].health.failed(now_s)
    return self._send(now_s)


MUTANTS: dict[str, AbstractContextManager[Any]] = {
    "replays a read before its memory is safe": patch.object(Spread, "on_transfer", _replays_before_memory_is_safe),
    "repeats a write in doubt": patch.object(Spread, "on_transfer", _repeats_doubtful_writes),
    "calls a write in doubt failed": patch.object(Spread, "on_transfer", _calls_doubtful_writes_failed),
    "gives memory back that is in doubt": patch.object(Spread, "on_transfer", _frees_memory_with_the_doubt),
    "never replays": patch.object(Spread, "_again", _never_replays),
    "repeats what is refused for good": patch.object(Spread, "_again", _repeats_what_is_refused),
    "tells no doubt at the deadline": patch.object(Spread, "_tell_doubt", lambda *_: []),
    "waits for ever": patch.object(Backlog, "take", lambda *_: []),
    "keeps late requests": patch.object(Spread, "_is_late", lambda *_: False),
    "gives no attempt up": patch.object(Lane, "begin", _gives_no_attempt_up),
    "lets commands grow old": patch.object(Lane, "begin", _lets_commands_grow_old),
    "forgets the bound": patch.object(choice, "_has_room", lambda *_: True),
    "enters again at full share": patch.object(Health, "tick", _enters_at_full_share),
    "never enters again": patch.object(Health, "tick", _stays_out),
    "has no quarantine": patch.object(Health, "failed", _has_no_quarantine),
    "keeps out what alone leads somewhere": patch.object(Health, "needed", lambda *_: None),
    "ignores lost connections": patch.object(Spread, "lost", lambda *_: []),
    "ignores access states": patch.object(Lane, "reaches", lambda *_: True),
    "ignores refusals": patch.object(Lane, "refused", lambda *_: None),
    "takes the not optimized alike": patch.object(Lane, "candidate", _takes_the_not_optimized_alike),
    "takes a stalled path for idle": patch.object(Lane, "candidate", _takes_a_stalled_path_for_idle),
    "forgets what is disabled": patch.object(Lane, "is_usable", property(lambda self: self.health.is_usable)),
    "forgets to enable": patch.object(Spread, "enable", lambda *_: []),
    "takes the disabled for failed": patch.object(Spread, "disable", _takes_the_disabled_for_failed),
    "takes all paths for equally fast": patch.object(Speed, "observe", lambda *_: None),
}
