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

from typing import Final

from meshfusion.dpu.image.slots import words
from meshfusion.dpu.image.slots.card_state import CardState, ServiceRuns
from meshfusion.dpu.image.slots.filling import Filling
from meshfusion.dpu.image.slots.talk import EndedError, FaultedError, Steps, Talk
from meshfusion.dpu.image.slots.types import (
    Abort,
    Arm,
    Commit,
    Deadlines,
    Drain,
    Effect,
    End,
    Event,
    Faulted,
    Outcome,
    Phase,
    Progress,
    Switch,
    Wait,
    Wanted,
)

PROBE_S: Final = 2.0
_ORDER: Final = tuple(Phase)


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
        self._steady_s, self._drain_within_s, self._ends_trial = steady_s, drain_within_s, ends_trial
        self._talk = Talk(deadlines)
        self._filling = Filling(self._talk, wanted)
        self._slot = ""
        self._is_armed = self._former_was_ready = False
        self._steps = self._run()

    def begin(self, now_s: float) -> Effect:
        self._talk.now_s = now_s
        self._talk.enter(Phase.CHECKING)
        return next(self._steps)

    def next(self, event: Event, now_s: float) -> Effect:
        """``event``: the answer to the last effect. Not to be called after an End."""
        self._talk.now_s = now_s
        return self._steps.send(event)

    def interrupt(self) -> None:
        """The operator wants it to end: what :meth:`next` gives next leads there, over the way back if need be."""
        self._talk.is_interrupted = True

    @property
    def progress(self) -> Progress:
        if self._talk.phase is Phase.COPYING:
            return Progress(self._talk.phase, self._filling.done_bytes, self._filling.total_bytes, "")
        return Progress(
            self._talk.phase, _ORDER.index(self._talk.phase), _ORDER.index(Phase.ROLLING_BACK), self._talk.text
        )

    # From the beginning to an end.

    def _run(self) -> Steps:
        try:
            yield from self._change()
            ended = EndedError(Phase.DONE, "", "")
        except EndedError as error:
            ended = error
        if self._is_armed and ended.end is not Phase.DONE:
            ended.in_phase = self._talk.phase
            self._talk.may_be_interrupted = False
            try:
                yield from self._give_back(ended)
            except EndedError as error:
                ended = error
        yield End(self._outcome(ended))

    def _outcome(self, ended: EndedError) -> Outcome:
        in_phase = ended.in_phase or self._talk.phase
        return Outcome(
            end=ended.end,
            in_phase=in_phase,
            problem=ended.problem,
            next_step=ended.next_step,
            card_state=words.card_state(self._talk.state),
            state=self._talk.state,
            notes=self._talk.notes,
        )

    def _change(self) -> Steps:
        state = yield from self._talk.look()
        self._former_was_ready = (yield from self._talk.probe()).is_ready
        if state.trial is not None:
            self._adopt(state)
        elif self._ends_trial:
            raise EndedError(Phase.FAILED, *words.NO_TRIAL)
        elif state.committed_digest == self._wanted.digest:
            yield from self._wait_until_ready()
            self._talk.note(words.ALREADY_THERE)
            return
        else:
            self._slot = state.spare
            if state.slots.get(self._slot) != self._wanted.digest:
                yield from self._filling.run(self._slot, state)
            yield from self._arm()
            yield from self._drain()
        yield from self._switch()
        yield from self._probe_until_steady()
        yield from self._commit()

    def _wait_until_ready(self) -> Steps:
        """Of what is committed, on a card that may just have been restarted."""
        seen = yield from self._talk.probe()
        while not seen.is_ready:
            if self._talk.is_late:
                problem, step = words.COMMITTED_AND_NOT_READY
                raise EndedError(Phase.FAILED, f"{problem}: {seen.reason}", step)
            yield from self._talk.do(Wait(self._talk.now_s + PROBE_S))
            seen = yield from self._talk.probe()

    def _adopt(self, state: CardState) -> None:
        """A trial that another run left, or is at."""
        trial = state.trial
        assert trial is not None
        is_wanted = state.slots.get(trial.slot) == self._wanted.digest
        if not (self._ends_trial or is_wanted):
            raise EndedError(Phase.FAILED, *words.other_trial(trial))
        self._slot, self._token, self._is_armed = trial.slot, trial.token, True
        self._former_was_ready = self._former_was_ready and not trial.is_started
        if self._ends_trial:
            raise EndedError(Phase.ROLLED_BACK, "", "")
        self._talk.note(words.WENT_ON)

    # What touches the service.

    def _arm(self) -> Steps:
        self._talk.enter(Phase.DRAINING)
        self._is_armed = True  # from the moment it is sent: whether it arrived may not be known
        yield from self._talk.insist(Arm(self._slot, self._token, self._talk.deadlines.trial_s, self._wanted.digest))

    def _drain(self) -> Steps:
        if self._drain_within_s is None:
            return
        event = yield from self._talk.do(Drain(self._drain_within_s))
        if isinstance(event, Faulted):  # what is open then ends with the service, within its stop_grace_s
            self._talk.note(f"not drained: {event.message}")

    def _switch(self) -> Steps:
        self._talk.enter(Phase.SWITCHING)
        yield from self._talk.insist(Switch(self._token))
        while not self._is_tried((yield from self._talk.look())):
            if self._talk.is_late:
                raise self._talk.late(*words.STILL_STOPS)
            yield from self._talk.do(Wait(self._talk.now_s + PROBE_S))

    def _is_tried(self, state: CardState) -> bool:
        """Whether the slot's service was started. Raises when it will not be, or not any more."""
        trial = state.trial
        if trial is None or trial.token != self._token or trial.left_s <= 0:
            if state.committed == self._slot and state.is_last(self._token, "committed"):
                return True
            how = state.why_over(self._token) or "its time was over"
            raise EndedError(Phase.FAILED, *words.gone_back(how))
        if trial.is_started and state.service.is_down:
            raise EndedError(Phase.FAILED, *words.went_down(state.service))
        return trial.is_started and state.running == self._slot

    def _probe_until_steady(self) -> Steps:
        self._talk.enter(Phase.PROBING)
        since_s: float | None = None
        while True:
            self._is_tried((yield from self._talk.look()))
            seen = yield from self._talk.probe()
            reason = words.not_yet(seen, self._wanted.version)
            self._talk.text = reason
            if reason:
                since_s = None
            elif since_s is None:
                since_s = self._talk.now_s
            elif self._talk.now_s - since_s >= self._steady_s:
                return
            if self._talk.is_late:
                raise self._talk.late(reason or words.NOT_STEADY, words.PROBE_STEP)
            yield from self._talk.do(Wait(self._talk.now_s + PROBE_S))

    def _commit(self) -> Steps:
        self._talk.enter(Phase.COMMITTING)
        yield from self._talk.insist(Commit(self._token))
        state = yield from self._talk.look()
        if state.committed != self._slot:
            raise EndedError(Phase.FAILED, *words.gone_back(state.why_over(self._token) or "it was not committed"))

    # The way back.

    def _give_back(self, ended: EndedError) -> Steps:
        """To the former service; or, where the new one was committed meanwhile, not. Raises what is then to be told."""
        self._talk.enter(Phase.ROLLING_BACK)
        self._talk.text = ended.problem
        how = "ended by mfctl" + (f" while {ended.in_phase.value}" if ended.in_phase else "")
        try:
            yield from self._talk.insist(Abort(self._token, how))
            yield from self._wait_until_back(ended)
        except FaultedError as error:
            self._talk.note(words.not_reached(error.problem, self._talk.deadlines.trial_s))
            raise EndedError(Phase.FAILED, ended.problem or error.problem, error.next_step, ended.in_phase) from None

    def _wait_until_back(self, ended: EndedError) -> Steps:
        reason = ""
        while not self._talk.is_late:
            state = yield from self._talk.look()
            if state.committed == self._slot:
                self._tell_committed()
            if not state.committed or (state.trial is not None and state.trial.token != self._token):
                raise EndedError(Phase.FAILED, ended.problem, ended.next_step, ended.in_phase)
            if state.trial is None and state.running == state.committed and state.service is ServiceRuns.RUNNING:
                seen = yield from self._talk.probe()
                if seen.is_ready or not self._former_was_ready:
                    raise EndedError(Phase.ROLLED_BACK, ended.problem, ended.next_step, ended.in_phase)
                reason = seen.reason
            yield from self._talk.do(Wait(self._talk.now_s + PROBE_S))
        problem, step = words.not_back(ended.problem, reason)
        raise EndedError(Phase.FAILED, problem, step, ended.in_phase)

    def _tell_committed(self) -> None:
        if self._ends_trial:
            raise EndedError(Phase.FAILED, *words.COMMITTED_BEFORE)
        self._talk.note(words.COMMITTED_AFTER_ALL)
        raise EndedError(Phase.DONE, "", "")
