"""The change of the service on one card, as a state machine: no I/O, no clock.

:meth:`Upgrade.begin` gives the first effect; for each effect the caller brings back one event to :meth:`Upgrade.next`,
with the time, and gets the next effect, until an :class:`~meshfusion.dpu.image.slots.types.End`. What it holds to:

- The card is the only memory: nothing is kept elsewhere, so that any later run, from any machine, goes on where the
  card is. A fault of unknown fate is followed by a look, or by the same effect, each of which can be repeated.
- Before the service is touched the card was told to go back by itself. What was begun after that is either committed,
  after the new service was ready all of a time, or given back, and the former one looked at.
- Whoever was committed stays so until the new service did with a real chunk what engines do.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

from meshfusion.dpu.image.errors import FaultKind
from meshfusion.dpu.image.slots import words
from meshfusion.dpu.image.slots.card_state import CardState, ServiceRuns
from meshfusion.dpu.image.slots.types import (
    Abort,
    Acted,
    Arm,
    Commit,
    Deadlines,
    Drain,
    Effect,
    End,
    Event,
    Faulted,
    Forget,
    Look,
    Looked,
    Outcome,
    Phase,
    Probe,
    Probed,
    Progress,
    Put,
    Switch,
    Unpack,
    Wait,
    Wanted,
)

RETRY_S: Final = 2.0
PROBE_S: Final = 2.0
PIECE_BYTES: Final = 8 << 20
DAMAGED_ATTEMPTS: Final = 3
_PASSING: Final = frozenset({FaultKind.BUSY, FaultKind.GONE, FaultKind.UNREACHABLE})
_ORDER: Final = tuple(Phase)

Steps = Generator[Effect, Event, None]
Asking = Generator[Effect, Event, Event]
Looking = Generator[Effect, Event, CardState]


class _EndedError(Exception):
    def __init__(self, end: Phase, problem: str, next_step: str, in_phase: Phase | None = None) -> None:
        super().__init__(problem)
        self.end, self.problem, self.next_step, self.in_phase = end, problem, next_step, in_phase


class _FaultedError(_EndedError):
    """The card was not reached, or did not do it."""


class Upgrade:
    """``token``: of this run, unlike any other. ``steady_s``: so long the new service is to be ready without a break.
    ``drain_within_s``: None to leave the end of what is open to the stop of the service. ``ends_trial``: a trial that
    is on is ended, whoever began it, and that is all."""

    def __init__(
        self,
        wanted: Wanted,
        *,
        token: str,
        deadlines: Deadlines,
        steady_s: float,
        drain_within_s: float | None = None,
        ends_trial: bool = False,
    ) -> None:
        self._wanted, self._token = wanted, token
        self._deadlines, self._steady_s, self._drain_within_s = deadlines, steady_s, drain_within_s
        self._ends_trial = ends_trial
        self._phase = Phase.CHECKING
        self._now_s = self._entered_s = 0.0
        self._state: CardState | None = None
        self._slot = ""
        self._is_armed = self._is_interrupted = False
        self._former_was_ready = False
        self._former_digest = ""
        self._done_bytes = 0
        self._text = ""
        self._notes: tuple[str, ...] = ()
        self._may_be_interrupted = True
        self._steps = self._run()

    def begin(self, now_s: float) -> Effect:
        self._now_s = self._entered_s = now_s
        return next(self._steps)

    def next(self, event: Event, now_s: float) -> Effect:
        """``event``: the answer to the last effect. Not to be called after an End."""
        self._now_s = now_s
        return self._steps.send(event)

    def interrupt(self) -> None:
        """The operator wants it to end: what :meth:`next` gives next leads there, over the way back if need be."""
        self._is_interrupted = True

    @property
    def progress(self) -> Progress:
        if self._phase is Phase.COPYING:
            return Progress(self._phase, self._done_bytes, sum(b.size_bytes for b in self._wanted.blobs), "")
        return Progress(self._phase, _ORDER.index(self._phase), _ORDER.index(Phase.ROLLING_BACK), self._text)

    # From the beginning to an end.

    def _run(self) -> Steps:
        try:
            yield from self._change()
            ended = _EndedError(Phase.DONE, "", "")
        except _EndedError as error:
            ended = error
        if self._is_armed and ended.end is not Phase.DONE:
            ended.in_phase = self._phase
            self._may_be_interrupted = False
            try:
                yield from self._give_back(ended)
            except _EndedError as error:
                ended = error
        yield End(self._outcome(ended))

    def _outcome(self, ended: _EndedError) -> Outcome:
        in_phase = ended.in_phase or self._phase
        return Outcome(
            end=ended.end,
            in_phase=in_phase,
            problem=ended.problem,
            next_step=ended.next_step,
            card_state=words.card_state(self._state),
            state=self._state,
            notes=self._notes,
        )

    def _change(self) -> Steps:
        state = yield from self._look()
        self._former_digest = state.committed_digest
        self._former_was_ready = (yield from self._probe()).is_ready
        if state.trial is not None:
            self._adopt(state)
        elif self._ends_trial:
            raise _EndedError(Phase.FAILED, *words.NO_TRIAL)
        elif state.committed_digest == self._wanted.digest:
            yield from self._wait_until_ready()
            self._note(words.ALREADY_THERE)
            return
        else:
            self._slot = state.spare
            if state.slots.get(self._slot) != self._wanted.digest:
                yield from self._fill(state)
            yield from self._arm()
            yield from self._drain()
        yield from self._switch()
        yield from self._probe_until_steady()
        yield from self._commit()

    def _wait_until_ready(self) -> Steps:
        """Of what is committed, on a card that may just have been restarted."""
        seen = yield from self._probe()
        while not seen.is_ready:
            if self._is_late():
                problem, step = words.COMMITTED_AND_NOT_READY
                raise _EndedError(Phase.FAILED, f"{problem}: {seen.reason}", step)
            yield from self._do(Wait(self._now_s + PROBE_S))
            seen = yield from self._probe()

    def _adopt(self, state: CardState) -> None:
        """A trial that another run left, or is at."""
        trial = state.trial
        assert trial is not None
        is_wanted = state.slots.get(trial.slot) == self._wanted.digest
        if not (self._ends_trial or is_wanted):
            raise _EndedError(Phase.FAILED, *words.other_trial(trial))
        self._slot, self._token, self._is_armed = trial.slot, trial.token, True
        self._former_was_ready = self._former_was_ready and not trial.is_started
        if self._ends_trial:
            raise _EndedError(Phase.ROLLED_BACK, "", "")
        self._note(words.WENT_ON)

    # What does not touch the service.

    def _fill(self, state: CardState) -> Steps:
        self._enter(Phase.COPYING)
        if not self._wanted.blobs:
            raise _EndedError(Phase.FAILED, *words.NOT_THERE)
        needed = {name for blob in self._wanted.blobs for name in (blob.digest, f"{blob.digest}.part")}
        if useless := tuple(sorted(set(state.blobs) - needed)):
            yield from self._insist(Forget(useless))
        for attempt in range(1, DAMAGED_ATTEMPTS + 1):
            yield from self._copy_all()
            self._enter(Phase.UNPACKING)
            event = yield from self._insist(Unpack(self._slot, self._wanted), passes=FaultKind.DAMAGED)
            if not isinstance(event, Faulted):
                break
            if attempt == DAMAGED_ATTEMPTS:
                raise _failed(event)
            self._enter(Phase.COPYING)
        yield from self._insist(Forget(tuple(blob.digest for blob in self._wanted.blobs)))

    def _copy_all(self) -> Steps:
        damaged = 0
        while True:
            state = yield from self._look()
            put = self._next_put(state)
            if put is None:
                return
            while put is not None:
                event = yield from self._do(put)
                if isinstance(event, Faulted):
                    damaged += event.kind is FaultKind.DAMAGED
                    if event.kind not in _PASSING | {FaultKind.DAMAGED} or damaged == DAMAGED_ATTEMPTS:
                        raise _failed(event)
                    if self._is_late():
                        raise self._late(event.message, event.next_step)
                    yield from self._do(Wait(self._now_s + RETRY_S))
                    break
                self._done_bytes += put.length_bytes
                if self._is_late():
                    raise self._late()
                put = _after(put)

    def _next_put(self, state: CardState) -> Put | None:
        """Where to go on with the first blob that is not there; and how much is."""
        there, found = 0, None
        for blob in self._wanted.blobs:
            if state.blobs.get(blob.digest) == blob.size_bytes:
                there += blob.size_bytes
                continue
            part = state.blobs.get(f"{blob.digest}.part", 0)
            there += min(part, blob.size_bytes)
            if found is None:
                found = Put(blob, part, max(0, min(PIECE_BYTES, blob.size_bytes - part)))
        self._done_bytes = there
        return found

    # What does.

    def _arm(self) -> Steps:
        self._enter(Phase.DRAINING)
        self._is_armed = True  # from the moment it is sent: whether it arrived may not be known
        yield from self._insist(Arm(self._slot, self._token, self._deadlines.trial_s, self._wanted.digest))

    def _drain(self) -> Steps:
        if self._drain_within_s is None:
            return
        event = yield from self._do(Drain(self._drain_within_s))
        if isinstance(event, Faulted):  # what is open then ends with the service, within its stop_grace_s
            self._note(f"not drained: {event.message}")

    def _switch(self) -> Steps:
        self._enter(Phase.SWITCHING)
        yield from self._insist(Switch(self._token))
        while not self._is_tried((yield from self._look())):
            if self._is_late():
                raise self._late(*words.STILL_STOPS)
            yield from self._do(Wait(self._now_s + PROBE_S))

    def _is_tried(self, state: CardState) -> bool:
        """Whether the slot's service was started. Raises when it will not be, or not any more."""
        trial = state.trial
        if trial is None or trial.token != self._token or trial.left_s <= 0:
            if state.committed == self._slot and state.is_last(self._token, "committed"):
                return True
            how = state.why_over(self._token) or "its time was over"
            raise _EndedError(Phase.FAILED, *words.gone_back(how))
        if trial.is_started and state.service.is_down:
            raise _EndedError(Phase.FAILED, *words.went_down(state.service))
        return trial.is_started and state.running == self._slot

    def _probe_until_steady(self) -> Steps:
        self._enter(Phase.PROBING)
        since_s: float | None = None
        while True:
            self._is_tried((yield from self._look()))
            seen = yield from self._probe()
            reason = words.not_yet(seen, self._wanted.version)
            self._text = reason
            if reason:
                since_s = None
            elif since_s is None:
                since_s = self._now_s
            elif self._now_s - since_s >= self._steady_s:
                return
            if self._is_late():
                raise self._late(reason or words.NOT_STEADY, words.PROBE_STEP)
            yield from self._do(Wait(self._now_s + PROBE_S))

    def _commit(self) -> Steps:
        self._enter(Phase.COMMITTING)
        yield from self._insist(Commit(self._token))
        state = yield from self._look()
        if state.committed != self._slot:
            raise _EndedError(Phase.FAILED, *words.gone_back(state.why_over(self._token) or "it was not committed"))

    # The way back.

    def _give_back(self, ended: _EndedError) -> Steps:
        """To the former service; or, where the new one was committed meanwhile, not. Raises what is then to be told."""
        self._enter(Phase.ROLLING_BACK)
        self._text = ended.problem
        how = "ended by mfctl" + (f" while {ended.in_phase.value}" if ended.in_phase else "")
        try:
            yield from self._insist(Abort(self._token, how))
            yield from self._wait_until_back(ended)
        except _FaultedError as error:
            self._note(words.not_reached(error.problem, self._deadlines.trial_s))
            raise _EndedError(Phase.FAILED, ended.problem or error.problem, error.next_step, ended.in_phase) from None

    def _wait_until_back(self, ended: _EndedError) -> Steps:
        reason = ""
        while not self._is_late():
            state = yield from self._look()
            if state.committed == self._slot:
                self._tell_committed()
            if not state.committed or (state.trial is not None and state.trial.token != self._token):
                raise _EndedError(Phase.FAILED, ended.problem, ended.next_step, ended.in_phase)
            if state.trial is None and state.running == state.committed and state.service is ServiceRuns.RUNNING:
                seen = yield from self._probe()
                if seen.is_ready or not self._former_was_ready:
                    raise _EndedError(Phase.ROLLED_BACK, ended.problem, ended.next_step, ended.in_phase)
                reason = seen.reason
            yield from self._do(Wait(self._now_s + PROBE_S))
        problem, step = words.not_back(ended.problem, reason)
        raise _EndedError(Phase.FAILED, problem, step, ended.in_phase)

    def _tell_committed(self) -> None:
        if self._ends_trial:
            raise _EndedError(Phase.FAILED, *words.COMMITTED_BEFORE)
        self._note(words.COMMITTED_AFTER_ALL)
        raise _EndedError(Phase.DONE, "", "")

    # Asking.

    def _do(self, effect: Effect) -> Asking:
        event = yield effect
        if self._is_interrupted and self._may_be_interrupted:
            raise _EndedError(Phase.STOPPED, "interrupted", words.GO_ON)
        return event

    def _insist(self, effect: Effect, *, passes: FaultKind | None = None) -> Asking:
        """Until it is done: each effect can be repeated. Raises for a fault that does not pass, but for ``passes``."""
        while True:
            event = yield from self._do(effect)
            if not isinstance(event, Faulted):
                if isinstance(event, Acted):
                    self._note(event.note)
                return event
            if event.kind is passes:
                return event
            if event.kind not in _PASSING:
                raise _failed(event)
            if self._is_late():
                raise self._late(event.message, event.next_step)
            yield from self._do(Wait(self._now_s + RETRY_S))

    def _look(self) -> Looking:
        event = yield from self._insist(Look())
        assert isinstance(event, Looked), event
        self._state = event.state
        return event.state

    def _probe(self) -> Generator[Effect, Event, Probed]:
        event = yield from self._insist(Probe())
        assert isinstance(event, Probed), event
        return event

    def _enter(self, phase: Phase) -> None:
        self._phase, self._entered_s, self._text = phase, self._now_s, ""

    def _is_late(self) -> bool:
        return self._now_s - self._entered_s >= self._deadlines.of(self._phase)

    def _late(self, why: str = "", next_step: str = words.GO_ON) -> _FaultedError:
        took = f"{self._phase.value} took longer than the {self._deadlines.of(self._phase):g} s it may take"
        return _FaultedError(Phase.FAILED, f"{took}: {why}" if why else took, next_step)

    def _note(self, note: str) -> None:
        if note and note not in self._notes:
            self._notes = (*self._notes, note)


def _after(put: Put) -> Put | None:
    """The next piece of the same blob; None behind its end."""
    offset_bytes = put.offset_bytes + put.length_bytes
    left_bytes = put.blob.size_bytes - offset_bytes
    return Put(put.blob, offset_bytes, min(PIECE_BYTES, left_bytes)) if left_bytes > 0 else None


def _failed(fault: Faulted) -> _FaultedError:
    return _FaultedError(Phase.FAILED, fault.message, fault.next_step)
